"""Losses by objective, one row each; the traits are in `agents/contract/objectives.py`."""

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
    """Precomputed values for each row of the data: training first, then evaluation."""

    reference: Tensor | None = None
    """Log-probabilities (R, K) under the reference model, in float64 on the CPU; None if the model
    with its adapter off is the reference, or the objective needs none.
    """
    labels: Tensor | None = None
    """Labels (R,) of the data, in float32 on the CPU; None without labels."""


LOSSES: dict[str, Callable[[RunSpec, Forward, KnownOfRows], Objective]] = {
    "sft": lambda spec, forward, known: Supervised(forward),
    "dpo": lambda spec, forward, known: Preference(forward, spec.dpo_beta, known.reference),
}


def make_objective(spec: RunSpec, forward: Forward, known: KnownOfRows) -> Objective:
    """Return the objective that the spec names."""
    return LOSSES[spec.objective](spec, forward, known)


def needs_reference_table(spec: RunSpec) -> bool:
    """Return whether the reference has to be evaluated before training.

    With an adapter the reference stays available: the same weights without the adapter.
    """
    return OBJECTIVES[spec.objective].has_reference and spec.adapter.kind == "full"
