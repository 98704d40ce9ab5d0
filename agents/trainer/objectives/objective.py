"""Protocol of the loss that a run minimizes, and code shared by its implementations.

Losses are SUMS over a micro-batch, so that sums over micro-batches and ranks add up exactly to the
sum over the batch; the division by the batch's total weight comes after the all-reduce.

Supervised (SFT): sum over the tokens that count of -w log p(token), where w is 1 unless the data
weighs its messages; the weight is the sum of w, so the batch's loss is the mean over its tokens.

Preference (DPO, Rafailov et al. 2023, arXiv:2305.18290, equation 7): sum over pairs of -log
sigmoid(beta * (r_chosen - r_rejected)), where r is the log-probability of the answer minus that of
the reference model; the weight is the number of pairs. The reference is the model before this
training: the same weights with the adapter off, in the same micro-batch; in full fine-tuning its
log-probabilities are computed once from the base weights (see `reference_model`).

Shape letters: N tokens that count, R rows, K segments of each row, S segments (R K).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from agents.trainer.model.forward import Forward
from agents.trainer.model.micro_batch import MicroBatch


class Objective(Protocol):
    """Computes the loss of micro-batches."""

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums of `compute`, as in the objective's row: the loss first."""

    def look_up(self, batch: MicroBatch, places: Sequence[int]) -> Tensor | None:
        """Return further inputs of the loss for a micro-batch, on its device; None without any.

        Separate from `compute`, because a recorded pass can read a table in host memory only once.

        Args:
            batch: the micro-batch.
            places: index of each example in the data, training first, evaluation after it.
        """

    def compute(
        self, batch: MicroBatch, known: Tensor | None, gradient_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate, and all `sums` in float64, detached.

        Args:
            batch: the micro-batch; the dropout clock is set to it.
            known: result of `look_up` for it.
            gradient_scale: factor on the loss and its gradients (fp16), a scalar; None for 1.
        """


def sum_log_probabilities(forward: Forward, batch: MicroBatch, num_segments: int) -> Tensor:
    """Return the log-probabilities (R, K) of the targets of each segment of each row.

    Args:
        forward: forward pass of the model.
        batch: rows of `num_segments` segments each, in their order.
        num_segments: K.
    """
    features = forward.features(batch)
    token_N = forward.head.log_probabilities(features, batch.label_N)
    sums_S = torch.zeros(batch.num_segments, dtype=token_N.dtype, device=token_N.device)
    return sums_S.index_add(0, batch.segment_N, token_N).unflatten(0, (-1, num_segments))
