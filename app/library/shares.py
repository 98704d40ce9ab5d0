"""Recognise files of this PC that lie on a share, so that nodes can be asked for them.

On Windows, following a path leads from a mapped drive to its `\\\\server\\share`.
"""

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
"""Time in which a server has to answer this PC, in seconds."""


def locate(path: Path) -> Share | None:
    """Return where on a server a file or folder of this PC is; None: on a disk of this PC."""
    return _find_share(os.path.realpath(path))


def _find_share(path: str) -> Share | None:
    return read_unc(path) if os.name == "nt" else find_share(path, read_mounts())


def find_silent(path: Path, limit_s: float) -> Share | None:
    """Return the share of a file or folder if its server does not answer; None: it can be read.

    Only a thread that nobody waits for may ask: on Linux such a read can last for ever.
    """
    share = _find_share(os.path.abspath(path))
    if share is None or os.name == "nt":  # Windows gives up by itself
        return None
    has_answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError):
            # An error is an answer, too: whoever reads the file tells it better.
            os.listdir(path) if path.is_dir() else os.close(os.open(path, os.O_RDONLY))
        has_answered.set()

    threading.Thread(target=ask, name="share", daemon=True).start()
    return None if has_answered.wait(limit_s) else share


def require_answer(names: Iterable[str]) -> None:
    """Refuse files on a share whose server does not answer, before anything waits for it.

    Raises:
        UserError: naming the first.
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
    """Return the question whether a node has the files of a source; None: it must get a copy.

    A model whose files name code to run is copied without those names, and the shared one has them.
    """
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
