"""A digest of a rank's state, computed on its device, to compare ranks.

The tensors' bits are read as integers, multiplied by odd numbers that depend on the position, and
summed modulo 2^64. Integer sums are the same in any order, so the result is the same on every kind
of processor. One differing value is always detected (an odd factor has an inverse modulo 2^64);
several together are missed with a probability of about 2^-64. It is no cryptographic hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Values per row. All rows have the same factors, and each row a factor of its own.
_ROW = 1 << 15
# Rows at once: few enough for the cache of a CPU; on a GPU 32 MiB for each of a few tensors.
_ROWS_AT_ONCE = {"cpu": 1, "cuda": 128}
# 2^64 over the golden ratio, as in Fibonacci hashing, cut to fit a signed integer.
_ODD = 0x1E3779B97F4A7C15
_HALF_BITS = 32


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return a tensor (2,), float64, on the device of the first: both halves of the number.

    A float64 holds each half of 32 bits exactly, so an all-reduce can distribute it.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        total = total * _ODD + _digest_one(tensor.detach()).to(total.device)
    high = (total >> _HALF_BITS) & ((1 << _HALF_BITS) - 1)
    low = total & ((1 << _HALF_BITS) - 1)
    return torch.stack((high, low)).double()


def _digest_one(tensor: Tensor) -> Tensor:
    flat_N = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    num_rows = -(-flat_N.numel() // _ROW)
    factor_B = _odd_factors(_ROW, tensor.device)
    sum_R = torch.zeros(num_rows, dtype=torch.int64, device=tensor.device)
    step = _ROWS_AT_ONCE[tensor.device.type]
    num_whole = flat_N.numel() // _ROW
    whole_RB = flat_N[: num_whole * _ROW].view(num_whole, _ROW)
    for first in range(0, num_whole, step):
        last = min(first + step, num_whole)
        # Products and sums wrap modulo 2^64, which torch does for integers on all devices.
        rows_RB = whole_RB[first:last].to(torch.int64)
        sum_R[first:last] = rows_RB.mul_(factor_B).sum(dim=1)
    rest_B = flat_N[num_whole * _ROW :].to(torch.int64)
    if rest_B.numel():
        sum_R[-1] = (rest_B * factor_B[: rest_B.numel()]).sum()
    return (sum_R * _odd_factors(num_rows, tensor.device)).sum()


def _odd_factors(count: int, device: torch.device) -> Tensor:
    factor_B = (2 * torch.arange(count, device=device) + 1) * _ODD
    # Mixed, or they would be multiples of each other, and swapped values could cancel out.
    return (factor_B ^ (factor_B >> 29)) | 1
