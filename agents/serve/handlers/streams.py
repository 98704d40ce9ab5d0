"""Handlers of requests about the logs and journals of an attempt."""

from __future__ import annotations

import threading
from typing import Any

from agents.contract.messages import RemoteError
from agents.contract.requests.streams import (
    Following,
    FollowStreams,
    ListStreams,
    ReadStream,
    StreamSizes,
    UnfollowStreams,
)
from agents.contract.run import StreamChunk
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.streams import follow as follow_streams
from agents.supervisor.streams import list_streams as list_sizes
from agents.supervisor.streams import read_chunk


@handles(ListStreams)
def list_streams(call: Call, request: ListStreams) -> StreamSizes:
    """Return the streams of an attempt with their sizes."""
    attempt = AttemptFolder(call.home, request.run_id, request.attempt)
    return StreamSizes(streams=list_sizes(attempt))


@handles(ReadStream)
def read(call: Call, request: ReadStream) -> StreamChunk:
    """Return one piece of a stream."""
    attempt = AttemptFolder(call.home, request.run_id, request.attempt)
    return read_chunk(attempt, request.stream, request.offset, request.max_bytes)


@handles(FollowStreams)
def follow(call: Call, request: FollowStreams) -> Following:
    """Answer with the follow's number, then send `stream.data` events and one `stream.end`."""
    attempt = AttemptFolder(call.home, request.run_id, request.attempt)
    attempt.require()
    number = call.request.id
    call.follows[number] = ended = threading.Event()
    # After the answer: the master must know the number before the first event comes.
    call.afterwards.append(lambda: _follow(call, attempt, request.offsets, ended))
    return Following(follow=number)


@handles(UnfollowStreams)
def unfollow(call: Call, request: UnfollowStreams) -> None:
    """End a follow; after the answer, only its `stream.end` comes."""
    ended = call.follows.get(request.follow)
    if ended is not None:
        ended.set()


def _follow(
    call: Call, attempt: AttemptFolder, offsets: dict[str, int], ended: threading.Event
) -> None:
    number = call.request.id

    def send(chunk: StreamChunk) -> None:
        call.emit("stream.data", {"follow": number, **to_wire(chunk)})
        # A broken channel is only a flag, so the loop must be ended here.
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
