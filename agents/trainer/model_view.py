"""Make a folder that looks like the whole model where a node has only the files of its layers.

Files that are there are linked; of the others there is a file of the same size with the header and
no data, which takes no disk. So whoever opens the model finds all tensors, and a rank that has only
some layers reads only those. Standard library only: it happens before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from agents.contract.model_parts import PARTS_PREFIX, ModelParts, Outline, is_parts_file
from agents.contract.run import FileEntry
from agents.contract.wire import WireError, from_wire
from agents.errors import ExpectedError, explain_os_error
from agents.file_hashes import remember_hash
from agents.shared.files.folder_files import read_regular
from agents.trainer.rank.attempt import RankAttempt

_VIEW_PREFIX = ".view-"


def open_parts(attempt: RankAttempt) -> RankAttempt:
    """Return the attempt with the folder of a model whose files are not all on this node.

    Raises:
        ExpectedError: this rank has layers whose files are not there, or the disk refuses.
    """
    path = Path(attempt.intent.model_path)
    if not is_parts_file(attempt.intent.model_path):
        return attempt
    try:
        parts = from_wire(ModelParts, json.loads(read_regular(path, path.parent)))
    except (OSError, ValueError, WireError) as error:
        raise ExpectedError(f"{path} cannot be read: {error}.", "Start the run again") from error
    _require_stage(attempt, parts)
    try:
        view = _make_view(path, parts)
    except OSError as error:
        raise explain_os_error(error, f"opening the model in {path.parent}") from error
    for entry in parts.files:
        # They were hashed on arrival; of the others, those of the whole model count.
        remember_hash(view / entry.path, attempt.hashes_folder, entry.sha256)
    return replace(attempt, intent=replace(attempt.intent, model_path=str(view)))


def _require_stage(attempt: RankAttempt, parts: ModelParts) -> None:
    cut = attempt.intent.cut
    stages = cut.stages if cut is not None else ()
    if attempt.rank >= len(stages) or not parts.holds(stages[attempt.rank]):
        raise ExpectedError(
            f"Node {attempt.intent.node} has only some layers of the model, and rank "
            f"{attempt.rank} needs others.",
            "Resume the run from its master, which sends what is missing",
        )


def _make_view(path: Path, parts: ModelParts) -> Path:
    """Return the folder, made under another name and renamed: ranks of one node make it at once."""
    digest = path.name.removeprefix(PARTS_PREFIX).removesuffix(".json")
    view = path.with_name(f"{_VIEW_PREFIX}{digest}")
    if view.is_dir():
        return view
    made = path.with_name(f"{_VIEW_PREFIX}{digest}.{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    outlines = {outline.path: outline for outline in parts.outlines}
    for entry in parts.files:
        target = made / entry.path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if entry.path in outlines:
            _write_outline(target, outlines[entry.path], entry)
        else:
            os.link(path.parent / entry.path, target)
    with contextlib.suppress(OSError):  # another rank was faster
        os.rename(made, view)
        return view
    shutil.rmtree(made, ignore_errors=True)
    return view


def _write_outline(target: Path, outline: Outline, entry: FileEntry) -> None:
    with target.open("xb") as file:
        file.write(outline.header())
        file.truncate(entry.size_bytes)


def is_outline(path: Path) -> bool:
    """Return whether most of a file has no data on the disk, as that of an outline."""
    found = path.stat()
    return found.st_blocks * 512 < found.st_size // 2
