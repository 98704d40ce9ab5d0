"""Direct preference optimization (arXiv:2305.18290)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from agents.contract.objectives import OBJECTIVES
from agents.trainer.model.forward import Forward
from agents.trainer.model.micro_batch import MicroBatch, copy_to_device
from agents.trainer.objectives.objective import sum_log_probabilities


class Preference:
    """Sum of the DPO losses of pairs.

    Args:
        reference_P2: log-probabilities of the chosen and the rejected answer of each pair of the
            data under the reference model, in float64 on the CPU; None if the model with its
            adapter off is the reference.
    """

    sums = OBJECTIVES["dpo"].sums

    def __init__(self, forward: Forward, beta: float, reference_P2: Tensor | None = None) -> None:
        self._forward = forward
        self._beta = beta
        self._reference_P2 = reference_P2

    def look_up(self, batch: MicroBatch, places: Sequence[int]) -> Tensor | None:
        """Return the log-probabilities of the reference (P, 2), or None if the model has them."""
        if self._reference_P2 is None:
            return None
        known_P2 = self._reference_P2[list(places)]
        missing = batch.num_segments // 2 - len(known_P2)
        return copy_to_device(F.pad(known_P2, (0, 0, 0, missing)).numpy(), batch.label_N.device)

    def compute(
        self, batch: MicroBatch, known: Tensor | None, gradient_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the sums; see `Objective`."""
        reference_P2 = self._refer(batch) if known is None else known
        policy_P2 = sum_log_probabilities(self._forward, batch, 2)
        reward_P2 = self._beta * (policy_P2 - reference_P2.to(policy_P2))
        margin_P = reward_P2[:, 0] - reward_P2[:, 1]
        loss_P = -F.logsigmoid(margin_P)
        # In float64: the sums must not depend on the cut into micro-batches.
        wide_P = margin_P.detach().double()
        is_correct_P = (wide_P > 0).double()
        if batch.is_real_S is not None:
            # Pairs of padding have a margin of 0, but a loss of log 2.
            loss_P = loss_P * batch.is_real_S[::2]
            is_correct_P *= batch.is_real_S[::2]
        loss = loss_P.sum()
        sums = torch.stack([loss.detach().double(), wide_P.sum(), is_correct_P.sum()])
        return loss if gradient_scale is None else loss * gradient_scale, sums

    def _refer(self, batch: MicroBatch) -> Tensor:
        with self._forward.without_adapter():
            return sum_log_probabilities(self._forward, batch, 2)
