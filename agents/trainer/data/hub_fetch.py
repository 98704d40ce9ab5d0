"""Download a model of the hub into its cache: `agents.program agents.trainer.data.hub_fetch JOB`.

One PC does it for all nodes of a run, in its training environment, as a run would. Prints JSON
lines of kind `progress`, and on an error one of kind `failed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from agents.contract.hub import hub_cache
from agents.contract.requests.hub import FetchSnapshot
from agents.contract.wire import WireError, from_wire
from agents.errors import ExpectedError
from agents.trainer.data.hub_words import HUB, MODEL_FILES, explain_download

LOOK_S = 1.0
"""Time between two looks at how far a download is, in seconds."""
_HUB_TIMEOUT_S = 10.0


def fetch_model(model: str, report: Callable[[str], None]) -> None:
    """Download what training needs of a model; what the cache has already is not asked for.

    Args:
        model: Hub id.
        report: Called with a sentence when the share has changed.

    Raises:
        ExpectedError: The hub does not answer or gives nothing, or the disk has no room for it.
    """
    if Path(model).is_dir():  # which a run would take as well
        return
    from huggingface_hub import snapshot_download

    blobs = hub_cache(os.environ) / f"models--{model.replace('/', '--')}" / "blobs"
    try:
        lacking_bytes = _weigh(model, blobs)
    except Exception as error:
        # A node without a network may have it all the same.
        with contextlib.suppress(Exception):
            snapshot_download(model, allow_patterns=MODEL_FILES, local_files_only=True)
            return
        raise explain_download(model, "folder", f"{HUB}/{model}", error) from error
    _require_room(model, blobs, lacking_bytes)
    try:
        with _watched(model, blobs, lacking_bytes, report):
            snapshot_download(model, allow_patterns=MODEL_FILES)
    except Exception as error:
        raise explain_download(model, "folder", f"{HUB}/{model}", error) from error


def _weigh(model: str, blobs: Path) -> int:
    """Ask the hub which files there are; return how many bytes of them the cache lacks."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    info = HfApi().model_info(model, files_metadata=True, timeout=_HUB_TIMEOUT_S)
    files = {file.rfilename: file for file in info.siblings or ()}
    lacking = 0
    for name in filter_repo_objects(files, allow_patterns=MODEL_FILES):
        file = files[name]
        blob = file.lfs.sha256 if file.lfs else file.blob_id
        if not (blob and (blobs / blob).is_file()):
            lacking += file.size or 0
    return lacking


def _require_room(model: str, blobs: Path, lacking_bytes: int) -> None:
    """Check that the disk has room for a download.

    Raises:
        ExpectedError: It has not; the message names the folder and both sizes.
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
    """Report inside the block how far the download is, by what its files hold."""
    ended = threading.Event()
    begun_bytes = _held_bytes(blobs)

    def watch() -> None:
        told = -1
        while lacking_bytes and not ended.wait(LOOK_S):
            done = min(max(_held_bytes(blobs) - begun_bytes, 0), lacking_bytes)
            percent = 100 * done // lacking_bytes
            if percent != told:
                told = percent
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
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
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
