"""Find files of a run on a share that this node has mounted, and verify their content.

A read from a lost file server may block forever, and no signal ends it. So this is a separate
program whose main thread only watches: after a silence, it answers for the blocked thread and ends.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agents.contract.in_place import PlaceAnswer, PlaceQuery, guess_folders
from agents.contract.messages import to_wire
from agents.contract.requests.shared import PlaceAnswers, PlaceQueries
from agents.contract.run import FileEntry
from agents.contract.shares import find_share, read_mounts
from agents.contract.wire import from_wire
from agents.errors import ExpectedError
from agents.file_hashes import hash_cached, is_cached
from agents.shared.data.files import look_through
from agents.shared.files.folder_files import ForeignFile, open_regular
from agents.shared.models.used_files import list_used
from agents.state import Home, read_json

SILENCE_S = 30.0
"""Time without a byte after which a server counts as lost, in seconds."""
_POLL_S = 0.05
_REPORT_S = 2.0
_HASHES = "hashes"


@dataclass
class Search:
    """Progress of the searching thread, read by the watching thread."""

    answers: list[PlaceAnswer] = field(default_factory=list)
    folder: str = ""
    """Folder that is being searched."""
    num_read_bytes: int = 0
    moved_s: float = field(default_factory=time.monotonic)
    """Monotonic time of the last progress, in seconds."""

    def enter(self, folder: str) -> None:
        self.folder = folder
        self.moved_s = time.monotonic()

    def count(self, num_bytes: int) -> None:
        self.num_read_bytes += num_bytes
        self.moved_s = time.monotonic()


def find_shared(home: Home, job: Path, silence_s: float = SILENCE_S) -> None:
    """Print lines of progress, then the answers to the queries in a file, as lines of JSON."""
    queries = from_wire(PlaceQueries, read_json(job), "job").queries
    search = Search()

    def work() -> None:
        for query in queries:
            search.answers.append(find_place(home, query, search))

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    reported_s = time.monotonic()
    while worker.is_alive() and time.monotonic() - search.moved_s < silence_s:
        worker.join(_POLL_S)
        if time.monotonic() - reported_s >= _REPORT_S and search.num_read_bytes:
            reported_s = time.monotonic()
            read_gb = search.num_read_bytes / 1e9
            _say("progress", message=f"comparing {search.folder}: {read_gb:.1f} GB read")
    # Queries after the blocked one get the same answer: their server may be lost, too.
    answers = search.answers[:]
    silent = f"{search.folder} does not answer: nothing was read in {silence_s:.0f} s"
    answers += [PlaceAnswer(problem=silent)] * (len(queries) - len(answers))
    _say("places", **to_wire(PlaceAnswers(answers=tuple(answers))))


def _say(kind: str, **fields: object) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def find_place(home: Home, query: PlaceQuery, search: Search) -> PlaceAnswer:
    """Return the place on this node with the files of the query, verified by their hashes."""
    problem = ""
    # Set first, because resolving links may already block on a lost server.
    search.enter(query.paths[0] if query.paths else query.share.label if query.share else "")
    for folder in guess_folders(query, read_mounts(), os.path.realpath):
        search.enter(folder)
        try:
            if not Path(folder).is_dir():
                continue
            found = compare(Path(folder), query, home.path / _HASHES, search.count)
        except ForeignFile as error:
            found = str(error)
        except ExpectedError as error:
            found = error.message.rstrip(".")
        except OSError as error:
            found = f"{error.filename or folder} cannot be read: {error.strerror or error}"
        if not found:
            path = folder if query.member is None else f"{folder}/{query.member}"
            # The mounts are read again: an automounter may have mounted the share meanwhile.
            share = find_share(os.path.realpath(folder), read_mounts())
            return PlaceAnswer(path=path, share=share.label if share is not None else folder)
        problem = problem or found  # the first guess is the likeliest, so its problem is reported
    return PlaceAnswer(problem=problem)


def compare(folder: Path, query: PlaceQuery, memory: Path, on_read: Callable[[int], None]) -> str:
    """Return the first difference between a folder and the master's files, or an empty string.

    Links must stay within the folder, and only files that training would use count.

    Args:
        folder: folder on this node.
        query: description of the master's files.
        memory: folder of cached hashes.
        on_read: called with the size of each block read, in bytes.

    Raises:
        ForeignFile: a file is not a regular file, or a link leads out of the folder.
        OSError: a file cannot be read.
        ExpectedError: a file cannot be read while it is hashed.
    """
    wanted = {entry.path for entry in query.files}
    there = wanted if query.member is not None else set(_list_used(folder, query))
    for name in sorted(wanted - there):
        # An earlier version also sent copies of the weights.
        if not (folder / name).is_file():
            return f"{folder} has no {name}"
    # Additional files count, because training would use them.
    for name in sorted(there - wanted):
        return f"{folder} has {name} as well"
    # All sizes are compared before the first hash, which may take minutes.
    for entry in query.files:
        with open_regular(folder / entry.path, folder) as file:
            size = os.fstat(file.fileno()).st_size
        if size != entry.size_bytes:
            return f"{folder / entry.path} has {size} bytes instead of {entry.size_bytes}"
    return _compare_content(folder, query.files, memory, on_read)


def _compare_content(
    folder: Path, files: tuple[FileEntry, ...], memory: Path, on_read: Callable[[int], None]
) -> str:
    # Cached hashes first: they cost nothing and may already differ.
    for entry in sorted(files, key=lambda entry: not is_cached(folder / entry.path, memory)):
        if hash_cached(folder / entry.path, memory, on_read) != entry.sha256:
            return f"{folder / entry.path} has different content"
    return ""


def _list_used(folder: Path, query: PlaceQuery) -> Iterator[str]:
    """Yield the names of the files in a folder that training would use."""
    found = list_used(folder) if query.is_model else look_through(folder).data
    yield from (path.relative_to(folder).as_posix() for path in found)


def probe(path: Path) -> str:
    """Return why a file, or a file in a folder, cannot be read now, or an empty string."""
    try:
        for candidate in sorted(path.iterdir()) if path.is_dir() else [path]:
            if not candidate.is_dir():
                # Opening contacts the server even if this node has cached the content.
                with open_regular(candidate) as file:
                    file.read(1)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return ""
