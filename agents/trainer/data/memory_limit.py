"""Limit the memory of a process that reads strangers' files."""

from __future__ import annotations

from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Let this process take `num_bytes` more than it has, and raise MemoryError beyond.

    Only on Linux, which alone says how much it has; elsewhere nothing is limited. Memory that is
    merely reserved does not count: allocators reserve much for each of many threads.
    """
    import resource

    try:
        taken = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    except (OSError, ValueError):
        return
    limit = taken * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
