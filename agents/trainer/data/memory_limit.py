"""Memory limit for a process that reads untrusted files."""

from __future__ import annotations

from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate `num_bytes` more; beyond that it raises MemoryError.

    Linux only: other systems do not report the current size; there nothing is limited.
    """
    import resource

    try:
        # The sixth field is the size of data and stack in pages, which RLIMIT_DATA counts. Reserved
        # address space does not count: allocators reserve much for each of many threads.
        taken = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    except (OSError, ValueError):
        return
    limit = taken * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
