"""The protocol of what a run minimizes, and what its implementations have in common.

Losses are SUMS over a micro-batch, so that sums over micro-batches and ranks add up to the sum over
the batch exactly; the division by the batch's total weight comes after the all-reduce.

Supervised (SFT): sum over the tokens that count of -log p(token); weight: their number, so the
batch's loss is the mean over its tokens.

Preference (DPO, Rafailov et al. 2023, arXiv:2305.18290, equation 7): sum over pairs of
-log sigmoid(beta * (r_chosen - r_rejected)), where r is the log-probability of the answer minus
that of the reference model; weight: the number of pairs. The reference is the model before this
training: the same weights with the adapter off, in the same micro-batch; in full fine-tuning its
log-probabilities are computed once from the base weights (see `reference_model`).

Shape letters: N tokens that count, P pairs, S segments (2 P).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from agents.trainer.model.micro_batch import MicroBatch

LOSS, MARGIN, CORRECT = range(3)
"""Slots of what an objective sums over a batch: loss, reward margin, pairs ranked correctly."""
SUMS = ("loss", "margin", "correct")
"""Names of the slots in the statistics of a step."""
NUM_SUMS = len(SUMS)


class Objective(Protocol):
    """Computes the loss of micro-batches."""

    def look_up(self, batch: MicroBatch, places: Sequence[int]) -> Tensor | None:
        """Return what the loss needs beside the micro-batch, on its device; None for nothing.

        Apart from `compute`, because a recorded pass can read a table in host memory only once.

        Args:
            batch: the micro-batch.
            places: index of each example in the data, training first, evaluation after it.
        """

    def compute(
        self, batch: MicroBatch, known: Tensor | None, gradient_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate, and the sums (3,) in float64, detached.

        Args:
            batch: the micro-batch; the dropout clock is set to it.
            known: what `look_up` returned for it.
            gradient_scale: factor on the loss, a scalar, and so on the gradients (fp16); None for
                1.
        """
