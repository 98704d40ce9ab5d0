"""What a GPU reaches: as measured on its node, else as its data sheet lets one expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.planning.cluster import PlannedGpu

MATRIX_SHARE = 0.85
"""Of a card's peak that long products of matrices reach when it is warm."""
COPY_SHARE = 0.85
"""Of the bandwidth on a data sheet that a copy within the card reaches."""
_UNPACK_PER_PROCESSOR = 4.1e9
"""4-bit weights that a multiprocessor unpacks in a second at most; it is less than the memory of
an H200 would allow, and more than that of a GeForce."""
_UNPACK_BYTES = 2.516
"""Read and written for one 4-bit weight that becomes bf16."""
_UNKNOWN_FLOPS = 25e12
_UNKNOWN_BYTES_PER_S = 300e9
_CPU_FLOPS, _CPU_BYTES_PER_S = 0.15e12, 20e9
_SLOT_BYTES_PER_S = 12e9
"""Of a slot that nothing is known of: generation 3, 16 lanes."""

RateSource = Literal["measured", "listed", "assumed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a GPU reaches."""

    matrix_flops_per_s: float
    """Long products in the type that training takes."""
    copy_bytes_per_s: float
    unpack_values_per_s: float
    """4-bit weights that become bf16."""
    to_host_bytes_per_s: float
    from_host_bytes_per_s: float
    source: RateSource


def find_rates(gpu: PlannedGpu) -> Rates:
    """Return what a GPU reaches: as measured, else by its data sheet.

    >>> rates = find_rates(PlannedGpu(name="RTX 4070"))
    >>> round(rates.matrix_flops_per_s / 1e12, 1), rates.source
    (49.6, 'listed')
    """
    card, found = gpu.card, gpu.calibration
    is_cpu = gpu.device == "cpu"
    matrix = _CPU_FLOPS if is_cpu else _UNKNOWN_FLOPS
    copy = _CPU_BYTES_PER_S if is_cpu else _UNKNOWN_BYTES_PER_S
    bus = _CPU_BYTES_PER_S if is_cpu else _SLOT_BYTES_PER_S
    if card is not None:
        matrix = MATRIX_SHARE * card.flops_per_s
        copy = COPY_SHARE * card.memory_bytes_per_s
        bus = card.bus_bytes_per_s
    matrix = (found and found.matrix_flops_per_s) or matrix
    copy = (found and found.memory_bytes_per_s) or copy
    unpack = copy / _UNPACK_BYTES
    if card is not None:
        unpack = min(unpack, _UNPACK_PER_PROCESSOR * card.num_multiprocessors)
    listed: RateSource = "listed" if card is not None else "assumed"
    return Rates(
        matrix_flops_per_s=matrix,
        copy_bytes_per_s=copy,
        unpack_values_per_s=(found and found.unpack_values_per_s) or unpack,
        to_host_bytes_per_s=(found and found.to_host_bytes_per_s) or bus,
        from_host_bytes_per_s=(found and found.from_host_bytes_per_s) or bus,
        source="measured" if found and found.matrix_flops_per_s else listed,
    )
