"""Objective of a rank without the last layers: features for the next stage.

The rank with the last layers computes the objective itself. A stage that is timed alone minimizes
the mean square of its features, which takes the same passes as training.

Shape letters: M tokens of the flat row, H hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agents.contract.objectives import ObjectiveTraits
from agents.trainer.model.forward import Forward
from agents.trainer.model.micro_batch import MicroBatch


class PassOn:
    """Passes features on; an `Objective` for a stage that is timed alone.

    Args:
        forward: passes through the layers of this rank.
        objective: row of the run's objective. If it compares with the model without its adapter,
            both features are passed on.
    """

    def __init__(self, forward: Forward, objective: ObjectiveTraits) -> None:
        self._forward = forward
        self._has_reference = objective.has_reference
        self.sums = objective.sums

    def pass_on(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Return the features (M, H) with the adapter, and those without it if needed."""
        plain_MH = None
        if self._has_reference:
            with self._forward.without_adapter():
                plain_MH = self._forward.outputs(batch)
        return self._forward.outputs(batch), plain_MH

    def look_up(self, batch: MicroBatch, places: Sequence[int]) -> Tensor | None:
        """Return None: features need only the tokens."""
        return None

    def compute(
        self, batch: MicroBatch, known: Tensor | None, gradient_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return a loss for timing, and sums of zero; see `Objective`."""
        hidden_MH, _ = self.pass_on(batch)
        sums = torch.zeros(len(self.sums), dtype=torch.float64, device=hidden_MH.device)
        return hidden_MH.float().square().mean(), sums
