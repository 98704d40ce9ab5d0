"""Which objective a run file names: one row for each `objective` of a spec.

A new one is a module beside this with its loss, a row here, and its name in `RunSpec.objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from agents.contract.spec import RunSpec
from agents.trainer.model.forward import Forward
from agents.trainer.objectives.dpo import Preference
from agents.trainer.objectives.objective import CORRECT, MARGIN, Objective
from agents.trainer.objectives.sft import Supervised


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveKind:
    """What the trainer knows of an objective besides its loss."""

    make: Callable[[RunSpec, Forward, Tensor | None], Objective]
    """Called with the spec, the forward pass, and the reference table (P, 2) if one is needed."""
    metrics: Mapping[str, int] = field(default_factory=dict)
    """Fields of step and evaluation records beside the loss -> slot of `SUMS` with their sum."""
    weighs_tokens: bool = False
    """Whether the loss is a mean over tokens, so that its exponential is a perplexity."""
    has_reference: bool = False
    """Whether it compares with the model as it was before the training."""


OBJECTIVES: dict[str, ObjectiveKind] = {
    "sft": ObjectiveKind(
        make=lambda spec, forward, reference_P2: Supervised(forward),
        weighs_tokens=True,
    ),
    "dpo": ObjectiveKind(
        make=lambda spec, forward, reference_P2: Preference(forward, spec.dpo_beta, reference_P2),
        metrics={"reward_margin": MARGIN, "reward_accuracy": CORRECT},
        has_reference=True,
    ),
}


def make_objective(
    spec: RunSpec, forward: Forward, reference_P2: Tensor | None = None
) -> Objective:
    """Return what the spec minimizes; see `ObjectiveKind.make`."""
    return OBJECTIVES[spec.objective].make(spec, forward, reference_P2)


def needs_reference_table(spec: RunSpec) -> bool:
    """Return whether the reference has to be evaluated before the training.

    With an adapter the reference stays at hand: the same weights without the adapter.
    """
    return OBJECTIVES[spec.objective].has_reference and spec.adapter.kind == "full"


def name_metrics(objective: str, means: Sequence[float]) -> dict[str, float]:
    """Return the fields that a record has beside the loss.

    Args:
        objective: as the spec has it.
        means: each of `SUMS` over the weight of the batch.

    >>> name_metrics("dpo", [0.5, 1.25, 0.75])
    {'reward_margin': 1.25, 'reward_accuracy': 0.75}
    """
    return {name: means[slot] for name, slot in OBJECTIVES[objective].metrics.items()}
