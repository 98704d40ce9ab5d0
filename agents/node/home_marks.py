"""Recognise that two nodes have one folder for the agent, as with a home on a shared drive.

The folder has a random id, which each node reports with its facts. Nodes with equal ids share the
folder or were cloned from one disk. Only a mark decides: one of them writes it, and the other one
finds it or not.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from agents.contract.node import HOME_ID
from agents.errors import explain_os_error
from agents.state import Home, require_name

_ID_FILE = "home-id"


def read_home_id(home: Home) -> str | None:
    """Return the id of the agent's folder, created at the first call; None on a full disk."""
    path = home.path / _ID_FILE
    with contextlib.suppress(OSError):
        if (found := _read_id(path)) is not None:
            return found
        made = home.path / f".{_ID_FILE}.{secrets.token_hex(8)}"
        made.write_text(secrets.token_hex(16), encoding="ascii")
        try:
            # Unlike a rename, a link fails if another node was faster, and its id counts.
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        finally:
            made.unlink()
        return _read_id(path)
    return None


def _read_id(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        found = path.read_text(encoding="ascii", errors="replace")
        return found if re.fullmatch(HOME_ID, found) else None
    return None


def mark_home(home: Home, mark: str, *, removes: bool) -> None:
    """Write or remove a mark.

    Raises:
        ExpectedError: the disk is full or read-only.
    """
    path = _mark_file(home, mark)
    try:
        if removes:
            path.unlink(missing_ok=True)
        else:
            path.touch(mode=0o600)
    except OSError as error:
        raise explain_os_error(error, f"writing {path}") from error


def find_marks(home: Home, marks: Sequence[str]) -> tuple[str, ...]:
    """Return those of the marks that are there."""
    # Each by its name: a drive's cached list of the folder may be a minute old.
    return tuple(mark for mark in marks if _mark_file(home, mark).exists())


def _mark_file(home: Home, mark: str) -> Path:
    return home.path / f".mark-{require_name(mark, 'The mark')}"
