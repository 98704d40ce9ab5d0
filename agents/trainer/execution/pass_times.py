"""Timing of forward and backward passes over parts of a run's rows, on a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from agents.trainer.data.examples import BatchPart
from agents.trainer.execution.executor import Executor

# Number of timed passes, and of passes before them: one launches the kernels, one records them.
_TIMED_PASSES, _MAX_WARM_PASSES = 2, 4
LONG_S = 1.0
"""Time of a pass that already shows the sustained speed, so it is timed once, in seconds."""
_PROBE_BYTES = 1 << 26  # bytes of the copy that measures the bus


@dataclass(frozen=True, slots=True)
class PassTime:
    """Measured times of passes over one part."""

    seconds: float
    launch_s: float
    """Time until the host had launched the first of these passes, in seconds."""

    @property
    def launch_share(self) -> float:
        """Fraction of a pass that its launches take, 0 to 1."""
        return min(1.0, self.launch_s / self.seconds)


class PassTimer:
    """Times passes of an executor with its current setting."""

    def __init__(self, executor: Executor, device: torch.device) -> None:
        self._executor = executor
        self._device = device

    def time(self, part: BatchPart) -> PassTime | None:
        """Return the times of the fastest of several passes, or None if memory ran out."""
        replayer = self._executor.replayer if self._executor.is_repeating else None
        launched = self.time_once(part)
        if launched is None:
            return None
        if launched.seconds > LONG_S and replayer is None:
            return launched
        for _ in range(_MAX_WARM_PASSES if replayer is not None else 0):
            num_before = replayer.num_replayed if replayer is not None else 0
            if self.time_once(part) is None:
                return None
            # A replay has happened, so the next passes are timed as in the run.
            if replayer is not None and replayer.num_replayed > num_before:
                break
        best = launched.seconds
        for _ in range(_TIMED_PASSES):
            again = self.time_once(part)
            if again is None:
                return None
            best = min(best, again.seconds)
            if again.seconds > LONG_S:
                break
        return PassTime(best, launched.launch_s)

    def time_once(self, part: BatchPart) -> PassTime | None:
        """Return the times of one pass, or None if memory ran out."""
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        if not self._executor.try_gradients(part):
            return None
        launched_s = time.perf_counter() - started
        torch.cuda.synchronize(self._device)
        return PassTime(time.perf_counter() - started, launched_s)


def measure_bus(device: torch.device) -> float:
    """Return the bandwidth from the GPU to pinned host memory, in bytes per second."""
    host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    # The first copy also pays for the driver's setup.
    host.copy_(there)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(4):
        host.copy_(there, non_blocking=True)
    torch.cuda.synchronize(device)
    return 4 * _PROBE_BYTES / (time.perf_counter() - started)
