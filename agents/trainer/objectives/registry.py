"""Which loss an objective has: one row each; its traits are in `agents/contract/objectives.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import RunSpec
from agents.trainer.model.forward import Forward
from agents.trainer.objectives.dpo import Preference
from agents.trainer.objectives.objective import Objective
from agents.trainer.objectives.sft import Supervised


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownOfRows:
    """What is known of each row of the data: of training, then of evaluation."""

    reference: Tensor | None = None
    """Log-probabilities (R, K) under the reference model, in float64 on the CPU; None: the model
    with its adapter off is the reference, or the objective needs none."""
    labels: Tensor | None = None
    """Labels (R,) that the data gives, in float32 on the CPU; None: it gives none."""


LOSSES: dict[str, Callable[[RunSpec, Forward, KnownOfRows], Objective]] = {
    "sft": lambda spec, forward, known: Supervised(forward),
    "dpo": lambda spec, forward, known: Preference(forward, spec.dpo_beta, known.reference),
}


def make_objective(spec: RunSpec, forward: Forward, known: KnownOfRows) -> Objective:
    """Return what the spec minimizes."""
    return LOSSES[spec.objective](spec, forward, known)


def needs_reference_table(spec: RunSpec) -> bool:
    """Return whether the reference has to be evaluated before the training.

    With an adapter the reference stays at hand: the same weights without the adapter.
    """
    return OBJECTIVES[spec.objective].has_reference and spec.adapter.kind == "full"
