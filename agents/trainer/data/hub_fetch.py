"""Download a model of the hub into its cache: `agents.program agents.trainer.data.hub_fetch JOB`.

One PC downloads for all nodes of a run, in its training environment. Prints JSON lines of kind
`progress`, and one of kind `failed` on an error.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agents.contract.hub import find_snapshot, hub_cache
from agents.contract.model_files import choose_files
from agents.contract.requests.hub import FetchSnapshot
from agents.contract.wire import WireError, from_wire
from agents.errors import ExpectedError
from agents.trainer.data.hub_words import HUB, MODEL_FILES, explain_download

LOOK_S = 1.0
"""Time between two checks of a download's progress, in seconds."""
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """Files of a model on the hub that training uses."""

    revision: str
    blobs: dict[str, tuple[str | None, int]]
    """Name in the hub's cache, and size in bytes, by name of the file."""

    def lacking_bytes(self, blobs: Path) -> int:
        """Return how many of their bytes a cache lacks."""
        return sum(
            size for blob, size in self.blobs.values() if not (blob and (blobs / blob).is_file())
        )


def fetch_model(model: str, report: Callable[[str], None] = lambda text: None) -> Path:
    """Return the folder of a model; download the files that training needs and the cache lacks.

    Of several copies of the weights only one is downloaded.

    Args:
        model: hub id, or a folder.
        report: called with a sentence when the percentage has changed.

    Raises:
        ExpectedError: the hub does not answer or refuses, or the disk is full.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    blobs = hub_cache(os.environ) / f"models--{model.replace('/', '--')}" / "blobs"
    try:
        wanted = _list_wanted(model)
    except Exception as error:
        # A node without a network may still have it in the cache.
        with contextlib.suppress(Exception):
            return Path(snapshot_download(model, allow_patterns=MODEL_FILES, local_files_only=True))
        raise explain_download(model, "folder", f"{HUB}/{model}", error) from error
    kept = find_snapshot(model, os.environ)
    is_newest = kept is not None and kept.name == wanted.revision
    if kept is not None and is_newest and all((kept / name).is_file() for name in wanted.blobs):
        return kept
    lacking_bytes = wanted.lacking_bytes(blobs)
    _require_room(model, blobs, lacking_bytes)
    # The hub's tools read names as patterns.
    patterns = [glob.escape(name) for name in wanted.blobs]
    try:
        with _watched(model, blobs, lacking_bytes, report):
            return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        raise explain_download(model, "folder", f"{HUB}/{model}", error) from error


def _list_wanted(model: str) -> _Wanted:
    """Ask the hub for the list of files; return those that training uses."""
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(model, files_metadata=True, timeout=_HUB_TIMEOUT_S)
    files = {file.rfilename: file for file in info.siblings or ()}

    def read(name: str) -> bytes:
        return Path(hf_hub_download(model, name, revision=info.sha)).read_bytes()

    found = {name: files[name] for name in sorted(choose_files(files, read).names)}
    return _Wanted(
        revision=info.sha or "",
        # Blobs in the hub's cache are named by the hash of large files, else by git's id.
        blobs={
            name: (file.lfs.sha256 if file.lfs else file.blob_id, file.size or 0)
            for name, file in found.items()
        },
    )


def _require_room(model: str, blobs: Path, lacking_bytes: int) -> None:
    """Check that the disk has space for a download.

    Raises:
        ExpectedError: it has not; the message names the folder and both sizes.
    """
    place = next(folder for folder in (blobs, *blobs.parents) if folder.exists())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < lacking_bytes:
        raise ExpectedError(
            f"The disk of {hub_cache(os.environ)} has {_gib(free_bytes)} free, and {model} needs "
            f"{_gib(lacking_bytes)}.",
            "Free some space there, or set HF_HOME to a folder of a larger disk",
            topic="disk-full",
        )


@contextlib.contextmanager
def _watched(
    model: str, blobs: Path, lacking_bytes: int, report: Callable[[str], None]
) -> Iterator[None]:
    """Report the progress of a download inside the block, by the size of its files."""
    ended = threading.Event()
    begun_bytes = _held_bytes(blobs)

    def watch() -> None:
        reported = -1
        while lacking_bytes and not ended.wait(LOOK_S):
            done = min(max(_held_bytes(blobs) - begun_bytes, 0), lacking_bytes)
            percent = 100 * done // lacking_bytes
            # At most one line per percent.
            if percent != reported:
                reported = percent
                report(f"downloading {model}: {percent} % of {_gib(lacking_bytes)}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _held_bytes(blobs: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for blob in blobs.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
                total += blob.stat().st_size
    return total


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def main(argv: list[str]) -> int:
    """Download the model of a job; return the exit code."""
    job_path = Path(argv[0])
    try:
        job = from_wire(FetchSnapshot, json.loads(job_path.read_bytes()), "job")
        fetch_model(job.model, lambda text: _print("progress", text))
    except (OSError, ValueError, WireError) as error:
        _print("failed", f"{job_path}: {error}")
        return 1
    except ExpectedError as error:
        _print("failed", error.message, error.hint)
        return 1
    return 0


def _print(kind: str, message: str, hint: str = "") -> None:
    print(json.dumps({"kind": kind, "message": message, "hint": hint}), flush=True)
