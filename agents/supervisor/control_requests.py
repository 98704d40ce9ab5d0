"""Pass control requests to a training attempt as files: the agent writes them, rank 0 reads them.

Each attempt has its own folder, so requests to an older attempt have no effect. The first request
creates the folder, so a check for requests costs the trainer one system call per step.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from agents.contract.run import ControlRequest
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import explain_os_error
from agents.state import read_json, require_name, write_json

# The name on disk predates the term "control request" and is kept for compatibility.
_FOLDER = "wishes"
_SUFFIX = ".json"


def write_request(attempt: Path, request: ControlRequest) -> None:
    """Write a control request into the folder of an attempt.

    Raises:
        ExpectedError: the disk is full or read-only.
    """
    folder = attempt / _FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making the folder {folder}") from error
    write_json(
        folder / f"{require_name(request.wish_id, 'The control request')}{_SUFFIX}",
        to_wire(request),
    )


def take_requests(attempt: Path) -> list[ControlRequest]:
    """Return the requests since the last call, and remove their files and malformed ones."""
    try:
        names = sorted(path.name for path in (attempt / _FOLDER).iterdir())
    except OSError:
        return []  # no request yet
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
