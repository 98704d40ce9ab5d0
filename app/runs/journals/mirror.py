"""Mirror the nodes' logs and journals byte for byte, as plain files that only grow.

The size of a mirror IS the offset up to which it has been fetched. Every append takes a lock
between processes and writes only bytes beyond the current end, so two masters that follow one run,
or a master that was killed during a write, never lose or duplicate a byte. The middle of a very
long log becomes a hole, as on its node: offsets stay valid, and the disk does not fill.

A node's data is limited: names are those of the run layout, files lie where we put them, sizes and
holes are plausible for a run, and the disk of this PC keeps a reserve.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from agents.contract.run_layout import LOG_SUFFIX, is_stream
from agents.shared.files import logcap
from agents.shared.files.full_disk import advise_room, name_disk_error
from app.errors import LockHeld, UserError
from app.filelock import locked
from app.paths import leads_through_link, open_private, private_folder, room_bytes
from app.text import show_bytes

MAX_LOG_BYTES = 256 << 30
"""Maximum length of a log, including its hole, in bytes: a week of 400 kB per second."""
MAX_JOURNAL_BYTES = 1 << 30
"""Maximum size of a journal or trace, in bytes: two million steps of a rank."""
MAX_STREAMS = 2048
"""Maximum number of logs, journals and traces of one node's part."""
# A file system without holes is detected after this many bytes, and not after a terabyte.
_HOLE_TRIAL_BYTES = 1 << 20
# Each chunk is written within milliseconds; the event loop must not wait for a suspended process.
LOCK_LIMIT_S = 0.5

Refused = Callable[[str, UserError], None]
"""Callback with a stream that is no longer mirrored, and the reason."""


class MirrorGap(Exception):
    """Raised if bytes would leave a gap; the follower has to request again from `size`."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the mirror ends at byte {size}")
        self.size = size


class StreamRefused(UserError):
    """Raised for a stream that no run has; the node's other streams are still mirrored."""


class MirrorBlocked(UserError):
    """Raised if this PC cannot store more of a mirror; the node keeps the data for a retry."""

    topic = "master-disk-full"


class Mirror:
    """Mirrors of one node's part of one attempt."""

    def __init__(
        self, folder: Path, *, below: Path | None = None, refused: Refused | None = None
    ) -> None:
        """Mirror into `folder`; symbolic links between it and `below` are not followed."""
        self.folder = folder
        self._below = below or folder
        self._refused = refused

    def sizes(self) -> dict[str, int]:
        """Return the size of every mirrored stream."""
        if not self.folder.is_dir():
            return {}
        return {
            path.name: path.lstat().st_size
            for path in self.folder.iterdir()
            if is_stream(path.name)
        }

    def refuse(self, stream: str, error: UserError) -> None:
        """Report a stream that is no longer mirrored."""
        if self._refused is not None:
            self._refused(stream, error)

    def append(self, stream: str, offset: int, data: bytes, dropped_bytes: int = 0) -> int:
        """Write the new part of `data`; return the number of bytes written.

        Args:
            stream: file name of the log or journal.
            offset: position of `data` on the node.
            data: bytes from that position.
            dropped_bytes: bytes just before `offset` that no longer exist; they become a hole.

        Raises:
            MirrorGap: bytes between the mirror's end and `offset` are missing.
            StreamRefused: no run has such a stream.
            MirrorBlocked: the disk is full, or the folder cannot be written.
        """
        if not is_stream(stream):
            raise StreamRefused(f"a node sent a stream named {stream!a}, which is not allowed")
        self._check_size(stream, offset, len(data), dropped_bytes)
        try:
            if leads_through_link(self.folder / stream, self._below):
                raise MirrorBlocked(
                    f"a symbolic link leads to {self.folder / stream}, so nothing is written there",
                    "Remove the link",
                )
            private_folder(self.folder)
            with locked(self.folder / ".lock", LOCK_LIMIT_S):
                self._check_room(stream, len(data))
                path = self.folder / stream
                num_new = _append(path, offset, data, dropped_bytes)
                if stream.endswith(LOG_SUFFIX):
                    with contextlib.suppress(
                        OSError
                    ):  # a file system without holes: it stays complete
                        logcap.cap_log(path)
                return num_new
        except LockHeld as error:
            raise MirrorBlocked(error.message, error.hint) from error
        except OSError as error:
            raise MirrorBlocked(
                f"{self.folder / stream} cannot be written: {name_disk_error(error)}",
                f"{advise_room(error)}. The node keeps the log, which is fetched again.",
            ) from error

    def _check_size(self, stream: str, offset: int, size_bytes: int, dropped_bytes: int) -> None:
        is_log = stream.endswith(LOG_SUFFIX)
        most = MAX_LOG_BYTES if is_log else MAX_JOURNAL_BYTES
        if offset < 0 or offset + size_bytes > most:
            raise StreamRefused(
                f"{stream} is longer than {show_bytes(most)}, so the rest of it is not copied here",
                "It stays on the node",
            )
        # A node drops the middle of logs only: a journal with a hole would be a different history.
        if not 0 <= dropped_bytes <= (offset if is_log else 0):
            raise StreamRefused(
                f"the node claims that {dropped_bytes} bytes of {stream} were dropped, which no "
                "node of ours drops, so it is not copied any further",
                "Check that PC: what it reports of this run cannot be trusted",
            )

    def _check_room(self, stream: str, size_bytes: int) -> None:
        if not (self.folder / stream).exists() and len(self.sizes()) >= MAX_STREAMS:
            raise StreamRefused(f"a node sent more than {MAX_STREAMS} streams of one run")
        if size_bytes > room_bytes(self.folder):
            raise MirrorBlocked(
                f"the disk of {self.folder} is almost full, so logs are not copied to this PC",
                "Free disk space on this PC. The node keeps the log, which is fetched again.",
            )


def _append(path: Path, offset: int, data: bytes, dropped_bytes: int) -> int:
    # Append mode: the position is the end of the file, which is the offset already fetched.
    with open_private(path, "a") as file:
        size = file.tell()
        # Part of the hole may exist here already: extend up to its end, never overwrite.
        if offset - dropped_bytes <= size < offset:
            _make_hole(file.fileno(), path, size, offset)
            size = file.seek(0, os.SEEK_END)
        if offset > size:
            raise MirrorGap(size)
        news = data[size - offset :]
        file.write(news)
        return len(news)


def _make_hole(file: int, path: Path, start: int, end: int) -> None:
    """Extend a file without filling the disk.

    Raises:
        StreamRefused: the file system has no holes, and the disk no room for the zeros.
    """
    before = os.fstat(file)
    os.truncate(file, min(end, start + _HOLE_TRIAL_BYTES))
    # A file system without holes stores zeros, which shows in the used blocks.
    filled = logcap.used_bytes(os.fstat(file)) > logcap.used_bytes(before) + logcap.BLOCK_BYTES
    if filled and end - start > room_bytes(path.parent):
        os.truncate(file, start)
        raise StreamRefused(
            f"{path.name} has a gap of {show_bytes(end - start)}, for which the disk of this PC "
            "has no room",
            "Free disk space on this PC, or see the log on the node",
        )
    os.truncate(file, end)
