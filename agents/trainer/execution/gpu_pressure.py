"""Detect other programs that need memory of the GPU on which a rank trains.

A run fills the card with dequantized weights that it can do without. If the user then opens a
browser or a game, that program fails to allocate on Linux; on Windows the driver silently pages
memory of both to the PC's RAM, which makes training many times slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_CHECK_INTERVAL_S = 5.0
# With less free memory another program may fail to allocate.
_MIN_FREE_BYTES = 1 << 29
# Smallest growth that counts. Drivers and libraries of this process allocate up to this much late,
# invisible to torch's allocator.
_MIN_GROWTH_BYTES = 1 << 28
# By the third check libraries such as NCCL have allocated their buffers.
_NUM_BASELINE_CHECKS = 3

ReadMemory = Callable[[], tuple[int, int, int]]
"""Returns free and total bytes of the GPU, and the bytes reserved by this process."""


class GpuPressure:
    """Compares the memory of other programs on a GPU with a baseline from the start of the run.

    Args:
        read: reads the memory of the GPU.
        now_s: monotonic clock, in seconds.
    """

    def __init__(self, read: ReadMemory, now_s: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._now_s = now_s
        # Maximum of other programs during the baseline checks.
        self._baseline_bytes = 0
        self._num_checks = 0
        self._next_s = now_s()

    def is_high(self) -> bool:
        """Return whether other programs have grown and little memory is free.

        Checks only every few seconds and returns False in between.
        """
        if self._now_s() < self._next_s:
            return False
        self._next_s = self._now_s() + _CHECK_INTERVAL_S
        free_bytes, total_bytes, own_bytes = self._read()
        # Includes this process's own CUDA context, which the baseline cancels.
        others_bytes = total_bytes - free_bytes - own_bytes
        if self._num_checks < _NUM_BASELINE_CHECKS:
            self._num_checks += 1
            self._baseline_bytes = max(self._baseline_bytes, others_bytes)
        growth_bytes = others_bytes - self._baseline_bytes
        return free_bytes < _MIN_FREE_BYTES and growth_bytes > _MIN_GROWTH_BYTES


def watch_gpu(device: torch.device) -> GpuPressure | None:
    """Return the detector of a GPU, or None for a CPU."""
    if device.type != "cuda":
        return None
    return GpuPressure(
        lambda: (*torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))
    )
