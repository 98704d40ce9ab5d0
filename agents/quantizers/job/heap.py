"""Give freed memory back to the system.

glibc keeps what is freed in its arenas, one for each few threads, for later requests. Packages that
quantize layer by layer with pools of threads never fill those gaps again: without this a job grows
by a layer's weights with every layer, as if it held the whole model. Blocks above a threshold are
mapped one by one, and returned when they are freed; but each such block that is freed raises the
threshold, up to 32 MiB, so that soon most weights come from the arenas.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Of malloc.h: the size from which blocks are mapped. Setting it ends its growth.
_M_MMAP_THRESHOLD = -3
# In bytes. The kernel allows a process 65,530 mappings, so this size serves up to 64 GiB.
_MAPPED_FROM_BYTES = 1 << 20
# What the threshold grows to by itself, in bytes.
_USUAL_BYTES = 32 << 20


def return_free_memory() -> None:
    """Return to the system what this process has freed; only glibc has to be asked for it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def mapping_large_blocks() -> Iterator[None]:
    """Let blocks of a MiB and more be returned to the system as they are freed, in the block.

    The system clears what it hands out, so this is for work whose blocks are few and large.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", lambda name, value: 0)
    choose(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
    try:
        yield
    finally:
        choose(_M_MMAP_THRESHOLD, _USUAL_BYTES)
