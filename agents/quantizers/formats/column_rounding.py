"""GPTQ's rounding: column by column, spreading each error over the following columns.

The loop is that of gptqmodel 7.6 (`GPTQ.quantize`), reduced to its use here: groups of columns that
share a scale, with inputs in the order of their groups' importance. It needs two thirds of the
memory: rounded weights are kept in the model's type at once, losses of single weights are not kept,
and products are subtracted in place.

Shape letters: O outputs, I inputs, K columns of a block, P groups in such a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 128
"""Columns of a block; gptqmodel's kernel requires this number."""


class BlockScales(NamedTuple):
    """Rounding parameters of a block's columns."""

    scales: Tensor
    """Scale of each group, float32 (P, O)."""
    zeros: Tensor
    """Code of zero in each group, float32 (P, O)."""
    groups: Tensor
    """Group of each column, int32 (K,)."""
    most: int
    """Maximum code."""


RoundBlock = Callable[[Tensor, Tensor, BlockScales], tuple[Tensor, Tensor, Tensor]]
"""Function that rounds a block: takes its weights (O, K), which it overwrites, its part of U (K, K)
and its scales; returns rounded weights, errors and losses, each (O, K)."""


class Scaling(Protocol):
    """The used part of gptqmodel's `Quantizer`."""

    scale: Tensor
    zero: Tensor
    maxq: Tensor

    def find_params(self, x: Tensor, weight: bool = False) -> None:
        """Set scale and zero point (O, 1) of some columns."""


class Rounded(NamedTuple):
    """A linear layer's weights after rounding."""

    weight: Tensor
    """Rounded weights in the type of the model, (O, I)."""
    scales: list[Tensor]
    """Scale of each group, (O, 1)."""
    zeros: list[Tensor]
    loss: float
    """Sum of squared errors, weighted as in GPTQ."""


def round_columns(
    weight_OI: Tensor,
    factor_II: Tensor,
    group: int,
    scaling: Scaling,
    dtype: torch.dtype,
    round_block: RoundBlock | None = None,
) -> Rounded:
    """Return the rounded weights; `weight_OI` is overwritten.

    Args:
        weight_OI: weights, in float32.
        factor_II: U with U'U = H^-1 in its upper triangle, see `hessian.factor_inverse`.
        group: number of columns that share a scale.
        scaling: finds scales.
        dtype: type of the model.
        round_block: rounds whole blocks of 128 columns; None: plain PyTorch.
    """
    num_columns, device = weight_OI.shape[1], weight_OI.device
    rounded_OI = torch.empty(weight_OI.shape, dtype=dtype, device=device)
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for begin in range(0, num_columns, BLOCK):
        end = min(begin + BLOCK, num_columns)
        # A block's weights are unchanged until it is rounded, so its groups are measured first.
        for first in range(begin + -begin % group, end, group):
            scaling.find_params(weight_OI[:, first : first + group], weight=True)
            scales.append(scaling.scale)
            zeros.append(scaling.zero)
        first_group = begin // group
        places_K = torch.arange(begin, end, device=device, dtype=torch.int32) // group - first_group
        about = BlockScales(
            torch.stack([scale.flatten() for scale in scales[first_group:]]),
            torch.stack([zero.flatten() for zero in zeros[first_group:]]),
            places_K,
            int(scaling.maxq),
        )
        # The kernel takes whole blocks only.
        whole = round_block if end - begin == BLOCK else None
        rounded_OK, errors_OK, losses_OK = (whole or round_plainly)(
            weight_OI[:, begin:end].clone(), factor_II[begin:end, begin:end], about
        )
        rounded_OI[:, begin:end] = rounded_OK
        loss += losses_OK.sum(dtype=torch.float64) / 2
        # The errors of the block change all later columns, by one matrix product.
        weight_OI[:, end:].addmm_(errors_OK, factor_II[begin:end, end:], alpha=-1)
    return Rounded(rounded_OI, scales, zeros, float(loss))


def round_plainly(
    weight_OK: Tensor, factor_KK: Tensor, about: BlockScales
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a block in plain PyTorch; see `RoundBlock`."""
    rounded_OK, errors_OK, losses_OK = (torch.empty_like(weight_OK) for _ in range(3))
    for column, place in enumerate(about.groups.tolist()):
        scale_O, zero_O = about.scales[place], about.zeros[place]
        wanted_O, root = weight_OK[:, column], factor_KK[column, column]
        codes_O = torch.clamp(torch.round(wanted_O / scale_O) + zero_O, 0, about.most)
        rounded_OK[:, column] = scale_O * (codes_O - zero_O)
        missed_O = wanted_O - rounded_OK[:, column]
        losses_OK[:, column] = missed_O.square() / root.square()
        errors_OK[:, column] = missed_O / root
        weight_OK[:, column:] -= torch.outer(errors_OK[:, column], factor_KK[column, column:])
    return rounded_OK, errors_OK, losses_OK


def order_inputs(permute: Any, diagonal_I: Tensor, group: int) -> tuple[Tensor, list[int]]:
    """Return inputs, and groups, in the order of rounding: the most important first.

    Args:
        permute: gptqmodel's module `quantization.gar`.
        diagonal_I: diagonal of the Hessian.
        group: number of inputs that share a scale.
    """
    local, values = permute.compute_local_perms(diagonal_I, group, return_values=True)
    groups = permute.compute_global_perm(diagonal_I, group, precomputed_values=values)
    order_I = permute.compose_final_perm(local, groups, group)
    return permute.extend_perm_with_tail(order_I, len(diagonal_I)), groups.tolist()
