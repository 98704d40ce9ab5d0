"""Send messages to the master, and pass a request to its handler."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agents.children import Children
from agents.contract.messages import Event, Message, Progress, Request, encode
from agents.contract.wire import to_wire
from agents.state import Home

if TYPE_CHECKING:
    import socket

    from agents.serve.chats import Chat

# Characters of a progress message: libraries may print a whole traceback as one line.
_MAX_MESSAGE = 2000


class AgentChannel:
    """Writes whole messages to the master, one at a time, from any thread."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._lock = threading.Lock()
        self.broken = threading.Event()

    def send(self, message: Message) -> None:
        """Write one message; set `broken` if the master is gone.

        Raises:
            WireError: the message is too long to be sent.
        """
        # Encoded outside the lock: a long result must not delay other threads.
        view = memoryview(encode(message))
        with self._lock:
            try:
                while view and not self.broken.is_set():
                    # A write to a pipe may be short; the lock keeps messages whole.
                    view = view[os.write(self._out, view) :]
            except OSError:
                # Not raised: each thread ends by itself once it sees the flag.
                self.broken.set()


@dataclass
class Call:
    """One request while it is handled."""

    request: Request
    home: Home
    channel: AgentChannel
    children: Children
    follows: dict[int, threading.Event]
    """Running streams by the id of their request; setting the event ends one."""
    chats: dict[str, Chat]
    """Loaded models by the id of their chat."""
    ports: deque[socket.socket] = field(default_factory=deque)
    """Sockets that hold ports for which the master has asked."""
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """Functions to call on the same thread after the response is sent."""

    @property
    def args(self) -> dict[str, Any]:
        return self.request.args

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        """Send an event of this request."""
        self.channel.send(Event(kind=kind, data=data, request_id=self.request.id))

    def progress(self, message: str, phase: str = "") -> None:
        """Send the master a sentence about the state of a slow request, and its phase."""
        self.emit("progress", to_wire(Progress(message=message[:_MAX_MESSAGE], phase=phase)))
