"""What is asked of an attempt while it trains, as files in its folder: the agent leaves them there,
rank 0 takes them, once each.

A wish of an older attempt lies in a folder that nobody looks into any more. The folder is made by
the first wish, so that looking for one costs the trainer a system call per step.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from agents.contract.run import ControlRequest
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import explain_os_error
from agents.state import read_json, require_name, write_json

_FOLDER = "wishes"
_SUFFIX = ".json"


def leave_wish(attempt: Path, wish: ControlRequest) -> None:
    """Write a wish into the folder of an attempt.

    Raises:
        ExpectedError: the disk is full or may not be written.
    """
    folder = attempt / _FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making the folder {folder}") from error
    write_json(folder / f"{require_name(wish.wish_id, 'The wish')}{_SUFFIX}", to_wire(wish))


def take_wishes(attempt: Path) -> list[ControlRequest]:
    """Return the wishes that were left since the last time; what is no wish is removed unread."""
    try:
        names = sorted(path.name for path in (attempt / _FOLDER).iterdir())
    except OSError:
        return []  # nobody has asked for anything
    found = []
    for name in names:
        path = attempt / _FOLDER / name
        if name.startswith(".") or path.suffix != _SUFFIX:
            continue  # half written
        with contextlib.suppress(WireError):
            found.append(from_wire(ControlRequest, read_json(path)))
        with contextlib.suppress(OSError):
            path.unlink()
    return found
