"""Handle the request for the newest logs of this node, across all runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from agents.contract.names import is_safe_name
from agents.contract.node import LogTail, NodeLogs
from agents.contract.run_layout import ATTEMPTS, LOG_SUFFIX, attempt_of_folder
from agents.serve.channel import Call

MOST_LOGS = 6
TAIL_BYTES = 16 << 10
"""Size of the tail of each log, in bytes; all of them together fit into one message."""


def read_tails(call: Call) -> NodeLogs:
    """Return the ends of the newest logs that are not empty."""
    found: list[tuple[float, Path]] = []
    for path in call.home.runs.glob(f"*/{ATTEMPTS}/*/*{LOG_SUFFIX}"):
        # A run that is being deleted has a hidden name.
        if not (is_safe_name(path.parents[2].name) and is_safe_name(path.name)):
            continue
        with contextlib.suppress(OSError):  # it may be deleted meanwhile
            status = path.stat()
            if status.st_size:
                found.append((status.st_mtime, path))
    newest = sorted(found, reverse=True)[:MOST_LOGS]
    return NodeLogs(tails=tuple(_read_tail(path, written_s) for written_s, path in newest))


def _read_tail(path: Path, written_s: float) -> LogTail:
    data, size_bytes = b"", 0
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    if size_bytes > TAIL_BYTES:
        # The first line is cut; a tail that is one endless line stays as it is.
        data = data.partition(b"\n")[2] or data
    attempt = attempt_of_folder(path.parent.name)
    return LogTail(
        run_id=path.parents[2].name,
        attempt=attempt or 0,
        name=path.name,
        size_bytes=size_bytes,
        written_s=written_s,
        text=data.decode("utf-8", "replace"),
    )
