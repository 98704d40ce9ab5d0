"""List the files that a run copies from this PC to its nodes, to be shown before the start."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from agents.contract.spec import RunSpec
from agents.shared.models.used_files import list_used
from app.library.data_size import list_files
from app.library.shares import locate, require_answer
from app.text import count_of, shorten, show_bytes, show_list

# Number of names in a sentence.
_MAX_NAMES = 3
# Number of files that are counted in a subfolder.
_MAX_COUNTED = 10_000


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
    left_out: tuple[str, ...] = ()
    """Other files and subfolders of a model's folder, largest first, which are not sent."""
    left_out_bytes: int = 0
    share: str = ""
    """Name of the share that holds it, whose files nodes may use in place; empty: a local disk."""


def list_sent(spec: RunSpec) -> tuple[SentFiles, ...]:
    """Return the files that a run sends; reads only names and sizes.

    Files that are not on this PC are left out: nodes have or download them.

    Raises:
        UserError: the server of a share does not answer.
    """
    named = {"data.train": spec.data.train, "data.eval": spec.data.eval_path, "model": spec.model}
    if spec.data.sources:
        sources = {f"data.sources[{n}]": one.path for n, one in enumerate(spec.data.sources)}
        named = {**sources, **{key: named[key] for key in ("data.eval", "model")}}
    names = {key: name for key, name in named.items() if name}
    require_answer(names.values())
    found = (_describe(key, name) for key, name in names.items())
    return tuple(sent for sent in found if sent is not None)


def say_sent(sent: SentFiles) -> str:
    """Return one line about a sent file or folder.

    >>> say_sent(SentFiles(key="model", path="/models/a", num_files=3, size_bytes=2_000))
    'model: /models/a, 3 files, 2.0 KiB'
    >>> say_sent(SentFiles(key="model", path="/a", num_files=3, size_bytes=2_000,
    ...     left_out=("original", "model.bin"), left_out_bytes=9_000))
    'model: /a, 3 files, 2.0 KiB; not sent: original and model.bin (8.8 KiB)'
    """
    parts = [sent.path]
    if sent.num_files is not None and Path(sent.path).suffix == "":
        parts.append(count_of(sent.num_files, "file"))
    if sent.size_bytes is not None:
        parts.append(show_bytes(sent.size_bytes))
    if sent.left_out:
        names = [shorten(name) for name in sent.left_out[:_MAX_NAMES]]
        if len(sent.left_out) > _MAX_NAMES:
            names.append(f"{len(sent.left_out) - _MAX_NAMES} more")
        parts[-1] += f"; not sent: {show_list(names)} ({show_bytes(sent.left_out_bytes)})"
    if sent.share:
        parts[-1] += f"; nodes that have {sent.share} use it in place"
    return f"{sent.key}: {', '.join(parts)}"


def _describe(key: str, name: str) -> SentFiles | None:
    try:
        path = Path(os.path.expanduser(name)).absolute()
        if not path.exists():
            return None
        real = path.resolve()
        is_model = key == "model" and real.is_dir()
        files = list_used(real) if is_model else list_files(real)
        left = _weigh_others(real, files or ()) if is_model else {}
        sizes = None if files is None else [one.stat().st_size for one in files]
        share = locate(real)
    except (OSError, ValueError, RuntimeError):
        return None  # the start reports the problem
    return SentFiles(
        key=key,
        path=str(real),
        num_files=None if sizes is None else len(sizes),
        size_bytes=None if sizes is None else sum(sizes),
        left_out=tuple(sorted(left, key=lambda name: (-left[name], name))),
        left_out_bytes=sum(left.values()),
        share=share.label if share is not None else "",
    )


def _weigh_others(folder: Path, used: Iterable[Path]) -> dict[str, int]:
    """Return the sizes of the other files and subfolders of a folder, in bytes, by name."""
    others = {path for path in folder.iterdir() if path.name[:1] != "."} - set(used)
    return {path.name: _weigh(path) for path in others}


def _weigh(path: Path) -> int:
    # Without links, which may form circles.
    if not path.is_dir():
        return path.lstat().st_size
    files = (Path(top, name) for top, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_size for file in islice(files, _MAX_COUNTED))
