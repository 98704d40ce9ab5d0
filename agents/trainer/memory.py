"""How much memory this rank uses, as its journal tells it."""

from __future__ import annotations

import os

import torch


def read_memory_bytes(device: torch.device, held_bytes: int = 0) -> int | None:
    """Return the peak of GPU memory, or the resident memory on a CPU; None: not known.

    Args:
        held_bytes: by a graph, which torch counts as allocated only while it is recorded.
    """
    if device.type == "cuda":
        at_rest_bytes = torch.cuda.memory_allocated(device)
        return max(torch.cuda.max_memory_allocated(device), at_rest_bytes + held_bytes)
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def read_most_bytes(device: torch.device) -> float:
    """Return how much of its GPU this process may hold in all, with what it has already."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    allowed_bytes = torch.cuda.get_per_process_memory_fraction(device) * total_bytes
    return min(allowed_bytes, free_bytes + torch.cuda.memory_reserved(device))


def read_reserved_bytes(device: torch.device) -> int | None:
    """Return the most that torch ever took from the driver, free pieces included; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def read_available_bytes() -> int:
    """Return how much memory of this PC programs could still take; 0: not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = next(line for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
    return int(found.split()[1]) * 1024
