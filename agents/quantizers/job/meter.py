"""Measure the phases of a job: seconds, memory, GPU memory, disk.

A thread samples several times a second, since a peak may be over when a phase ends. Memory is the
private memory of the process and its children; mapped files do not count, because the system
reclaims their pages on demand. GPU memory is the peak of PyTorch's tensors, which PyTorch counts
itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.state import read_start_ticks

_LOOK_EVERY_S = 0.1

# Number of samples per walk through the folders, which is slower than reading /proc.
_WALK_EVERY = 5
_OWN = ("RssAnon:", "RssShmem:")
_KIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Time and peak memory of one part of a job."""

    name: str
    seconds: float
    ram_bytes: int
    """Peak of the process and its children, in bytes."""
    vram_bytes: int | None
    """Peak of tensors, in bytes; None: no GPU was used."""
    disk_bytes: int
    """Peak of the result's folder and the folders kept with it, in bytes."""


class Meter:
    """Measures successive phases, from its construction on.

    Args:
        folder: folder of the result, which need not exist yet.
        name: name of the first phase.
        since_s: start of the first phase by the monotonic clock; None: now.
    """

    def __init__(self, folder: Path, name: str, since_s: float | None = None) -> None:
        self._folders = [folder]
        self._name = name
        self._done: list[Phase] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._start()
        if since_s is not None:
            self._since_s = since_s
        self._thread = threading.Thread(target=self._watch, name="meter", daemon=True)
        self._thread.start()

    def count(self, folder: Path) -> None:
        """Count another folder from now on, including its present content."""
        if folder not in self._folders:
            self._folders.append(folder)

    def look(self) -> None:
        """Sample now, since a peak may be over before the thread's next sample."""
        self._look(walk=True)

    def begin(self, name: str) -> None:
        """End the current phase and begin the next."""
        self._look(walk=True)
        with self._lock:
            self._close()
            self._name = name
            self._start()

    def end(self) -> list[Phase]:
        """Stop measuring and return all phases."""
        self._stopped.set()
        self._thread.join()
        self._look(walk=True)
        self._close()
        return self._done

    def _start(self) -> None:
        self._since_s = time.monotonic()
        self._ram_bytes = self._disk_bytes = 0
        torch = _torch_on_gpu()
        if torch is not None:
            torch.cuda.reset_peak_memory_stats()

    def _close(self) -> None:
        torch = _torch_on_gpu()
        self._done.append(
            Phase(
                name=self._name,
                seconds=round(time.monotonic() - self._since_s, 3),
                ram_bytes=self._ram_bytes,
                vram_bytes=None if torch is None else int(torch.cuda.max_memory_allocated()),
                disk_bytes=self._disk_bytes,
            )
        )

    def _watch(self) -> None:
        looks = 0
        while not self._stopped.wait(_LOOK_EVERY_S):
            looks += 1
            self._look(walk=looks % _WALK_EVERY == 0)

    def _look(self, *, walk: bool) -> None:
        ram_bytes = sum(_own_bytes(process) for process in _family(os.getpid()))
        disk_bytes = sum(map(weigh_folder, tuple(self._folders))) if walk else 0
        with self._lock:
            # `begin` resets both under this lock, from another thread.
            self._ram_bytes = max(self._ram_bytes, ram_bytes)
            self._disk_bytes = max(self._disk_bytes, disk_bytes)


def read_start_s() -> float:
    """Return the start time of this process, by the monotonic clock.

    Imports take seconds before its first line runs, and are part of a job's duration.
    """
    ticks = read_start_ticks(os.getpid()) or 0
    # The kernel counts from boot, including sleep, which the monotonic clock excludes.
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


def weigh_folder(folder: Path) -> int:
    """Return the disk space of the files below a folder, in bytes; 0 if it is missing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # deleted at the same time
                # Blocks, since sparse files take less than their size; Linux counts 512 bytes each.
                total += 512 * os.stat(os.path.join(place, name)).st_blocks
    return total


def _family(process: int) -> Iterator[int]:
    yield process
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children", encoding="ascii") as file:
                for child in file.read().split():
                    yield from _family(int(child))


def _own_bytes(process: int) -> int:
    found = 0
    with contextlib.suppress(OSError), open(f"/proc/{process}/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(_OWN):
                found += int(line.split()[1]) * _KIB
    return found


def _torch_on_gpu() -> Any:
    """Return PyTorch if this process uses a GPU, without importing it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # missing while torch is being imported
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return None
    return torch
