"""Digest of a rank's state, computed on its device, to compare ranks.

The tensors' bits are read as integers, multiplied by odd factors that depend on the position, and
summed modulo 2^64. Integer sums do not depend on the order, so the result is the same on every kind
of processor. One differing value is always detected (an odd factor has an inverse modulo 2^64);
several differing values are missed with a probability of about 2^-64. It is not a cryptographic
hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Number of values per row. All rows use the same factors, and each row has a factor of its own.
_ROW = 1 << 15
# Rows at once: one fits the cache of a CPU; on a GPU 128 rows take 32 MiB per temporary.
_ROWS_AT_ONCE = {"cpu": 1, "cuda": 128}
# 2^64 over the golden ratio, as in Fibonacci hashing, cut to fit a signed integer.
_ODD = 0x1E3779B97F4A7C15
_HALF_BITS = 32


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return both 32-bit halves of the digest, float64 (2,), on the device of the first tensor.

    A float64 holds 32 bits exactly, so an all-reduce can distribute the halves.
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
        # Products and sums wrap modulo 2^64: torch guarantees it for integers on all devices.
        # A copy in any case: the rows of float64 are those of the state itself.
        rows_RB = whole_RB[first:last].to(torch.int64, copy=True)
        sum_R[first:last] = rows_RB.mul_(factor_B).sum(dim=1)
    rest_B = flat_N[num_whole * _ROW :].to(torch.int64)
    if rest_B.numel():
        sum_R[-1] = (rest_B * factor_B[: rest_B.numel()]).sum()
    return (sum_R * _odd_factors(num_rows, tensor.device)).sum()


def _odd_factors(count: int, device: torch.device) -> Tensor:
    factor_B = (2 * torch.arange(count, device=device) + 1) * _ODD
    # Mixed, or all factors would be multiples of each other, and swapped values could cancel out.
    return (factor_B ^ (factor_B >> 29)) | 1
