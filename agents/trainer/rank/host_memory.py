"""Memory of the PC as the kernel reports it; imports nothing slow."""

from __future__ import annotations


def read_available_bytes() -> int:
    """Return the bytes of host memory that programs can still take; 0 if not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next(line for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
    # In kB, which for the kernel means 1,024 bytes.
    return int(found.split()[1]) * 1024
