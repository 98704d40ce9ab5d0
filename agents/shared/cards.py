"""Peak figures of GPUs, by the names that their drivers use.

FLOP/s are dense bf16 or fp16 with fp32 accumulation, at the boost clock of the reference card, from
NVIDIA's own papers: "Ampere GA102 GPU Architecture" (RTX 30), "Ada GPU Architecture" (RTX 40),
"RTX Blackwell GPU Architecture" (RTX 50), and the data sheets of A100, H100, H200 and L40S. Cards
that those papers leave out have twice their fp32 shader rate, as all GeForce cards in them do.
Memory, bandwidth, board power and bus come from the product pages of the same cards.

Laptop GPUs run at one of many power limits, so no fixed figure holds: training measures them, and
forecasts take the middle of the boost clocks on
https://www.nvidia.com/geforce/gaming-laptops/compare (4 FLOP per core and clock). Gigabytes of
memory are binary, all other units decimal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

GIB = 2**30

# Bandwidth of one PCI Express lane by generation, after encoding, in bytes per second.
_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}

# Share of the bus bandwidth that copies from and to pinned memory reach: 22 to 26 of 31.5 GB/s on
# generation 4 with 16 lanes (bitsandbytes, docs/streaming_analysis).
_REACHED = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Figures from a data sheet."""

    name: str
    """Name without `NVIDIA` and `GeForce`."""
    flops_per_s: float
    """Peak of dense bf16 matrix products."""
    memory_bytes: int
    memory_bytes_per_s: float
    """Bandwidth of the card's own memory."""
    power_w: float
    """Board power; of a laptop's GPU the middle of its range."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    num_multiprocessors: int
    pcie_generation: int
    pcie_lanes: int

    @property
    def is_laptop(self) -> bool:
        """True if the figures depend on the power limit that the laptop's maker sets."""
        return "Laptop" in self.name

    @property
    def bus_bytes_per_s(self) -> float:
        """Speed of copies to and from pinned host memory, in a slot as fast as the card.

        >>> round(find_card("RTX 4070").bus_bytes_per_s / 1e9, 1)
        25.2
        """
        return _LANE_BYTES_PER_S[self.pcie_generation] * self.pcie_lanes * _REACHED


# Name: TFLOP/s, GiB, GB/s, W, capability, multiprocessors, PCIe generation, lanes.
_Row = tuple[float, float, float, float, tuple[int, int], int, int, int]
_CARDS: dict[str, _Row] = {
    "RTX 3060": (25.5, 12, 360, 170, (8, 6), 28, 4, 16),
    "RTX 3060 Ti": (32.4, 8, 448, 200, (8, 6), 38, 4, 16),
    "RTX 3070": (40.6, 8, 448, 220, (8, 6), 46, 4, 16),
    "RTX 3070 Ti": (43.5, 8, 608, 290, (8, 6), 48, 4, 16),
    "RTX 3080": (59.5, 10, 760, 320, (8, 6), 68, 4, 16),
    "RTX 3080 Ti": (68.2, 12, 912, 350, (8, 6), 80, 4, 16),
    "RTX 3090": (71.2, 24, 936, 350, (8, 6), 82, 4, 16),
    "RTX 3090 Ti": (80.0, 24, 1008, 450, (8, 6), 84, 4, 16),
    "RTX 4060": (30.2, 8, 272, 115, (8, 9), 24, 4, 8),
    "RTX 4060 Ti": (44.1, 8, 288, 160, (8, 9), 34, 4, 8),
    "RTX 4070": (58.3, 12, 504, 200, (8, 9), 46, 4, 16),
    "RTX 4070 SUPER": (71.0, 12, 504, 220, (8, 9), 56, 4, 16),
    "RTX 4070 Ti": (80.2, 12, 504, 285, (8, 9), 60, 4, 16),
    "RTX 4070 Ti SUPER": (88.2, 16, 672, 285, (8, 9), 66, 4, 16),
    "RTX 4080": (97.5, 16, 717, 320, (8, 9), 76, 4, 16),
    "RTX 4080 SUPER": (104.4, 16, 736, 320, (8, 9), 80, 4, 16),
    "RTX 4090": (165.2, 24, 1008, 450, (8, 9), 128, 4, 16),
    "RTX 3050 Laptop GPU": (11.5, 4, 192, 58, (8, 6), 16, 4, 8),
    "RTX 3050 Ti Laptop GPU": (14.0, 4, 192, 58, (8, 6), 20, 4, 8),
    "RTX 3060 Laptop GPU": (22.9, 6, 336, 88, (8, 6), 30, 4, 16),
    "RTX 3070 Laptop GPU": (29.8, 8, 448, 103, (8, 6), 40, 4, 16),
    "RTX 3070 Ti Laptop GPU": (29.7, 8, 448, 103, (8, 6), 46, 4, 16),
    "RTX 3080 Laptop GPU": (36.3, 8, 448, 115, (8, 6), 48, 4, 16),
    "RTX 3080 Ti Laptop GPU": (40.3, 16, 512, 115, (8, 6), 58, 4, 16),
    "RTX 4050 Laptop GPU": (20.4, 6, 192, 75, (8, 9), 20, 4, 8),
    "RTX 4060 Laptop GPU": (23.6, 8, 256, 75, (8, 9), 24, 4, 8),
    "RTX 4070 Laptop GPU": (31.4, 8, 256, 75, (8, 9), 36, 4, 8),
    "RTX 4080 Laptop GPU": (53.9, 12, 432, 105, (8, 9), 58, 4, 16),
    "RTX 4090 Laptop GPU": (68.0, 16, 576, 115, (8, 9), 76, 4, 16),
    "RTX 5060": (38.4, 8, 448, 145, (12, 0), 30, 5, 8),
    "RTX 5060 Ti": (47.4, 16, 448, 180, (12, 0), 36, 5, 8),
    "RTX 5070": (61.7, 12, 672, 250, (12, 0), 48, 5, 16),
    "RTX 5070 Ti": (87.9, 16, 896, 300, (12, 0), 70, 5, 16),
    "RTX 5080": (112.6, 16, 960, 360, (12, 0), 84, 5, 16),
    "RTX 5090": (209.5, 32, 1792, 575, (12, 0), 170, 5, 16),
    "A100": (312.0, 80, 2039, 400, (8, 0), 108, 4, 16),
    "H100 80GB HBM3": (989.4, 80, 3352, 700, (9, 0), 132, 5, 16),
    "H100 PCIe": (756.0, 80, 2039, 350, (9, 0), 114, 5, 16),
    "H200": (989.4, 141, 4800, 700, (9, 0), 132, 5, 16),
    "L40S": (362.1, 48, 864, 350, (8, 9), 142, 4, 16),
}


def find_card(name: str) -> Card | None:
    """Return the card with this name, as a driver or a user writes it; None: not listed.

    >>> find_card("NVIDIA A100-SXM4-80GB").power_w
    400
    >>> find_card("4070 laptop").name, find_card("geforce rtx 4070 Ti").name
    ('RTX 4070 Laptop GPU', 'RTX 4070 Ti')
    >>> find_card("NVIDIA GeForce RTX 4070 Laptop GPU with Max-Q Design")
    """
    # Unknown suffixes, such as "with Max-Q Design", are other silicon or limits: no guess.
    known = _BY_PLAIN_NAME.get(_plain(name))
    if known is None:
        return None
    tflops, gib, gb_per_s, power_w, capability, processors, generation, lanes = _CARDS[known]
    return Card(
        name=known,
        flops_per_s=tflops * 1e12,
        memory_bytes=int(gib * GIB),
        memory_bytes_per_s=gb_per_s * 1e9,
        power_w=power_w,
        capability=capability,
        num_multiprocessors=processors,
        pcie_generation=generation,
        pcie_lanes=lanes,
    )


def list_cards() -> tuple[str, ...]:
    """Return the names of all listed cards."""
    return tuple(_CARDS)


def _plain(name: str) -> str:
    """Return a name without the words that drivers add and users leave out."""
    words = re.sub(r"^(nvidia )?(geforce )?(rtx )?", "", " ".join(name.lower().split()))
    # "A100-SXM4-80GB" and "A100-PCIE-40GB" are one row; a size or a form factor is cut off.
    words = re.sub(r"( gpu| \d+ ?gb|-(sxm|pcie).*)$", "", words)
    return words.replace(" gpu", "") if words.endswith("laptop gpu") else words


_BY_PLAIN_NAME = {_plain(name): name for name in _CARDS}


def choose_precision(capability: tuple[int, int] | None) -> Literal["bf16", "fp16", "fp32"]:
    """Return the data type in which training computes with `precision: auto`.

    Args:
        capability: CUDA compute capability of the card; None for a CPU.

    >>> choose_precision((8, 6)), choose_precision((7, 5)), choose_precision(None)
    ('bf16', 'fp16', 'fp32')
    """
    if capability is None:
        return "fp32"
    # Turing and older cards only emulate bf16, although torch calls it supported.
    return "bf16" if capability >= (8, 0) else "fp16"
