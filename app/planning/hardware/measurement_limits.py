"""Decide whether the measurement of a device is credible.

A PC that is busy during its measurement gives figures that are far too low, and a plan based on
them would give that PC a share of 0 %. So a measurement counts only if the PC was idle, its
repetitions agree, and its figures are plausible for the hardware.
"""

from __future__ import annotations

from agents.contract.node import Calibration
from agents.shared.cards import choose_precision, find_card

MOST_OTHER_LOAD = 0.15
"""Share of a device that other programs may use during its measurement, 0 to 1."""
MOST_SPREAD = 0.35
"""Spread of repeated measurements, as a share of their median, from which they are unsteady."""
CARD_LIMITS = (0.2, 1.15)
"""Lowest and highest plausible share of a data sheet's figure; cases and power limits differ."""
LAPTOP_LIMITS = (0.05, 2.0)
PLAIN_LIMITS = (0.1, 2.3)
"""The same without tensor cores, where fp16 products may be twice as fast as the listed fp32."""
UNLISTED_FLOPS = (0.3e12, 2e16)
"""Lowest and highest plausible rate of a card that is not listed, in FLOP per second."""
CORE_FLOPS = (2e9, 1e12)
"""The same for one core of a CPU; slow but usable cores reach about 5e9 in fp32."""
CPU_BYTES_PER_S = (0.5e9, 4e12)
UNLISTED_BYTES_PER_S = (5e9, 2e14)


def find_fault(
    found: Calibration, num_cores: int | None = None, capability: tuple[int, int] | None = None
) -> str:
    """Return why a measurement is rejected, as a phrase; empty: it is used.

    Args:
        found: the measurement.
        num_cores: number of cores of the node; None: unknown.
        capability: CUDA compute capability of the card; None: unknown, or the CPU.

    >>> find_fault(Calibration(card="NVIDIA GeForce RTX 3090", matrix_flops_per_s=0.003e12))
    'it gave 0.003 TFLOP/s, and this hardware does 14.2 to 81.9 TFLOP/s'
    >>> find_fault(Calibration(card="NVIDIA GeForce RTX 3090", matrix_flops_per_s=60e12))
    ''
    """
    if found.other_load is not None and found.other_load > MOST_OTHER_LOAD:
        device = "CPU" if found.card == "CPU" else "GPU"
        return f"other programs used {found.other_load:.0%} of the {device} meanwhile"
    if found.spread is not None and found.spread > MOST_SPREAD:
        return f"its repetitions differ by {found.spread:.0%}: something else ran, or it throttled"
    if capability and not found.precision and choose_precision(capability) != "bf16":
        return "an earlier version measured it in bf16, which this card only emulates"
    low, high = _flops_limits(found.card, num_cores)
    flops = found.matrix_flops_per_s
    if flops is not None and not low <= flops <= high:
        span = f"{low / 1e12:.3g} to {high / 1e12:.3g} TFLOP/s"
        return f"it gave {flops / 1e12:.3g} TFLOP/s, and this hardware does {span}"
    low, high = _memory_limits(found.card)
    rate = found.memory_bytes_per_s
    if rate is not None and not low <= rate <= high:
        span = f"{low / 1e9:.3g} to {high / 1e9:.3g} GB/s"
        return f"it gave {rate / 1e9:.3g} GB/s of memory, and this hardware does {span}"
    return ""


def _flops_limits(name: str, num_cores: int | None) -> tuple[float, float]:
    if name == "CPU":
        cores = num_cores or 1
        # Other programs or a container's limits may leave fewer cores than the PC has.
        return CORE_FLOPS[0] * max(1.0, cores / 4), CORE_FLOPS[1] * (num_cores or 1024)
    card = find_card(name)
    if card is None:
        return UNLISTED_FLOPS
    low, high = LAPTOP_LIMITS if card.is_laptop else CARD_LIMITS
    if not card.has_tensor_cores:
        low, high = PLAIN_LIMITS
    return low * card.flops_per_s, high * card.flops_per_s


def _memory_limits(name: str) -> tuple[float, float]:
    if name == "CPU":
        return CPU_BYTES_PER_S
    card = find_card(name)
    if card is None:
        return UNLISTED_BYTES_PER_S
    low, high = LAPTOP_LIMITS if card.is_laptop else CARD_LIMITS
    return low * card.memory_bytes_per_s, high * card.memory_bytes_per_s
