"""Make a folder that looks like the whole model on a node with only some of its files.

Existing files are linked; each missing one becomes a file of the same size with the header and no
data, which takes no disk space. So code that opens the model finds all tensors, and a rank reads
only its own layers. Standard library only: it runs before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from agents.contract.wire import WireError, from_wire
from agents.errors import ExpectedError, explain_os_error
from agents.file_hashes import remember_hash
from agents.shared.files.folder_files import read_regular
from agents.shared.models.model_parts import PARTS_PREFIX, ModelParts, is_parts_file
from agents.trainer.rank.attempt import RankAttempt

_VIEW_PREFIX = ".view-"


def open_parts(attempt: RankAttempt) -> RankAttempt:
    """Return the attempt with a complete-looking folder if the node has only some model files.

    Raises:
        ExpectedError: files of this rank's layers are missing, or the disk refuses.
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
        # Their hashes were checked on arrival; missing ones get the hash of the whole model's file.
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
    """Return the folder, created under another name and renamed, since ranks of a node race."""
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
            with target.open("xb") as file:
                file.write(outlines[entry.path].header())
                file.truncate(entry.size_bytes)  # a hole: it takes no disk space
        else:
            os.link(path.parent / entry.path, target)
    with contextlib.suppress(OSError):  # another rank was first
        os.rename(made, view)
        return view
    shutil.rmtree(made, ignore_errors=True)
    return view


def is_outline(path: Path) -> bool:
    """Return whether most of a file has no data on the disk, like that of an outline."""
    stat = path.stat()
    return stat.st_blocks * 512 < stat.st_size // 2
