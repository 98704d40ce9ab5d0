"""Handle requests about the logs and journals of an attempt."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from agents.contract.messages import STREAM_CHUNK_BYTES, RemoteError
from agents.contract.run import StreamChunk
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.serve.channel import Call
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.streams import follow as follow_streams
from agents.supervisor.streams import list_streams as list_sizes
from agents.supervisor.streams import read_chunk


@dataclass(frozen=True)
class ListStreamsArgs:
    run_id: str
    attempt: int


@dataclass(frozen=True)
class ReadArgs:
    run_id: str
    attempt: int
    stream: str
    offset: int = 0
    max_bytes: int = STREAM_CHUNK_BYTES


@dataclass(frozen=True)
class FollowStreamArgs:
    run_id: str
    attempt: int
    offsets: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class UnfollowArgs:
    follow: int


def list_streams(call: Call) -> dict[str, Any]:
    """Return the streams of an attempt with their sizes."""
    args = from_wire(ListStreamsArgs, call.args, "args")
    return {"streams": list_sizes(AttemptFolder(call.home, args.run_id, args.attempt))}


def read(call: Call) -> StreamChunk:
    """Return one piece of a stream."""
    args = from_wire(ReadArgs, call.args, "args")
    attempt = AttemptFolder(call.home, args.run_id, args.attempt)
    return read_chunk(attempt, args.stream, args.offset, args.max_bytes)


def follow(call: Call) -> dict[str, Any]:
    """Answer with the follow's number, then send `stream.data` events and one `stream.end`."""
    args = from_wire(FollowStreamArgs, call.args, "args")
    attempt = AttemptFolder(call.home, args.run_id, args.attempt)
    attempt.require()
    number = call.request.id
    call.follows[number] = ended = threading.Event()
    # After the answer: the master must know the number before the first event comes.
    call.afterwards.append(lambda: _follow(call, attempt, args.offsets, ended))
    return {"follow": number}


def unfollow(call: Call) -> dict[str, Any]:
    """End a follow; no event of it comes after the answer but `stream.end`."""
    args = from_wire(UnfollowArgs, call.args, "args")
    ended = call.follows.get(args.follow)
    if ended is not None:
        ended.set()
    return {}


def _follow(
    call: Call, attempt: AttemptFolder, offsets: dict[str, int], ended: threading.Event
) -> None:
    number = call.request.id

    def send(chunk: StreamChunk) -> None:
        call.emit("stream.data", {"follow": number, **to_wire(chunk)})
        if call.channel.broken.is_set():
            ended.set()

    end: dict[str, Any] = {"follow": number, "state": None, "error": None}
    try:
        follow_streams(attempt, offsets, send, ended)
        end["state"] = read_status(attempt).state
    except ExpectedError as error:
        remote = RemoteError(kind="user", message=error.message, hint=error.hint, topic=error.topic)
        end["error"] = to_wire(remote)
    finally:
        call.follows.pop(number, None)
    call.emit("stream.end", end)
