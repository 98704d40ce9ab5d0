"""Sustained rates of a GPU: measured on its node, else derived from its data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.shared.cards import Card
from app.planning.hardware.cluster import PlannedGpu

MATRIX_SHARE = 0.85
"""Share of a card's peak that large matrix products sustain when it is warm."""
# The same share by compute capability while only matrix products run for seconds, as in a
# calibration: an H200 measured 644 TFLOP/s at its power limit. Training stays below that limit and
# keeps a higher clock, since its products alternate with kernels that wait for memory.
_ALONE_SHARES = {(9, 0): 0.651}
COPY_SHARE = 0.85
"""Share of the listed memory bandwidth that a copy within the card sustains."""
# Bytes read and written to unpack one 4-bit weight to bf16.
_UNPACK_BYTES = 2.516
# Exponent of the clock by the power limit, from data sheets of one chip at two limits: AD103 (RTX
# 4090 Laptop GPU) reaches 0.58 of its peak at 80 W and 0.81 at 150 W of the RTX 4080's 320 W; RTX
# PRO 6000 and H100 0.88 at half their power; RTX 4000 SFF Ada 0.72 at 0.54 of it.
_POWER_EXPONENT = 0.4
# Rates of a card of no known class: about an RTX 3060, so that plans err on the slow side.
_UNKNOWN_FLOPS = 25e12
_UNKNOWN_BYTES_PER_S = 300e9
# Rates of a CPU that was not calibrated.
_CPU_FLOPS, _CPU_BYTES_PER_S = 0.15e12, 20e9
# Bandwidth assumed for an unknown slot, in bytes per second: PCI Express 3.0 with 16 lanes.
_SLOT_BYTES_PER_S = 12e9

RateSource = Literal["measured", "listed", "given", "similar", "assumed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Sustained rates of one GPU."""

    matrix_flops_per_s: float
    """Large matrix products in the data type of training, in FLOP per second."""
    copy_bytes_per_s: float
    """Bytes read plus bytes written by a copy within the card, per second."""
    unpack_values_per_s: float
    """4-bit weights unpacked to bf16 per second."""
    to_host_bytes_per_s: float
    from_host_bytes_per_s: float
    source: RateSource


def find_rates(gpu: PlannedGpu) -> Rates:
    """Return the rates of a GPU: as measured, else from its data sheet.

    >>> rates = find_rates(PlannedGpu(name="RTX 4070"))
    >>> round(rates.matrix_flops_per_s / 1e12, 1), rates.source
    (49.6, 'listed')
    """
    card, found = gpu.similar, gpu.calibration
    is_cpu = gpu.device == "cpu"
    matrix = _CPU_FLOPS if is_cpu else _UNKNOWN_FLOPS
    copy = _CPU_BYTES_PER_S if is_cpu else _UNKNOWN_BYTES_PER_S
    bus = _CPU_BYTES_PER_S if is_cpu else _SLOT_BYTES_PER_S
    if card is not None:
        matrix = MATRIX_SHARE * card.flops_per_s * power_share(gpu)
        copy = COPY_SHARE * card.memory_bytes_per_s
        bus = card.bus_bytes_per_s
    if gpu.flops_per_s is not None:
        matrix = MATRIX_SHARE * gpu.flops_per_s * power_share(gpu)
    if gpu.memory_bytes_per_s is not None:
        copy = COPY_SHARE * gpu.memory_bytes_per_s
    bus = gpu.bus_bytes_per_s or bus
    if found and found.matrix_flops_per_s:
        # Under the PC's own power limit.
        matrix = _rate_in_training(found.matrix_flops_per_s, card)
    copy = (found and found.memory_bytes_per_s) or copy
    unpack = copy / _UNPACK_BYTES
    return Rates(
        matrix_flops_per_s=matrix,
        copy_bytes_per_s=copy,
        unpack_values_per_s=(found and found.unpack_values_per_s) or unpack,
        to_host_bytes_per_s=(found and found.to_host_bytes_per_s) or bus,
        from_host_bytes_per_s=(found and found.from_host_bytes_per_s) or bus,
        source="measured" if found and found.matrix_flops_per_s else _find_source(gpu),
    )


def _find_source(gpu: PlannedGpu) -> RateSource:
    if gpu.flops_per_s is not None:
        return "given"
    if gpu.card is not None:
        return "listed"
    return "similar" if gpu.similar is not None else "assumed"


def power_share(gpu: PlannedGpu) -> float:
    """Return the peak of a card at its power limit, relative to that at its board power.

    >>> [round(power_share(PlannedGpu(name="RTX 3090", power_limit_w=w)), 2)
    ...     for w in (100, 200, 350, 400)]
    [0.61, 0.8, 1.0, 1.0]
    """
    card = gpu.card
    if card is None or gpu.power_limit_w is None:
        return 1.0
    share = (gpu.power_limit_w / card.power_w) ** _POWER_EXPONENT
    # Figures of a laptop's GPU are those at the middle of its limits.
    return float(share if card.is_laptop else min(share, 1.0))


def _rate_in_training(measured: float, card: Card | None) -> float:
    """Return the rate of matrix products in training, given that of a calibration.

    Forecasts are tuned to the data sheet's rate in training. So a measurement counts as the ratio
    between this card and a typical one of its kind, both running matrix products only.

    >>> from agents.shared.cards import find_card
    >>> round(_rate_in_training(644e12, find_card("H200")) / 1e12)
    841
    """
    if card is None:
        return measured
    return MATRIX_SHARE * measured / _ALONE_SHARES.get(card.capability, MATRIX_SHARE)
