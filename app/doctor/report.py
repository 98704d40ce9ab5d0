"""Collect all parts of a report, scrub them, and write them into one zip file.

Not an action of the core: it has to work where the store cannot be opened.
"""

from __future__ import annotations

import asyncio
import getpass
import io
import json
import os
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agents.shared.files.full_disk import name_disk_error, removing_half
from app.doctor.cluster import collect_cluster
from app.doctor.part import ReportPart, list_parts
from app.doctor.run_files import collect_run_files, newest_runs
from app.doctor.scrub import find_people, scrub, scrub_json
from app.doctor.this_pc import collect_this_pc
from app.errors import UserError
from app.paths import Paths, open_private
from app.progress import OnMessage

_README = """Report of Rackless, made {made}.

Taken out: private keys, tokens of known services by their form, the password in an address, and
every value whose name ends in a word such as password, secret, credential, token or key, in
settings, JSON, code, headers and command lines; {names}. Hashes of files and ids of runs stay.
Rows of training data and weights are not in it.

No rule finds a secret that looks like any other text: a password in a sentence or under a name that
does not say so, one that a program split, encoded or abbreviated, or a row of data in what your own
code printed. Read the logs before you send this file, and replace every secret that you see there.

{contents}
"""


async def collect_report(
    home: Path,
    *,
    node: str | None = None,
    keep_names: bool = False,
    progress: OnMessage = lambda text: None,
) -> tuple[ReportPart, ...]:
    """Return the parts of a report, scrubbed, the list of contents first.

    Args:
        home: folder of this PC's files.
        node: report on this node; None: on all.
        keep_names: whether names of home folders and logins stay.
        progress: called with a sentence before each step that takes time.

    Raises:
        UserError: there is no such node.
    """
    paths = Paths(home)
    # Before the store is opened, which moves a damaged one aside.
    parts = await asyncio.to_thread(lambda: list(collect_this_pc(paths)))
    parts += await collect_cluster(home, node, progress)
    progress("reading logs and journals")
    parts += await asyncio.to_thread(_collect_runs, paths, node)
    people = frozenset[str]() if keep_names else _find_people(parts)
    clean = [_scrub_part(part, people) for part in parts]
    return (_make_readme(clean, keep_names), *clean)


def default_file(folder: Path) -> Path:
    """Return a name for a report that is made now."""
    return folder / time.strftime("rackless-report-%Y%m%d-%H%M%S.zip")


def save_report(parts: Sequence[ReportPart], path: Path) -> int:
    """Write the parts into a new zip file that only this user can read; return its size in bytes.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    # Packed in memory, so that the file is created only once all parts are in it.
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in parts:
            archive.writestr(part.name, part.text)
    data = buffer.getvalue()
    try:
        # Opened first: a file that exists is not ours to remove.
        file = open_private(path, "x")
        with removing_half(path), file:
            file.write(data)
    except FileExistsError as error:
        raise UserError(f"{path} is there already", "Name another file with --out.") from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {name_disk_error(error)}", "Name another file with --out."
        ) from error
    return len(data)


def _collect_runs(paths: Paths, node: str | None) -> list[ReportPart]:
    runs = newest_runs(paths)
    return [part for run_id in runs for part in collect_run_files(paths, run_id, node)]


def _scrub_part(part: ReportPart, people: frozenset[str]) -> ReportPart:
    # Line by line: a damaged line must not keep the others from being read as JSON.
    lines = part.text.splitlines() if part.name.endswith(".jsonl") else []
    text = "".join(f"{_scrub_text(line, people, None)}\n" for line in lines)
    if not lines:
        text = _scrub_text(part.text, people, 1 if part.name.endswith(".json") else None)
    return replace(part, name=scrub(part.name, people), text=text)


def _scrub_text(text: str, people: frozenset[str], indent: int | None) -> str:
    """Scrub a text; JSON stays valid JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return scrub(text, people)
    return json.dumps(scrub_json(value, people), indent=indent)


def _find_people(parts: Sequence[ReportPart]) -> frozenset[str]:
    found = set(find_people(part.text for part in parts))
    for part in parts:
        if part.name == "nodes.json":
            found |= _logins(part.text)
    try:
        found.add(getpass.getuser())
    except (OSError, KeyError):  # a user without a name
        found.add(os.path.basename(os.path.expanduser("~")))
    return frozenset(found)


def _logins(text: str) -> set[str]:
    try:
        return {str(row["address"]["user"]) for row in json.loads(text) if row["address"]["user"]}
    except (ValueError, TypeError, KeyError):
        return set()


def _make_readme(parts: Sequence[ReportPart], keep_names: bool) -> ReportPart:
    names = "names of people stand in it" if keep_names else "names of people were replaced by USER"
    made = time.strftime("%Y-%m-%d %H:%M:%S")
    text = _README.format(made=made, names=names, contents=list_parts(parts))
    return ReportPart(name="README.txt", what="contents of this report", text=text)
