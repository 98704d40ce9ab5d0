"""State of a transfer along a chain: its source, its targets and its report."""

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
"""Callback with the progress of each node."""
RATE_WINDOW_S = 3.0
"""Time over which the rate of a node is averaged, in seconds."""


@dataclass(kw_only=True, slots=True)
class SpreadReport:
    """Result of a transfer."""

    files: tuple[ChunkedFile, ...] = ()
    entries: tuple[FileEntry, ...] = ()
    """Files with the names that they have on the source node."""
    problems: dict[str, RacklessError] = field(default_factory=dict)
    """Error of each node that did not get all files."""
    notes: list[str] = field(default_factory=list)
    """Problems that the user may want to solve, as sentences."""
    received_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Time until each node had stored all files, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Giver:
    """The node that has the files to copy."""

    client: NodeClient
    root: str
    """Folder below its agent's home."""
    lacks: Callable[[NodeClient, Sequence[FileEntry]], Awaitable[bool]]
    """Callback that returns True if a node lacks any of the files."""


@dataclass(kw_only=True, slots=True)
class TargetState:
    """State of a target during the transfer."""

    member: Member
    held: str
    held_bytes: int = 0
    supplier: str | None = None
    """Node that it fetches from; None for this PC."""
    stored: bool = False
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    feeding: asyncio.Task[None] | None = None
    """Task that sends it chunks from this PC, or None."""
    is_direct: bool = False
    """True if chunks go to its port, not through SSH."""
    may_be_direct: bool = True
    """True if its port was not tried yet."""

    async def end_feeding(self) -> None:
        """Stop sending chunks from this PC, since the connection was lost."""
        feeding, self.feeding, self.is_direct = self.feeding, None, False
        if feeding is not None:
            feeding.cancel()
            await asyncio.wait({feeding})

    def note(self, held_bytes: int, now_s: float) -> None:
        """Record the progress that the node reports."""
        self.held_bytes = held_bytes
        self.samples.append((now_s, held_bytes))
        while now_s - self.samples[0][0] > RATE_WINDOW_S:
            self.samples.popleft()

    def rate(self) -> float | None:
        """Return the rate of the last seconds in bytes/s, or None if unknown."""
        if len(self.samples) < 2:
            return None
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None
