"""Read and follow the append-only files of an attempt by offset, so that no byte is sent twice.

A follower sends the current content, then polls five times a second for more bytes and new files.
It ends after the attempt has ended and all bytes are sent. The rate is limited, so that a rank with
much output cannot delay the answers to other requests.
"""

from __future__ import annotations

import base64
import os
import stat
import time
from collections.abc import Callable
from threading import Event as Flag

from agents.contract.messages import STREAM_CHUNK_BYTES
from agents.contract.run import StreamChunk
from agents.contract.run_layout import is_stream
from agents.errors import ExpectedError
from agents.shared.files.logcap import read_kept
from agents.supervisor.attempt import AttemptFolder, is_over

POLL_S = 0.2
MAX_BYTES_PER_S = 8 << 20


def list_streams(attempt: AttemptFolder) -> dict[str, int]:
    """Return the size of each stream of the attempt.

    Raises:
        ExpectedError: the attempt's folder is missing.
    """
    sizes = {}
    try:
        with os.scandir(attempt.folder) as entries:
            for entry in entries:
                if is_stream(entry.name) and entry.is_file(follow_symlinks=False):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    except OSError as error:
        raise ExpectedError(
            f"The folder of attempt {attempt.number} of run {attempt.run_id} is not there "
            f"({attempt.folder}: {error.strerror}).",
            "It was deleted on the node; the copy on the master stays readable",
        ) from error
    return dict(sorted(sizes.items()))


def read_chunk(attempt: AttemptFolder, stream: str, offset: int, max_bytes: int) -> StreamChunk:
    """Return bytes of a stream from `offset`, none at its end.

    The removed middle of a huge log is skipped and counted.

    Raises:
        ExpectedError: the stream does not exist, or is shorter than `offset`.
    """
    if not is_stream(stream):
        raise ExpectedError(f"{stream[:80]!r} is not a stream of an attempt.")
    path = attempt.file(stream)
    try:
        # A symlink must not lead out of the attempt's folder.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ExpectedError(f"The stream {path} cannot be read: {error.strerror}.") from error
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode):
            raise ExpectedError(f"The stream {path} is not a file.")
        if not 0 <= offset <= state.st_size:
            raise ExpectedError(
                f"The stream {path} has {state.st_size} bytes, fewer than the {offset} already "
                "read: it was truncated.",
                "The copy on the master stays readable",
            )
        start, data = read_kept(file, offset, min(max(max_bytes, 0), STREAM_CHUNK_BYTES))
    finally:
        os.close(file)
    return StreamChunk(
        run_id=attempt.run_id,
        attempt=attempt.number,
        stream=stream,
        offset=start,
        data_base64=base64.b64encode(data).decode("ascii"),
        # The file may have grown between fstat and the read.
        size_bytes=max(state.st_size, start + len(data)),
        dropped_bytes=start - offset,
    )


def follow(
    attempt: AttemptFolder,
    offsets: dict[str, int],
    send: Callable[[StreamChunk], None],
    ended: Flag,
) -> None:
    """Send all bytes after `offsets` until the attempt has ended or `ended` is set.

    Raises:
        ExpectedError: the folder vanished, or a stream was truncated; the others were sent first.
    """
    reached = dict(offsets)
    while not ended.is_set():
        over = is_over(attempt)  # before reading, so that the last bytes are not missed
        moved = False
        sizes = list_streams(attempt)
        for stream, size in sizes.items():
            # One that a crash has cut must not hold up the others; its writer leaves a gap.
            if size > reached.get(stream, 0):
                moved = True
                _send_rest(attempt, stream, reached, send, ended)
        # One more pass without new bytes after the end shows that everything was sent.
        if over and not moved:
            for stream, offset in reached.items():
                if sizes.get(stream, 0) < offset:
                    read_chunk(attempt, stream, offset, 1)  # raises the reason
            return
        if not moved:
            ended.wait(POLL_S)


def _send_rest(
    attempt: AttemptFolder,
    stream: str,
    reached: dict[str, int],
    send: Callable[[StreamChunk], None],
    ended: Flag,
) -> None:
    """Send one stream up to its current end, at a limited rate."""
    while not ended.is_set():
        began_s = time.monotonic()
        chunk = read_chunk(attempt, stream, reached.get(stream, 0), STREAM_CHUNK_BYTES)
        # The number of bytes behind the base64 text, without decoding it.
        num_bytes = len(chunk.data_base64) // 4 * 3 - chunk.data_base64[-2:].count("=")
        if num_bytes == 0:
            return
        send(chunk)
        reached[stream] = chunk.offset + num_bytes
        if reached[stream] >= chunk.size_bytes:
            return
        ended.wait(max(0.0, num_bytes / MAX_BYTES_PER_S - (time.monotonic() - began_s)))
