"""Download a model or a data set of the hub: `agents.program agents.trainer.data.hub_fetch JOB`.

One PC downloads a model for all nodes of a run, in its training environment. Prints JSON lines of
kind `progress`, and one of kind `failed` on an error.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from agents.contract.hub import find_snapshot
from agents.contract.model_files import choose_files
from agents.contract.requests.hub import FetchData, FetchSnapshot
from agents.contract.wire import WireError, from_wire
from agents.errors import ExpectedError
from agents.shared.data.splits import HELD_OUT
from agents.trainer.data.hub_files import Report, Wanted, fetch_files, list_wanted
from agents.trainer.data.hub_words import (
    CONVERTED,
    HUB,
    MODEL_FILES,
    OWN_FILES,
    explain_download,
    name_converted,
)

_HUB_TIMEOUT_S = 10.0


def fetch_model(model: str, report: Report = lambda text: None, revision: str = "") -> Path:
    """Return the folder of a model; download the files that training needs and the cache lacks.

    Of several copies of the weights only one is downloaded.

    Args:
        model: hub id, or a folder.
        report: called with a sentence when the percentage has changed.
        revision: branch, tag or commit; empty: the newest.

    Raises:
        ExpectedError: the hub does not answer or refuses, or the disk is full.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    asked = revision or None
    try:
        wanted = list_wanted(model, "model", asked, _choose_model(model), _HUB_TIMEOUT_S)
    except ExpectedError:
        raise
    except Exception as error:
        # A node without a network may still have it in the cache.
        with contextlib.suppress(Exception):
            offline = {"allow_patterns": MODEL_FILES, "local_files_only": True}
            return Path(snapshot_download(model, revision=asked, **offline))
        raise explain_download(model, "folder", f"{HUB}/{model}", error) from error
    kept = find_snapshot(model, os.environ)
    is_newest = kept is not None and kept.name == wanted.revision
    if kept is not None and is_newest and all((kept / name).is_file() for name in wanted.blobs):
        return kept
    return _fetch(wanted, "folder", f"{HUB}/{model}", report)


def fetch_data(data: str, report: Report = lambda text: None, revision: str = "") -> Path:
    """Download the files of a data set that runs read; return the folder of the snapshot.

    Args:
        data: `org/name`, or `org/name:part`.
        report: called with a sentence when the percentage has changed.
        revision: branch, tag or commit, whose own files are taken; empty: the newest, preferably
            as the hub has converted them.

    Raises:
        ExpectedError: the hub does not answer or refuses, the data set has no file that can be
            read, or the disk is full.
    """
    name, _, part = data.partition(":")
    page = f"{HUB}/datasets/{name}"
    splits = dict.fromkeys(("train", *HELD_OUT))
    converted = _choose_matching(name_converted(splits, part or "*"))
    try:
        wanted = None if revision else _list_converted(name, converted)
        if wanted is None:
            own = _choose_matching([f"{part}/{one}" for one in OWN_FILES] if part else OWN_FILES)
            wanted = list_wanted(name, "dataset", revision or None, own, _HUB_TIMEOUT_S)
    except ExpectedError:
        raise
    except Exception as error:
        raise explain_download(data, "file or folder", page, error) from error
    if not wanted.blobs:
        raise ExpectedError(
            f"{data} has no data file that Rackless reads.", f"See which files it has at {page}"
        )
    return _fetch(wanted, "file or folder", page, report)


def fetch_matching(dataset: str, patterns: Sequence[str], revision: str | None) -> Path:
    """Return the folder of a data set's revision, with the files that match a pattern.

    Without a connection these are the files of the cache.

    Raises:
        ExpectedError: the disk is full, or a file is not the one that the hub lists.
        Exception: as of the hub's own tools.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    choose = _choose_matching(patterns)
    try:
        wanted = list_wanted(dataset, "dataset", revision, choose, _HUB_TIMEOUT_S)
    except (ExpectedError, RevisionNotFoundError):
        raise
    except Exception:
        only = {"allow_patterns": list(patterns), "local_files_only": True}
        with contextlib.suppress(Exception):
            kept = snapshot_download(dataset, repo_type="dataset", revision=revision, **only)
            return Path(kept)
        raise
    return fetch_files(wanted)


def _fetch(wanted: Wanted, kind: str, page: str, report: Report) -> Path:
    try:
        return fetch_files(wanted, report)
    except ExpectedError:
        raise
    except Exception as error:
        raise explain_download(wanted.name, kind, page, error) from error


def _choose_model(model: str) -> Callable[[list[str], str], list[str]]:
    def choose(names: list[str], commit: str) -> list[str]:
        from huggingface_hub import hf_hub_download

        def read(name: str) -> bytes:
            return Path(hf_hub_download(model, name, revision=commit)).read_bytes()

        return sorted(choose_files(names, read).names)

    return choose


def _choose_matching(patterns: Sequence[str]) -> Callable[[list[str], str], list[str]]:
    def choose(names: list[str], commit: str) -> list[str]:
        from huggingface_hub.utils import filter_repo_objects

        return sorted(filter_repo_objects(names, allow_patterns=list(patterns)))

    return choose


def _list_converted(name: str, choose: Callable[[list[str], str], list[str]]) -> Wanted | None:
    """Return the converted files of a data set, or None if it has none."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        wanted = list_wanted(name, "dataset", CONVERTED, choose, _HUB_TIMEOUT_S)
    except RevisionNotFoundError:
        return None  # not every data set was converted
    return wanted if wanted.blobs else None


def main(argv: list[str]) -> int:
    """Download the model or data set of a job; return the exit code."""
    job_path = Path(argv[0])
    try:
        said = json.loads(job_path.read_bytes())

        def report(text: str) -> None:
            _print("progress", text)

        if "model" in said:
            model = from_wire(FetchSnapshot, said, "job")
            folder = fetch_model(model.model, report, model.revision)
        else:
            data = from_wire(FetchData, said, "job")
            folder = fetch_data(data.data, report, data.revision)
    except (OSError, ValueError, WireError) as error:
        _print("failed", f"{job_path}: {error}")
        return 1
    except ExpectedError as error:
        _print("failed", error.message, error.hint)
        return 1
    if len(argv) > 1:
        Path(argv[1]).write_text(json.dumps({"folder": str(folder)}), "utf-8")
    return 0


def _print(kind: str, message: str, hint: str = "") -> None:
    print(json.dumps({"kind": kind, "message": message, "hint": hint}), flush=True)
