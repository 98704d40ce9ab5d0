"""Send features to the next stage and their gradients back while the stage computes.

Receives start some micro-batches ahead, so every message finds a waiting buffer. Sends start at
once; a send is waited for only when a reply proves its arrival, so a stage never waits longer than
for its next input. Messages of a GPU go through pinned host memory, so no kernel waits for another
PC.

Shape letters: N rows of a message (tokens of a micro-batch, once or twice); H hidden features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agents.trainer.parallel.pipeline.wire_format import WireFormat
from agents.trainer.rank.group import Group

Wait = Callable[[], None]
# Kinds of messages: features and gradients. The kind is part of the tag.
_FORWARD, _BACKWARD = 0, 1
_NUM_KINDS = 2


@dataclass(slots=True)
class _Lane:
    """Messages of one kind between this rank and another one, in one batch."""

    peer: int
    kind: int
    num_rows: Sequence[int] = ()
    """Number of rows of each message."""
    receiving: dict[int, tuple[Tensor, Wait]] = field(default_factory=dict)
    num_begun: int = 0
    sending: dict[int, tuple[Tensor, Wait]] = field(default_factory=dict)
    """Messages that may still be in transit, whose buffers must stay alive."""


class Transport:
    """Messages of one stage to and from its neighbors.

    Args:
        group: all ranks.
        device: device of this rank.
        wire: encoding of features in a message.
        previous: rank of the stage before; None for the first stage.
        following: rank of the next stage; None for the last stage.
        ahead: number of receives that are started in advance, in addition to the next one.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        wire: WireFormat,
        *,
        previous: int | None,
        following: int | None,
        ahead: int,
    ) -> None:
        self._group = group
        self._device = device
        self._wire = wire
        self._ahead = ahead
        self._inlet = None if previous is None else _Lane(previous, _FORWARD)
        self._outlet = None if following is None else _Lane(following, _FORWARD)
        self._gradients_in = None if following is None else _Lane(following, _BACKWARD)
        self._gradients_out = None if previous is None else _Lane(previous, _BACKWARD)
        self._errors: dict[str, float] = {}
        self._waited_s = 0.0
        # Kernels run later than the host: only events measure how long a GPU stood still.
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._may_pin = device.type == "cuda"

    def begin(self, num_tokens: Sequence[int], *, streams: int, is_training: bool) -> None:
        """Prepare for the messages of a batch.

        Args:
            num_tokens: tokens of each micro-batch.
            streams: feature rows per token in a message, 1 or 2.
            is_training: True if gradients come back.
        """
        for lane in (self._inlet, self._outlet, self._gradients_in, self._gradients_out):
            if lane is not None:
                # Features without the adapter have no gradient, so they do not come back.
                factor = streams if lane.kind == _FORWARD else 1
                is_used = is_training or lane.kind == _FORWARD
                lane.num_rows = [factor * count for count in num_tokens] if is_used else []
                lane.num_begun = 0
        self._receive_ahead(self._inlet, 0)
        self._receive_ahead(self._gradients_in, 0)

    def receive_features(self, number: int) -> Tensor:
        """Return the features of a micro-batch from the stage before (N, H)."""
        assert self._inlet is not None
        return self._receive(self._inlet, number)

    def send_features(self, number: int, hidden_NH: Tensor) -> None:
        """Start to send features to the next stage."""
        assert self._outlet is not None
        self._send(self._outlet, number, hidden_NH)

    @property
    def rounding_errors(self) -> dict[str, float]:
        """Relative error of the first `features` and `gradients` sent, if they are rounded."""
        return dict(self._errors)

    def receive_gradient(self, number: int) -> Tensor:
        """Return the gradient of the features sent for a micro-batch (N, H)."""
        assert self._gradients_in is not None
        gradient_NH = self._receive(self._gradients_in, number)
        self.confirm_features(number)
        return gradient_NH

    def send_gradient(self, number: int, gradient_NH: Tensor) -> None:
        """Start to send the gradient of the received features."""
        assert self._gradients_out is not None
        self._send(self._gradients_out, number, gradient_NH)

    def confirm_features(self, number: int) -> None:
        """Free the features of a micro-batch that must have arrived by now."""
        if self._outlet is not None:
            _release(self._outlet, number)

    def confirm_gradient(self, number: int) -> None:
        """Free the gradient of a micro-batch that must have arrived by now."""
        if self._gradients_out is not None:
            _release(self._gradients_out, number)

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for lane in (self._outlet, self._gradients_out):
            if lane is not None:
                # A copy, since releasing removes entries.
                for number in [*lane.sending]:
                    _release(lane, number)

    def abandon(self) -> None:
        """Drop messages in transit after an error: no rank will receive them."""
        for lane in (self._inlet, self._outlet, self._gradients_in, self._gradients_out):
            if lane is not None:
                lane.receiving.clear()
                lane.sending.clear()

    def take_waited_s(self) -> float:
        """Return the time spent waiting for messages since the last call, in seconds.

        On a GPU this blocks until the last of them has arrived.
        """
        for begin, end in self._waits:
            end.synchronize()
            self._waited_s += begin.elapsed_time(end) / 1e3
        self._waits.clear()
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _receive_ahead(self, lane: _Lane | None, number: int) -> None:
        if lane is None:
            return
        # Started early, so that the message finds a waiting buffer.
        last = min(number + self._ahead + 1, len(lane.num_rows))
        for place in range(lane.num_begun, last):
            buffer = self._make_buffer(lane.num_rows[place])
            wait = self._group.start_receive(buffer, lane.peer, tag=_NUM_KINDS * place + lane.kind)
            lane.receiving[place] = (buffer, wait)
        lane.num_begun = max(lane.num_begun, last)

    def _receive(self, lane: _Lane, number: int) -> Tensor:
        self._receive_ahead(lane, number)
        buffer, wait = lane.receiving.pop(number)
        # Timed, because waiting must not count as this stage's computing time.
        self._time(wait)
        return self._wire.decode(buffer.to(self._device, non_blocking=True))

    def _send(self, lane: _Lane, number: int, hidden_NH: Tensor) -> None:
        message = self._wire.encode(hidden_NH.detach())
        name = "features" if lane.kind == _FORWARD else "gradients"
        if self._wire.rounds and name not in self._errors:
            self._errors[name] = self._wire.measure_error(hidden_NH.detach(), message)
        if self._device.type != "cpu":
            buffer = self._make_buffer(len(message))
            buffer.copy_(message)  # synchronizes with the passes that compute it
            message = buffer
        wait = self._group.start_send(message, lane.peer, tag=_NUM_KINDS * number + lane.kind)
        lane.sending[number] = (message, wait)

    def _make_buffer(self, num_rows: int) -> Tensor:
        if self._may_pin:
            try:
                return self._wire.make_buffer(num_rows, is_pinned=True)
            except RuntimeError:  # no more memory can be pinned
                self._may_pin = False
        return self._wire.make_buffer(num_rows)

    def _time(self, wait: Wait) -> None:
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            wait()
            end.record()
            self._waits.append((begin, end))
            return
        started_s = time.perf_counter()
        wait()
        self._waited_s += time.perf_counter() - started_s


def _release(lane: _Lane, number: int) -> None:
    if number in lane.sending:
        _, wait = lane.sending.pop(number)
        wait()
