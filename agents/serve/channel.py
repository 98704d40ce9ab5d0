"""What a handler holds: the way out to the master, and the request that it works on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agents.children import Children
from agents.contract.messages import Event, Message, Progress, Request, encode
from agents.contract.wire import to_wire
from agents.state import Home

if TYPE_CHECKING:
    from agents.serve.chats import Chat

# Characters of a progress message: a library may print a whole traceback as one line.
_MAX_MESSAGE = 2000


class AgentChannel:
    """The way out: whole messages, one at a time, from any thread."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._lock = threading.Lock()
        self.broken = threading.Event()

    def send(self, message: Message) -> None:
        """Write one message; when nobody reads any more, say so in `broken` and go on.

        Raises:
            WireError: the message is too long to be sent.
        """
        self.write(encode(message))

    def write(self, line: bytes) -> None:
        view = memoryview(line)
        with self._lock:
            try:
                while view and not self.broken.is_set():
                    view = view[os.write(self._out, view) :]
            except OSError:
                self.broken.set()


@dataclass
class Call:
    """One request on its way through a handler."""

    request: Request
    home: Home
    channel: AgentChannel
    children: Children
    follows: dict[int, threading.Event]
    """What streams events now, by the id of the request that asked; the Event ends it."""
    chats: dict[str, Chat]
    """Models that are loaded for a conversation, by their names."""
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """Run on the same thread once the response is out."""

    @property
    def args(self) -> dict[str, Any]:
        return self.request.args

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        """Send an event that belongs to this request."""
        self.channel.send(Event(kind=kind, data=data, request_id=self.request.id))

    def progress(self, message: str, phase: str = "") -> None:
        """Send the master a sentence about a slow request, and the phase that it is in."""
        self.emit("progress", to_wire(Progress(message=message[:_MAX_MESSAGE], phase=phase)))
