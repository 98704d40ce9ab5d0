"""Recognize files of this PC that are on a share, so that nodes can be asked for them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from agents.contract.in_place import PlaceQuery
from agents.contract.shares import Share, find_share, read_mounts, read_unc
from app.errors import UserError
from app.library.bundles import Source

ANSWER_S = 15.0
"""Time limit for the answer of a share's server, in seconds."""


def locate(path: Path) -> Share | None:
    """Return the share of a file or folder of this PC; None: it is on a local disk."""
    # On Windows, resolving a path also turns a mapped drive into its \\server\share.
    return _find_share(os.path.realpath(path))


def _find_share(path: str) -> Share | None:
    return read_unc(path) if os.name == "nt" else find_share(path, read_mounts())


def find_silent(path: Path, limit_s: float) -> Share | None:
    """Return the share of a file or folder if its server does not answer; None: it answers."""
    share = _find_share(os.path.abspath(path))
    if share is None or os.name == "nt":  # Windows has its own time limit
        return None
    has_answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError):
            # An error is an answer, too; the later read of the file explains it better.
            os.listdir(path) if path.is_dir() else os.close(os.open(path, os.O_RDONLY))
        has_answered.set()

    # A daemon thread, since on Linux a read from a dead server can block forever.
    threading.Thread(target=ask, name="share", daemon=True).start()
    return None if has_answered.wait(limit_s) else share


def require_answer(names: Iterable[str]) -> None:
    """Refuse files on a share whose server does not answer, before anything blocks on it.

    Raises:
        UserError: a server does not answer; it names the first.
    """
    for name in names:
        path = Path(os.path.expanduser(name))
        silent = find_silent(path, ANSWER_S) if path.is_absolute() else None
        if silent is not None:
            raise UserError(
                f"{silent.label} does not answer: {path} could not be opened in {ANSWER_S:.0f} s",
                "Start its server, mount the share again, or unmount it where the nodes have the "
                "files.",
                topic="share-lost",
            )


def ask_for(source: Source) -> PlaceQuery | None:
    """Return the query whether a node has the files of a source; None: it must get a copy."""
    # Files that are cleaned of references to code differ from those on the share.
    if source.destination is None or source.root is None or source.cleaned or source.written:
        return None
    named, real = os.path.abspath(source.root), os.path.realpath(source.root)
    return PlaceQuery(
        is_model=source.destination.startswith("models/"),
        paths=tuple(dict.fromkeys(path for path in (named, real) if path.startswith("/"))),
        share=_find_share(real),
        files=source.files,
        member=source.member,
    )
