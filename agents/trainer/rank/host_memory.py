"""Memory of the PC, as the kernel reports it; imports nothing that takes time."""

from __future__ import annotations


def read_available_bytes() -> int:
    """Return how many bytes of host memory programs can still take; 0: not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next(line for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
    # In kB, by which the kernel means 1,024 bytes.
    return int(found.split()[1]) * 1024
