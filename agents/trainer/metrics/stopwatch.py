"""Time the parts of a step, on the GPU's own clock if it has one."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Times of one step on one rank, in seconds."""

    step_s: float
    """Time of the whole step, a little more than its parts."""
    input_s: float
    """Time to choose the batch and read its rows."""
    compute_s: float
    """Time of the forward and backward passes."""
    wait_s: float
    """Time waiting for the other ranks and the network."""
    optimizer_s: float

    def with_waited(self, waited_s: float) -> StepTimes:
        """Return the times with part of the computing time counted as waiting, in seconds.

        >>> StepTimes(step_s=3, input_s=0, compute_s=2, wait_s=1, optimizer_s=0).with_waited(0.5)
        StepTimes(step_s=3, input_s=0, compute_s=1.5, wait_s=1.5, optimizer_s=0)
        """
        waited_s = min(waited_s, self.compute_s)
        return replace(self, compute_s=self.compute_s - waited_s, wait_s=self.wait_s + waited_s)


class Stopwatch:
    """Starts when created; each `mark` ends a part: input, computing, waiting, optimizer."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started_s = time.perf_counter()
        self._events: list[torch.cuda.Event] = []
        self._marks_s: list[float] = [self._started_s]
        # The host runs ahead of the GPU: its own clock would show the time of queueing.
        if self._cuda:
            self._mark_event()

    def mark(self) -> None:
        """End one part. On a GPU this only queues an event, without waiting."""
        if self._cuda:
            self._mark_event()
        self._marks_s.append(time.perf_counter())

    def read(self) -> StepTimes:
        """Return the times of the step and of its four parts, in seconds.

        On a GPU this waits for the end of the last part.
        """
        if self._cuda:
            self._events[-1].synchronize()
        step_s = time.perf_counter() - self._started_s
        if self._cuda:
            pairs = zip(self._events, self._events[1:], strict=False)
            # elapsed_time returns milliseconds.
            parts = [start.elapsed_time(end) / 1e3 for start, end in pairs]
        else:
            marks = zip(self._marks_s, self._marks_s[1:], strict=False)
            parts = [end - start for start, end in marks]
        input_s, compute_s, wait_s, optimizer_s = parts
        return StepTimes(
            step_s=step_s,
            input_s=input_s,
            compute_s=compute_s,
            wait_s=wait_s,
            optimizer_s=optimizer_s,
        )

    def _mark_event(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
