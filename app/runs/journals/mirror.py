"""Mirror the nodes' logs and journals byte for byte, as plain files that only grow.

The size of a mirror IS the offset up to which it has been fetched. Every append takes a lock
between processes and writes only what lies beyond the current end, so two masters that follow one
run, or a master that was killed in the middle of a write, never lose or double a byte. The middle
of a very long log becomes a hole, as on its node: offsets stay valid, the disk does not fill.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from agents.contract.logcap import cap_log
from agents.contract.run_layout import LOG_SUFFIX
from app.errors import UserError
from app.filelock import locked
from app.paths import open_private, private_folder

# A stream's name comes from a node and becomes a file name here: no separators, no leading dot.
_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")


class MirrorGap(Exception):
    """Raised when arriving bytes leave a gap: the follower has to request again from `size`."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the mirror ends at byte {size}")
        self.size = size


class Mirror:
    """Mirrors of one node's part of one attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sizes(self) -> dict[str, int]:
        """Return the size of every mirrored stream."""
        if not self.folder.is_dir():
            return {}
        return {
            path.name: path.stat().st_size
            for path in self.folder.iterdir()
            if _STREAM.fullmatch(path.name)
        }

    def append(self, stream: str, offset: int, data: bytes, dropped_bytes: int = 0) -> int:
        """Write the part of `data` that is not here yet; return the number of bytes written.

        Args:
            stream: file name of the log or journal.
            offset: position of `data` on the node.
            data: bytes from there on.
            dropped_bytes: bytes just before `offset` that no longer exist; they become a hole.

        Raises:
            MirrorGap: bytes between the mirror's end and `offset` are missing.
            UserError: the disk is full, or the folder cannot be written.
        """
        if not _STREAM.fullmatch(stream):
            raise UserError(f"a node sent a stream named {stream!r}, which is not allowed")
        try:
            private_folder(self.folder)
            with locked(self.folder / ".lock"):
                path = self.folder / stream
                num_new = _append(path, offset, data, dropped_bytes)
                if stream.endswith(LOG_SUFFIX):
                    with contextlib.suppress(
                        OSError
                    ):  # a file system without holes: it stays complete
                        cap_log(path)
                return num_new
        except OSError as error:
            raise UserError(
                f"{self.folder / stream} cannot be written: {error.strerror}",
                "Free disk space on this PC. The node keeps the log, which is fetched again.",
            ) from error


def _append(path: Path, offset: int, data: bytes, dropped_bytes: int) -> int:
    with open_private(path, "a") as file:
        size = file.tell()
        # The start of the hole may be known here already: extend up to it, never overwrite.
        if offset - dropped_bytes <= size < offset:
            size = file.truncate(offset)
        if offset > size:
            raise MirrorGap(size)
        news = data[size - offset :]
        file.write(news)
        return len(news)
