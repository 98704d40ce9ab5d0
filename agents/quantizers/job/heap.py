"""Return freed memory to the system.

glibc keeps freed memory in its arenas, one per few threads, for later requests. Packages that
quantize layer by layer with thread pools never fill those gaps again: without this a job grows by a
layer's weights with every layer, as if it held the whole model. Blocks above a threshold are mapped
individually and returned when they are freed; but each freed one raises the threshold, up to 32
MiB, so that soon most weights come from the arenas.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# From malloc.h: minimum size of mapped blocks. Setting it ends its growth.
_M_MMAP_THRESHOLD = -3
# In bytes. Linux allows a process 65,530 mappings, so this size suffices for up to 64 GiB.
_MAPPED_FROM_BYTES = 1 << 20
# Maximum of the dynamic threshold, in bytes.
_USUAL_BYTES = 32 << 20


def return_free_memory() -> None:
    """Return this process's freed memory to the system; only glibc needs a request."""
    # Cycles first, or their memory would not be free yet.
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def mapping_large_blocks() -> Iterator[None]:
    """Map blocks of a MiB and more individually inside the block, so that freeing returns them.

    The system clears each mapping, so this is for work with few and large blocks.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", lambda name, value: 0)
    choose(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
    try:
        yield
    finally:
        choose(_M_MMAP_THRESHOLD, _USUAL_BYTES)
