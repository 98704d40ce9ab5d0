"""What a transfer along a chain starts from, knows of each node, and reports at its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agents.contract.chunks import ChunkedFile
from agents.contract.run import FileEntry
from app.errors import RacklessError
from app.events import NodeTransfer
from app.nodes.client import NodeClient
from app.nodes.files.member import Member

OnSpread = Callable[[Sequence[NodeTransfer]], None]
"""Callback that gets how far each node is."""
RATE_WINDOW_S = 3.0
"""Time over which the rate of a node is averaged, in seconds."""


@dataclass(kw_only=True, slots=True)
class SpreadReport:
    """How a transfer ended."""

    files: tuple[ChunkedFile, ...] = ()
    entries: tuple[FileEntry, ...] = ()
    """Names that the node which gave them has for the files."""
    problems: dict[str, RacklessError] = field(default_factory=dict)
    """Why nodes did not get everything."""
    notes: list[str] = field(default_factory=list)
    """What a person may want to mend, in sentences."""
    received_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time until each node had stored everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Giver:
    """The node that has the files."""

    client: NodeClient
    root: str
    """Folder below its agent's home."""
    lacks: Callable[[NodeClient, Sequence[FileEntry]], Awaitable[bool]]
    """Returns whether a node lacks any of the files."""


@dataclass(kw_only=True, slots=True)
class TargetState:
    """What is known of a target while it gets its files."""

    member: Member
    held: str
    held_bytes: int = 0
    supplier: str | None = None
    """Node that it fetches from; None: this PC."""
    stored: bool = False
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    feeding: asyncio.Task[None] | None = None
    """Sends it chunks from this PC; None: nothing does."""
    is_direct: bool = False
    """Whether they go to its port, not through SSH."""
    may_be_direct: bool = True
    """Whether that was not tried yet."""

    async def end_feeding(self) -> None:
        """Send it nothing more from this PC over the connection that it has lost."""
        feeding, self.feeding, self.is_direct = self.feeding, None, False
        if feeding is not None:
            feeding.cancel()
            await asyncio.wait({feeding})

    def note(self, held_bytes: int, now_s: float) -> None:
        """Take what the node says that it has."""
        self.held_bytes = held_bytes
        self.samples.append((now_s, held_bytes))
        while now_s - self.samples[0][0] > RATE_WINDOW_S:
            self.samples.popleft()

    def rate(self) -> float | None:
        """Return the bytes/s of the last seconds; None: not known yet."""
        if len(self.samples) < 2:
            return None
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None
