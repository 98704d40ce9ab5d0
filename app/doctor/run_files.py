"""Parts from the files of the newest runs: the ends of their journals and logs on this PC.

Journal lines about the data are left out, since they quote its rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from agents.contract.names import is_safe_name
from agents.contract.run_layout import ATTEMPTS, LOG_SUFFIX, attempt_of_folder
from app.doctor.part import ReportPart
from app.paths import Paths, leads_through_link

MAX_RUNS = 5
MAX_ATTEMPTS = 2
"""Attempts of a run whose files are taken, the newest ones."""
TAIL_BYTES = 64 << 10
"""Size of the end of each file that is taken, in bytes."""
JOURNAL_SUFFIX = ".jsonl"
_OF_DATA = "preview"


def newest_runs(paths: Paths) -> list[str]:
    """Return the ids of the newest runs that have files here, the newest first."""
    found = []
    try:
        for entry in os.scandir(paths.runs):
            if entry.is_dir(follow_symlinks=False) and is_safe_name(entry.name):
                found.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)[:MAX_RUNS]]


def collect_run_files(paths: Paths, run_id: str, node: str | None) -> Iterator[ReportPart]:
    """Yield the ends of a run's journals and logs.

    Args:
        paths: files of this PC.
        run_id: the run.
        node: only of this node; None: of all.
    """
    folder = paths.run(run_id) / ATTEMPTS
    numbers = [attempt_of_folder(child.name) for child in folder.glob("*")]
    newest = sorted((number for number in numbers if number), reverse=True)[:MAX_ATTEMPTS]
    for number in newest:
        for path in sorted((folder / str(number)).glob("*/*")):
            is_wanted = node is None or path.parent.name == node
            if is_wanted and path.suffix in (LOG_SUFFIX, JOURNAL_SUFFIX) and _is_ours(path, paths):
                yield _read_part(path, f"runs/{run_id}/{number}/{path.parent.name}/{path.name}")


def _is_ours(path: Path, paths: Paths) -> bool:
    return path.is_file() and not leads_through_link(path, paths.runs)


def _read_part(path: Path, name: str) -> ReportPart:
    is_journal = path.suffix == JOURNAL_SUFFIX
    what = "end of a journal" if is_journal else "end of a log"
    try:
        text = _read_tail(path)
    except OSError as error:
        return ReportPart(name=name, what=what, text=f"not available: {error.strerror}\n")
    return ReportPart(name=name, what=what, text=drop_data(text) if is_journal else text)


def _read_tail(path: Path) -> str:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    if size > TAIL_BYTES:
        # Drop the first line, which is cut: half a secret would not be recognised as one.
        data = data.partition(b"\n")[2]
    return data.replace(b"\0", b"").decode("utf-8", "replace")


def drop_data(journal: str) -> str:
    """Return the lines of a journal that say nothing of rows of the data.

    >>> drop_data('{"kind": "preview", "rows": ["secret"]}\\n{"kind": "step", "step": 1}\\n')
    '{"kind": "step", "step": 1}\\n'
    """
    kept = []
    for line in journal.splitlines():
        try:
            kind = json.loads(line)["kind"]
        except (ValueError, TypeError, KeyError):
            continue  # a line that was cut may be anything
        if kind != _OF_DATA:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)
