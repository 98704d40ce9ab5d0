"""How much matrix arithmetic a GPU can do at most, to say how much of it training uses.

Figures are dense bf16 or fp16 with fp32 accumulation, in TFLOP/s, at the boost clock of the
reference card, from NVIDIA's own papers: "Ampere GA102 GPU Architecture" (RTX 30), "Ada GPU
Architecture" (RTX 40), "RTX Blackwell GPU Architecture" (RTX 50), and the data sheets of A100,
H100, H200 and L40S. Cards that those papers leave out have twice their fp32 shader rate, as all
GeForce cards in them do. Laptop GPUs run at any of many power limits, so no figure is true for
them: they, and all cards not listed, are measured.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

_TFLOPS = {
    "RTX 3060": 25.5, "RTX 3060 Ti": 32.4, "RTX 3070": 40.6, "RTX 3070 Ti": 43.5,
    "RTX 3080": 59.5, "RTX 3080 Ti": 68.2, "RTX 3090": 71.2, "RTX 3090 Ti": 80.0,
    "RTX 4060": 30.2, "RTX 4060 Ti": 44.1, "RTX 4070": 58.3, "RTX 4070 SUPER": 71.0,
    "RTX 4070 Ti": 80.2, "RTX 4070 Ti SUPER": 88.2, "RTX 4080": 97.5, "RTX 4080 SUPER": 104.4,
    "RTX 4090": 165.2,
    "RTX 5060": 38.4, "RTX 5060 Ti": 47.4, "RTX 5070": 61.7, "RTX 5070 Ti": 87.9,
    "RTX 5080": 112.6, "RTX 5090": 209.5,
    "A100": 312.0, "H100 80GB HBM3": 989.4, "H100 PCIe": 756.0, "H200": 989.4, "L40S": 362.1,
}  # fmt: skip
_MEASURED_SIZE = 4096
_MEASURED_S = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most that a device can do."""

    flops_per_s: float
    measured: bool
    """Whether a matrix product was timed here because the card is in no table."""


def peak_of(name: str) -> float | None:
    """Return the FLOP/s of a card by the name that its driver gives it; None: not listed.

    >>> peak_of("NVIDIA GeForce RTX 4070 Ti"), peak_of("NVIDIA GeForce RTX 4070 Laptop GPU")
    (80200000000000.0, None)
    >>> peak_of("NVIDIA A100-SXM4-80GB")
    312000000000000.0
    """
    if "laptop" in name.lower() or "max-q" in name.lower():
        return None
    plain = re.sub(r"^NVIDIA (GeForce )?", "", name, flags=re.IGNORECASE).strip().lower()
    plain = re.sub(r" \d+ ?gb$|-(sxm|pcie).*$", "", plain)
    for known, tflops in _TFLOPS.items():
        if plain == known.lower():
            return tflops * 1e12
    return None


def find_peak(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Return the peak of a GPU for training in `dtype`; None for CPUs and wide arithmetic.

    Takes about a fifth of a second on a card that is not listed.
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
        best_s = min(best_s, start.elapsed_time(end) / 1e3)
    return 2.0 * n**3 / best_s
