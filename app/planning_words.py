"""Plans and measurements in plain words, the same in the window and on the command line."""

from __future__ import annotations

from agents.protocol import Calibration


def describe_calibration(found: Calibration) -> str:
    """Return what a card reached, in a line.

    >>> describe_calibration(Calibration(card="x", matrix_flops_per_s=4.21e13,
    ...     memory_bytes_per_s=4.7e11, to_host_bytes_per_s=1.26e10))
    '42.1 TFLOP/s, memory 470 GB/s, to the PC 12.6 GB/s'
    """
    parts = []
    if found.matrix_flops_per_s is not None:
        parts.append(f"{found.matrix_flops_per_s / 1e12:.3g} TFLOP/s")
    if found.memory_bytes_per_s is not None:
        parts.append(f"memory {found.memory_bytes_per_s / 1e9:.3g} GB/s")
    if found.to_host_bytes_per_s is not None:
        parts.append(f"to the PC {found.to_host_bytes_per_s / 1e9:.3g} GB/s")
    if found.unpack_values_per_s is not None:
        parts.append(f"4-bit weights {found.unpack_values_per_s / 1e9:.3g} billion/s")
    return ", ".join(parts)
