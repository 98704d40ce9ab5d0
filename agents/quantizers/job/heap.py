"""Give freed memory back to the system.

glibc keeps what is freed in its arenas, one for each few threads, for later requests. Packages that
quantize layer by layer with pools of threads never fill those gaps again: without this a job grows
by a layer's weights with every layer, as if it held the whole model.
"""

from __future__ import annotations

import ctypes
import gc


def return_free_memory() -> None:
    """Return to the system what this process has freed; only glibc has to be asked for it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
