"""What is minimised: supervised fine-tuning, or direct preference optimisation.

Both are SUMS over a micro-batch, so that sums over micro-batches and ranks add up to the sum over
the batch exactly; the division by the batch's total weight comes after the all-reduce.

Supervised (SFT): sum over the tokens that count of -log p(token); weight: their number, so the
batch's loss is the mean over its tokens.

Preference (DPO, Rafailov et al. 2023, arXiv:2305.18290, equation 7): sum over pairs of
-log sigmoid(beta * (r_chosen - r_rejected)), where r is the log-probability of the answer minus
that of the reference model; weight: the number of pairs. The reference is the model before this
training: the same weights with the adapter off, in the same micro-batch; in full fine-tuning its
log-probabilities are computed once from the base weights (`reference.py`).

Shape letters: N tokens that count, P pairs, S segments (2 P).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor

from agents.spec import RunSpec
from agents.trainer.forward import Forward
from agents.trainer.micro import MicroBatch

LOSS, MARGIN, CORRECT = range(3)
"""Slots of what an objective sums over a batch: loss, reward margin, pairs ranked rightly."""
SUMS = ("loss", "margin", "correct")
NUM_SUMS = len(SUMS)


class Objective(Protocol):
    """Computes the loss of micro-batches."""

    def compute(
        self, batch: MicroBatch, places: Sequence[int], gradient_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return what to differentiate, and the sums (3,) in float64, detached.

        Args:
            batch: the micro-batch; the dropout clock is set to it.
            places: index of each example in the data.
            gradient_scale: the gradient is this many times the true one.
        """


class Supervised:
    """The sum of the cross-entropies of the tokens that count."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def compute(
        self, batch: MicroBatch, places: Sequence[int], gradient_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the sums; see `Objective`."""
        features = self._forward.features(batch)
        loss = self._forward.head.sum_loss(features, batch.label_N, gradient_scale)
        return loss, F.pad(loss.detach().double().reshape(1), (0, NUM_SUMS - 1))


class Preference:
    """The sum of the DPO losses of pairs.

    Args:
        reference_P2: log-probabilities of the chosen and the rejected answer of each pair of the
            data under the reference model, in float64 on the CPU; None: the model with its adapter
            off is the reference.
    """

    def __init__(self, forward: Forward, beta: float, reference_P2: Tensor | None = None) -> None:
        self._forward = forward
        self._beta = beta
        self._reference_P2 = reference_P2

    def compute(
        self, batch: MicroBatch, places: Sequence[int], gradient_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the sums; see `Objective`."""
        reference_P2 = self._refer(batch, places)
        policy_P2 = sum_log_probabilities(self._forward, batch)
        reward_P2 = self._beta * (policy_P2 - reference_P2.to(policy_P2))
        margin_P = reward_P2[:, 0] - reward_P2[:, 1]
        loss = -F.logsigmoid(margin_P).sum()
        found = margin_P.detach().double()
        sums = torch.stack([loss.detach().double(), found.sum(), (found > 0).double().sum()])
        return loss * gradient_scale, sums

    def _refer(self, batch: MicroBatch, places: Sequence[int]) -> Tensor:
        if self._reference_P2 is not None:
            return self._reference_P2[list(places)].to(batch.label_N.device)
        with self._forward.adapter_off():
            return sum_log_probabilities(self._forward, batch)


def sum_log_probabilities(forward: Forward, batch: MicroBatch) -> Tensor:
    """Return the log-probability of the chosen and the rejected answer of each pair (P, 2)."""
    features = forward.features(batch)
    token_N = forward.head.log_probabilities(features, batch.label_N)
    sums_S = torch.zeros(batch.num_segments, dtype=token_N.dtype, device=token_N.device)
    return sums_S.index_add(0, batch.segment_N, token_N).unflatten(0, (-1, 2))


def make_objective(
    spec: RunSpec, forward: Forward, reference_P2: Tensor | None = None
) -> Objective:
    """Return what the spec minimises."""
    if spec.objective == "dpo":
        return Preference(forward, spec.dpo_beta, reference_P2)
    return Supervised(forward)


def name_sums(objective: str, mean_sums: Sequence[float]) -> dict[str, float]:
    """Return what a step record tells beside the loss, from the sums over the batch's weight.

    >>> name_sums("dpo", [0.5, 1.25, 0.75])
    {'reward_margin': 1.25, 'reward_accuracy': 0.75}
    """
    if objective != "dpo":
        return {}
    return {"reward_margin": mean_sums[MARGIN], "reward_accuracy": mean_sums[CORRECT]}
