"""A CUDA stream for copies, separate from the compute stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class CopyStream:
    """A CUDA stream for copies; on a CPU everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def wait_for_compute(self) -> None:
        """Make later copies wait for the work enqueued so far on the compute stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copying(self) -> AbstractContextManager[object]:
        """Return a context whose copies run on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def record(self) -> torch.cuda.Event | None:
        """Return an event that completes with the copies enqueued so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def block_compute(self, event: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for the copies before the event. Does not block the host."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
