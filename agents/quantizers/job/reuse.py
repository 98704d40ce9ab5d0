"""Keep results that a later job on the same model reuses: merged model and distributions.

Both are in the run's exports on the node and vanish with the run. One merged model is kept per run:
merging another checkpoint deletes the old one first, unless another job still uses it. A merged
model is identified by its sources, so that a retry or a second format uses it unchanged;
distributions are identified by the same sources and by their rows.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from agents.node.files import LAYERS_PREFIX
from agents.state import read_json, take_lock
from agents.trainer.checkpoint.folder import Checkpoint

LINEAGE_FILE = "rackless.json"
"""File of a merged model with its sources and the cost of merging."""
MOST_REFERENCE_BYTES = 4 << 30
"""Maximum size of kept distributions, in bytes: beyond it, disk space costs more than measuring
again."""

# Version of the merge, to increment when merging gives other bytes.
_WAY = 5
_MERGED, _REFERENCE = "merged-", ".reference-"


def name_merge(checkpoint: Checkpoint) -> str:
    """Return the name of a merge's content: a hash of base, trained weights and `_WAY`."""
    manifest = checkpoint.manifest
    files = sorted((file.path, file.sha256) for file in manifest.files)
    identity = json.dumps([_WAY, manifest.model_sha256, files])
    return hashlib.sha256(identity.encode("ascii")).hexdigest()


def weigh_files(folder: Path) -> dict[str, int]:
    """Return the size of each weight file, which shows whether a model is complete."""
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}


def is_merged(folder: Path, content: str) -> bool:
    """Return whether a folder holds the complete merged model with this content."""
    found = read_json(folder / LINEAGE_FILE)
    if not isinstance(found, dict) or found.get("content") != content:
        return False
    sizes = weigh_files(folder)
    return bool(sizes) and found.get("sizes") == sizes


def make_room(destination: Path) -> None:
    """Delete earlier merged models of this run, and everything kept for them."""
    if not destination.name.startswith(_MERGED) or not destination.parent.is_dir():
        return
    for path in destination.parent.iterdir():
        if not path.name.startswith(_MERGED) or not _is_idle(path):
            continue
        for kind in (_REFERENCE, LAYERS_PREFIX):
            for left in path.parent.glob(f"{kind}{path.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)


def find_reference(model: Path, rows: Sequence[Sequence[int]], folder: Path) -> tuple[Path, bool]:
    """Return the folder for the distributions of a model over rows, and whether it is kept.

    Args:
        model: model of the distributions.
        rows: token ids of the rows.
        folder: folder of the result, which holds the distributions of an unknown model.
    """
    found = read_json(model / LINEAGE_FILE)
    content = found.get("content") if isinstance(found, dict) else None
    if not content:
        return folder / ".reference", False
    identity = json.dumps([content, [list(map(int, row)) for row in rows]])
    key = hashlib.sha256(identity.encode("ascii")).hexdigest()[:16]
    return model.with_name(f"{_REFERENCE}{model.name}-{key}"), True


@contextmanager
def using(model: Path) -> Iterator[None]:
    """Keep other jobs from deleting a merged model inside the block."""
    with ExitStack() as stack:
        with suppress(FileNotFoundError):
            # The kernel releases the lock when the process ends, so a killed job blocks no other.
            file = stack.enter_context((model / LINEAGE_FILE).open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _is_idle(model: Path) -> bool:
    try:
        with (model / LINEAGE_FILE).open("rb") as file:
            return take_lock(file.fileno(), 0.0)
    except OSError:  # without the file, the model is incomplete
        return True
