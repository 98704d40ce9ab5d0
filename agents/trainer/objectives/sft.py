"""Supervised fine-tuning: the cross-entropy of the tokens that count."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from agents.contract.objectives import OBJECTIVES
from agents.trainer.model.forward import Forward
from agents.trainer.model.micro_batch import MicroBatch


class Supervised:
    """Sum of the cross-entropies of the tokens that count, each times its weight."""

    sums = OBJECTIVES["sft"].sums

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def look_up(self, batch: MicroBatch, places: Sequence[int]) -> Tensor | None:
        """Return None: the loss needs only the labels."""
        return None

    def compute(
        self, batch: MicroBatch, known: Tensor | None, gradient_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the sums; see `Objective`."""
        features = self._forward.features(batch)
        loss = self._forward.head.sum_loss(features, batch.label_N, gradient_scale, batch.weight_N)
        return loss, loss.detach().double().reshape(1)
