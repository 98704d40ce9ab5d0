"""Check the model of a run on this PC before any of it is sent.

Inspections of folders are cached while all of their files are unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.node import ModelRefusal
from agents.contract.spec import RunSpec
from app.errors import UserError
from app.text import count_of, shorten

if TYPE_CHECKING:
    from agents.shared.models.folder import ModelFolder
    from agents.shared.models.model_files import Parts

MAX_KEPT = 64
"""Maximum number of cached inspections."""
_Stamp = tuple[tuple[str, int, int], ...]


class ModelInspector:
    """Inspections of model folders, each kept while the folder is unchanged."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Parts, bool, _Stamp], ModelFolder] = {}

    def inspect(self, folder: Path, *, parts: Parts = "all", whole: bool = True) -> ModelFolder:
        """Return the contents and problems of a folder; see `inspect_model`."""
        # Imported on use, here and below, so that other commands start faster.
        from agents.shared.models.folder import inspect_model

        key = (str(folder), parts, whole, _stamp(folder))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = found = inspect_model(folder, parts=parts, whole=whole)
        return found


def _stamp(folder: Path) -> _Stamp:
    """Return name, size and time of each file of a folder."""
    stamps = []
    try:
        for path in sorted(folder.iterdir()):
            status = path.stat()
            stamps.append((path.name, status.st_size, status.st_mtime_ns))
    except OSError:
        return ()
    return tuple(stamps)


def require_usable(name: str, model: ModelFolder, spec: RunSpec | None = None) -> None:
    """Refuse a model that no run, or not this run, can train.

    Raises:
        UserError: the model is refused; it names the first reason.
    """
    from agents.shared.models.fit import find_refusals

    refuse(find_refusals(shorten(name), model, spec))


def refuse(refusals: Sequence[ModelRefusal], where: str = "") -> None:
    """Raise the first of the refusals, if there are any; `where` names the node.

    Raises:
        UserError: there is a refusal.
    """
    if refusals:
        first, more = refusals[0], len(refusals) - 1
        text = first.message + (f" (and {count_of(more, 'more problem')})" if more else "")
        raise UserError(f"{where}: {text}" if where else text, f"{first.hint}." * bool(first.hint))


def find_folder(name: str) -> Path | None:
    """Return the model's folder on this PC; None: it is on the nodes or on the hub."""
    path = Path(os.path.expanduser(name))  # Path.expanduser would raise for an unknown user
    try:
        return path.absolute() if path.is_dir() else None
    except (OSError, ValueError):
        return None
