"""GPTQ's rounding: column by column, each error spread over the columns that follow.

The loop is that of gptqmodel 7.6 (`GPTQ.quantize`), as far as it is used here: groups of columns
that share a scale, with inputs in the order of their groups' importance. It needs two thirds of its
memory: rounded weights are kept in the type of the model at once, the losses of single weights not
at all, and products are subtracted where they are computed.

Shape letters: O outputs, I inputs, K columns of a block, P groups that such a block has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 128
"""Columns of a block; gptqmodel's kernel takes no other number."""


class BlockScales(NamedTuple):
    """How the columns of a block are rounded."""

    scales: Tensor
    """Of each group, float32 (P, O)."""
    zeros: Tensor
    """Codes of zero, float32 (P, O)."""
    groups: Tensor
    """Group of each column, int32 (K,)."""
    most: int
    """Largest code."""


RoundBlock = Callable[[Tensor, Tensor, BlockScales], tuple[Tensor, Tensor, Tensor]]
"""Function that rounds a block: takes its weights (O, K), which it uses up, its part of U (K, K)
and its scales; returns rounded weights, errors and losses, each (O, K)."""


class Scaling(Protocol):
    """What gptqmodel's `Quantizer` is used for."""

    scale: Tensor
    zero: Tensor
    maxq: Tensor

    def find_params(self, x: Tensor, weight: bool = False) -> None:
        """Set scale and zero point (O, 1) of some columns."""


class Rounded(NamedTuple):
    """A linear layer's weights as they come back from their codes."""

    weight: Tensor
    """In the type of the model, (O, I)."""
    scales: list[Tensor]
    """Of each group, (O, 1)."""
    zeros: list[Tensor]
    loss: float
    """Sum of the squared errors as GPTQ weighs them."""


def round_columns(
    weight_OI: Tensor,
    factor_II: Tensor,
    group: int,
    scaling: Scaling,
    dtype: torch.dtype,
    round_block: RoundBlock | None = None,
) -> Rounded:
    """Return the rounded weights; `weight_OI` is used up.

    Args:
        weight_OI: weights, in float32.
        factor_II: U with U'U = H^-1 in its upper triangle, see `hessian.factor_inverse`.
        group: number of columns that share a scale.
        scaling: finds scales.
        dtype: type of the model.
        round_block: rounds whole blocks of 128 columns; None: plain PyTorch does.
    """
    num_columns, device = weight_OI.shape[1], weight_OI.device
    rounded_OI = torch.empty(weight_OI.shape, dtype=dtype, device=device)
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for begin in range(0, num_columns, BLOCK):
        end = min(begin + BLOCK, num_columns)
        # Within a block the weights themselves stay, so that its groups can be measured before.
        for first in range(begin + -begin % group, end, group):
            scaling.find_params(weight_OI[:, first : first + group], weight=True)
            scales.append(scaling.scale)
            zeros.append(scaling.zero)
        first_group = begin // group
        places_K = torch.arange(begin, end, device=device, dtype=torch.int32) // group - first_group
        about = BlockScales(
            torch.stack([one.flatten() for one in scales[first_group:]]),
            torch.stack([one.flatten() for one in zeros[first_group:]]),
            places_K,
            int(scaling.maxq),
        )
        whole = round_block if end - begin == BLOCK else None
        rounded_OK, errors_OK, losses_OK = (whole or round_plainly)(
            weight_OI[:, begin:end].clone(), factor_II[begin:end, begin:end], about
        )
        rounded_OI[:, begin:end] = rounded_OK
        loss += losses_OK.sum(dtype=torch.float64) / 2
        weight_OI[:, end:].addmm_(errors_OK, factor_II[begin:end, end:], alpha=-1)
    return Rounded(rounded_OI, scales, zeros, float(loss))


def round_plainly(
    weight_OK: Tensor, factor_KK: Tensor, about: BlockScales
) -> tuple[Tensor, Tensor, Tensor]:
    """See `RoundBlock`."""
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
    """Return inputs, and groups, in the order in which they are rounded: those that matter first.

    Args:
        permute: gptqmodel's module `quantization.gar`.
        diagonal_I: of the Hessian.
        group: number of inputs that share a scale.
    """
    local, values = permute.compute_local_perms(diagonal_I, group, return_values=True)
    groups = permute.compute_global_perm(diagonal_I, group, precomputed_values=values)
    order_I = permute.compose_final_perm(local, groups, group)
    return permute.extend_perm_with_tail(order_I, len(diagonal_I)), groups.tolist()
