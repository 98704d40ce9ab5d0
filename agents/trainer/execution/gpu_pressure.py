"""What other programs take of the GPU that a rank trains on, while a run lasts for days.

A run may fill a card to the brim with what it can do without. Where its owner then opens a browser
or a game, Linux lets that fail, and Windows moves memory of both to the PC's own, which makes
training many times slower without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_CHECK_INTERVAL_S = 5.0
_MIN_FREE_BYTES = 1 << 29
"""Less than that, and another program may fail to get what it asks for."""
_MIN_GROWTH_BYTES = 1 << 28
"""More than what drivers and libraries take for this process late."""
_NUM_BASELINE_CHECKS = 3
"""By then libraries have what they need beside torch, such as NCCL's buffers."""

ReadMemory = Callable[[], tuple[int, int, int]]
"""Free and total bytes of the GPU, and those that this process keeps."""


class GpuPressure:
    """Knows whether other programs want more of a GPU than they had at first.

    Args:
        read: how much there is, and who has it.
        now_s: a clock.
    """

    def __init__(self, read: ReadMemory, now_s: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._now_s = now_s
        self._baseline_bytes = 0
        """The most that others had in the first looks."""
        self._num_checks = 0
        self._next_s = now_s()

    def is_high(self) -> bool:
        """Return whether they took more since, and little is left; looks every few seconds."""
        if self._now_s() < self._next_s:
            return False
        self._next_s = self._now_s() + _CHECK_INTERVAL_S
        free_bytes, total_bytes, own_bytes = self._read()
        others_bytes = total_bytes - free_bytes - own_bytes
        if self._num_checks < _NUM_BASELINE_CHECKS:
            self._num_checks += 1
            self._baseline_bytes = max(self._baseline_bytes, others_bytes)
        growth_bytes = others_bytes - self._baseline_bytes
        return free_bytes < _MIN_FREE_BYTES and growth_bytes > _MIN_GROWTH_BYTES


def watch_gpu(device: torch.device) -> GpuPressure | None:
    """Return those on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    return GpuPressure(
        lambda: (*torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))
    )
