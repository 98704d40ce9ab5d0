"""List the files that a run copies from this PC to its nodes, to be shown before the start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from agents.contract.spec import RunSpec
from app.library.data_size import list_files
from app.library.shares import locate, require_answer
from app.text import count_of, show_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SentFiles:
    """A file or folder of this PC that is sent to the nodes of a run."""

    key: str
    """Key of the run file that names it."""
    path: str
    """Path with all links resolved."""
    num_files: int | None
    """Number of files; None: not counted, since the folder has too many entries."""
    size_bytes: int | None
    share: str = ""
    """Name of the share that holds it, whose files nodes may use in place; empty: a local disk."""


def list_sent(spec: RunSpec) -> tuple[SentFiles, ...]:
    """Return the files that a run sends; reads only names and sizes.

    Files that are not on this PC are left out: nodes have or download them.

    Raises:
        UserError: the server of a share does not answer.
    """
    named = {"data.train": spec.data.train, "data.eval": spec.data.eval, "model": spec.model}
    names = {key: name for key, name in named.items() if name}
    require_answer(names.values())
    found = (_describe(key, name) for key, name in names.items())
    return tuple(sent for sent in found if sent is not None)


def say_sent(sent: SentFiles) -> str:
    """Return one line about a sent file or folder.

    >>> say_sent(SentFiles(key="model", path="/models/a", num_files=3, size_bytes=2_000))
    'model: /models/a, 3 files, 2.0 KiB'
    """
    parts = [sent.path]
    if sent.num_files is not None and Path(sent.path).suffix == "":
        parts.append(count_of(sent.num_files, "file"))
    if sent.size_bytes is not None:
        parts.append(show_bytes(sent.size_bytes))
    if sent.share:
        parts[-1] += f"; nodes that have {sent.share} use it in place"
    return f"{sent.key}: {', '.join(parts)}"


def _describe(key: str, name: str) -> SentFiles | None:
    try:
        path = Path(os.path.expanduser(name)).absolute()
        if not path.exists():
            return None
        real = path.resolve()
        files = _list_top(real) if key == "model" and real.is_dir() else list_files(real)
        sizes = None if files is None else [one.stat().st_size for one in files]
        share = locate(real)
    except (OSError, ValueError, RuntimeError):
        return None  # the start reports the problem
    return SentFiles(
        key=key,
        path=str(real),
        num_files=None if sizes is None else len(sizes),
        size_bytes=None if sizes is None else sum(sizes),
        share=share.label if share is not None else "",
    )


def _list_top(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
