"""Requests about the logs and journals of an attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.contract.messages import STREAM_CHUNK_BYTES
from agents.contract.requests import NodeRequest
from agents.contract.run import StreamChunk
from agents.contract.run_layout import is_stream


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSizes:
    streams: dict[str, int]
    """Size of each stream by its name, in bytes."""

    def check_foreign(self) -> None:
        for name in self.streams:
            if not is_stream(name):
                raise ValueError(f"{name[:80]!a} is not a stream of a run")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListStreams(NodeRequest[StreamSizes]):
    """List the streams of an attempt with their sizes."""

    kind = "stream.list"
    run_id: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadStream(NodeRequest[StreamChunk]):
    """Read one piece of a stream."""

    kind = "stream.read"
    is_verbatim = True
    echoes = ("run_id", "attempt", "stream")
    run_id: str
    attempt: int
    stream: str
    offset: int = 0
    max_bytes: int = STREAM_CHUNK_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    follow: int
    """Number that ends the follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowStreams(NodeRequest[Following]):
    """Send data appended to the streams: events `stream.data`, each with a StreamChunk.

    One `stream.end` comes last, with `follow`, `state` and `error: RemoteError | None`.
    """

    kind = "stream.follow"
    echoes = ("run_id", "attempt")
    run_id: str
    attempt: int
    offsets: dict[str, int] = field(default_factory=dict)
    """Offset at which each stream begins, by its name; others begin at 0."""

    def check_answer(self, answer: Following) -> None:
        pass  # only the chunks repeat the arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfollowStreams(NodeRequest[None]):
    """End a follow; after the answer, only its `stream.end` comes."""

    kind = "stream.unfollow"
    follow: int
