"""Time the parts of a step, on the GPU's own clock where there is one."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Started when made; `mark` ends the computing, then the waiting for other ranks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started_s = time.perf_counter()
        self._events: list[torch.cuda.Event] = []
        self._marks_s: list[float] = []
        if self._cuda:
            self._mark_event()

    def mark(self) -> None:
        """End one part. On a GPU this only leaves a mark in its queue of work."""
        if self._cuda:
            self._mark_event()
        self._marks_s.append(time.perf_counter())

    def read_s(self) -> tuple[float, float, float]:
        """Return seconds of the whole step, of computing and of waiting.

        To be called when the GPU has done all of it, that is after its results were read.
        """
        step_s = time.perf_counter() - self._started_s
        if self._cuda:
            start, computed, waited = self._events
            return step_s, start.elapsed_time(computed) / 1e3, computed.elapsed_time(waited) / 1e3
        computed_s, waited_s = self._marks_s
        return step_s, computed_s - self._started_s, waited_s - computed_s

    def _mark_event(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
