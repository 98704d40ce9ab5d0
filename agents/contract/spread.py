"""What master and nodes say while files are spread along a chain of nodes.

The master starts `spread` on each node over SSH and talks to it by lines of JSON on its stdin and
stdout. Bytes follow the line of a `ChunkHeader`, both ways. Nodes of a chain fetch chunks from each
other over TLS 1.3; the master only says from whom. Where it reaches a node's port itself, it brings
chunks over such a connection as well: its request `OFFER`, then frames.
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
"""Maximum length of a line, in bytes: the chunks of two terabytes."""

OFFER = "offer"
"""Kind of the request by which the master brings chunks; the answer is an empty object."""
CHUNK_FRAME = struct.Struct("!II")
"""What precedes each chunk between nodes, and from the master: its number and its size in bytes."""
MAX_BYTES = 1 << 50
"""Number of bytes of a transfer; the largest models have a thousandth of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadJob:
    """The master's first line: what a node has to get, or to give."""

    files: tuple[ChunkedFile, ...] = ()
    """Content to get; empty for the node that has it."""
    root: str | None = None
    """Folder below the agent's home with the content to give; None: this node gets it."""
    credential: str = ""
    """Key and certificate of this transfer; empty: nobody would connect, and nothing listens."""
    toward: str = ""
    """Address of another node of the transfer: where this node has no address in the network by
    which the master came, it listens on the one by which that node is reached."""

    def check_foreign(self) -> None:
        if self.root is not None:
            check_inside(self.root)
        if len({file.sha256 for file in self.files}) < len(self.files):
            raise ValueError("a file is listed twice")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadHello:
    """A node's first line, before it knows the job."""

    address: str
    """Address at which the master reached it; empty: it is on the master's PC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadReady:
    """A node's answer to the job."""

    address: str
    port: int
    """Where it listens for the other nodes; 0: nowhere."""
    held: str
    """Chunks that it has, as a bitmap in hex."""
    files: tuple[ChunkedFile, ...] = ()
    """Content that it gives, each once."""
    entries: tuple[FileEntry, ...] = ()
    """Names of that content in its folder."""

    def check_foreign(self) -> None:
        check_number("port", self.port, 0, 65535)
        given = {(file.sha256, file.size_bytes) for file in self.files}
        for entry in self.entries:
            if (entry.sha256, entry.size_bytes) not in given:
                raise ValueError(f"{entry.path[:120]!a} is listed and not given")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadProgress:
    """What a node has by now."""

    held_bytes: int
    received_bytes: int
    """Bytes of chunks that have come in during this transfer, damaged ones included."""
    stored: bool = False
    """Whether everything is verified, synced to disk and in the store."""

    def check_foreign(self) -> None:
        check_number("held_bytes", self.held_bytes, 0, MAX_BYTES)
        check_number("received_bytes", self.received_bytes, 0, MAX_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLost:
    """A node gets nothing more from the node that it fetched from, or that `OFFER` brings."""

    address: str
    """Empty: the master brought it."""
    port: int
    reason: str
    had_begun: bool
    """Whether anything came from there: then it may only have been busy."""
    held: str
    """Chunks that it has, as a bitmap in hex."""

    def check_foreign(self) -> None:
        from_bitmap(self.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchFrom:
    """From which node to fetch what is missing, from now on."""

    address: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkHeader:
    """A chunk whose bytes follow."""

    chunk: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveChunk:
    """The master wants a chunk, for a node that no other one reaches."""

    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadFailed:
    """Why a node can neither get nor give anything."""

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
        WireError: there is none, or one of another kind.
    """
    fields = parse_json(line)
    kind = _KINDS.get(str(fields.get("kind"))) if isinstance(fields, dict) else None
    if kind is None:
        raise WireError(f"{shorten(line)} is no message of a transfer")
    message: Message = from_wire(kind, fields, kind.__name__)
    return message
