"""Messages between master and nodes while files are spread along a chain of nodes.

The master starts `spread` on each node over SSH and exchanges lines of JSON on its stdin and
stdout. Bytes follow the line of a `ChunkHeader`, in both directions. Nodes of a chain fetch chunks
from each other over TLS 1.3; the master only names the source. If it reaches a node's port itself,
it also sends chunks over such a connection: its request `OFFER`, then frames.
"""

from __future__ import annotations

import json
import struct
import typing
from dataclasses import dataclass

from agents.contract.chunks import ChunkedFile, from_bitmap
from agents.contract.json_text import parse_json
from agents.contract.names import check_inside, check_number
from agents.contract.run import FileEntry
from agents.contract.wire import WireError, from_wire, shorten, to_wire

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line, in bytes: the chunk hashes of two terabytes."""

OFFER = "offer"
"""Kind of the request by which the master sends chunks; the answer is an empty object."""
CHUNK_FRAME = struct.Struct("!II")
"""Header of each chunk between nodes, and from the master: its number and its size in bytes."""
MAX_BYTES = 1 << 50
"""Maximum size of a transfer, in bytes; the largest models have a thousandth of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadJob:
    """The master's first line: content that a node receives or gives."""

    files: tuple[ChunkedFile, ...] = ()
    """Content to receive; empty for the node that has it."""
    root: str | None = None
    """Folder below the agent's home with the content to give; None: this node receives."""
    credential: str = ""
    """Key and certificate of this transfer; empty: no node will connect, so it does not listen."""
    toward: str = ""
    """Address of another node of the transfer. If this node has no address in the master's network,
    it listens on the address from which it reaches that node."""

    def check_foreign(self) -> None:
        if self.root is not None:
            check_inside(self.root)
        if len({file.sha256 for file in self.files}) < len(self.files):
            raise ValueError("a file is listed twice")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadHello:
    """A node's first line, before it receives the job."""

    address: str
    """Address at which the master reached it; empty: it is on the master's PC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadReady:
    """A node's answer to the job."""

    address: str
    port: int
    """Port at which it listens for other nodes; 0: it does not listen."""
    held: str
    """Chunks that it has, as a bitmap in hex."""
    files: tuple[ChunkedFile, ...] = ()
    """Distinct contents that it gives."""
    entries: tuple[FileEntry, ...] = ()
    """Names of these contents in its folder."""

    def check_foreign(self) -> None:
        check_number("port", self.port, 0, 65535)
        given = {(file.sha256, file.size_bytes) for file in self.files}
        for entry in self.entries:
            if (entry.sha256, entry.size_bytes) not in given:
                raise ValueError(f"{entry.path[:120]!a} is listed and not given")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadProgress:
    """Progress of one node."""

    held_bytes: int
    received_bytes: int
    """Bytes of chunks received in this transfer, including damaged ones."""
    stored: bool = False
    """True if everything is verified, synced to disk and in the store."""

    def check_foreign(self) -> None:
        check_number("held_bytes", self.held_bytes, 0, MAX_BYTES)
        check_number("received_bytes", self.received_bytes, 0, MAX_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLost:
    """A node's report that it receives nothing more from its source node, or from `OFFER`."""

    address: str
    """Address of the source; empty: the master."""
    port: int
    reason: str
    had_begun: bool
    """True if any bytes came from there, so that it may only have been busy."""
    held: str
    """Chunks that it has, as a bitmap in hex."""

    def check_foreign(self) -> None:
        from_bitmap(self.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchFrom:
    """Order to fetch missing chunks from another node from now on."""

    address: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkHeader:
    """Header of a chunk, whose bytes follow."""

    chunk: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveChunk:
    """Request of the master for a chunk, on behalf of a node that no other node reaches."""

    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadFailed:
    """Why a node can neither give nor receive anything."""

    message: str
    hint: str


Message = (
    SpreadJob
    | SpreadHello
    | SpreadReady
    | SpreadProgress
    | SourceLost
    | FetchFrom
    | ChunkHeader
    | GiveChunk
    | SpreadFailed
)
_KINDS = {kind.__name__: kind for kind in typing.get_args(Message)}


def to_line(message: Message) -> bytes:
    """Return a message as a line.

    >>> to_line(GiveChunk(chunk=3))
    b'{"kind": "GiveChunk", "chunk": 3}\\n'
    """
    fields = {"kind": type(message).__name__, **to_wire(message)}
    return json.dumps(fields).encode("ascii") + b"\n"


def read_line(line: bytes) -> Message:
    """Return the message in a line.

    Raises:
        WireError: it is not a message, or of an unknown kind.
    """
    fields = parse_json(line)
    kind = _KINDS.get(str(fields.get("kind"))) if isinstance(fields, dict) else None
    if kind is None:
        raise WireError(f"{shorten(line)} is not a message of a transfer")
    message: Message = from_wire(kind, fields, kind.__name__)
    return message
