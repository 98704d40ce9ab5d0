"""Which objective a run file names."""

from __future__ import annotations

from torch import Tensor

from agents.contract.spec import RunSpec
from agents.trainer.model.forward import Forward
from agents.trainer.objectives.dpo import Preference
from agents.trainer.objectives.objective import Objective
from agents.trainer.objectives.sft import Supervised


def make_objective(
    spec: RunSpec, forward: Forward, reference_P2: Tensor | None = None
) -> Objective:
    """Return what the spec minimises."""
    if spec.objective == "dpo":
        return Preference(forward, spec.dpo_beta, reference_P2)
    return Supervised(forward)
