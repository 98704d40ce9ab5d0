"""Peak matrix FLOP/s of a GPU, the denominator of MFU.

From the table of cards if the figure holds for every card of a name; unlisted cards, and laptop
GPUs with their varying power limits, are measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from agents.shared.cards import find_card

# Rows and columns of the measured product: large enough to fill any card.
_MEASURED_SIZE = 4096
# Time to measure, in seconds.
_MEASURED_S = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Peak of a device."""

    flops_per_s: float
    measured: bool
    """True if it was measured here, because the card is not in the table."""


def peak_of(name: str) -> float | None:
    """Return the FLOP/s of a card by its driver's name for it; None if not listed.

    >>> peak_of("NVIDIA GeForce RTX 4070 Ti"), peak_of("NVIDIA GeForce RTX 4070 Laptop GPU")
    (80200000000000.0, None)
    >>> peak_of("NVIDIA A100-SXM4-80GB")
    312000000000000.0
    """
    card = find_card(name)
    if card is None or card.is_laptop or not card.has_tensor_cores:
        return None
    return card.flops_per_s


def find_peak(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Return the peak of a GPU for training in `dtype`; None for CPUs, fp32 and fp64.

    Takes about a fifth of a second for an unlisted card.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    listed = peak_of(torch.cuda.get_device_name(device))
    if listed is not None:
        return Peak(flops_per_s=listed, measured=False)
    try:
        return Peak(flops_per_s=measure_matrix_rate(device, dtype), measured=True)
    except torch.OutOfMemoryError:
        return None


def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product of 4,096 (2 n^3 operations)."""
    n = _MEASURED_SIZE
    a_NN = torch.randn(n, n, device=device, dtype=dtype)
    b_NN = torch.randn(n, n, device=device, dtype=dtype)
    best_s = float("inf")
    deadline_s = time.perf_counter() + _MEASURED_S
    while time.perf_counter() < deadline_s:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a_NN, b_NN)
        end.record()
        end.synchronize()
        # The fastest one: clocks rise during the first products, and other programs only slow them.
        best_s = min(best_s, start.elapsed_time(end) / 1e3)
    return 2.0 * n**3 / best_s
