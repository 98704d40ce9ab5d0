"""Find files of a run on a share that this node has mounted, and prove them by their content.

A server that is gone can hold a read for ever, and no signal ends that. So this is a program of its
own, whose main thread only watches: it answers for what does not answer, and ends.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agents.contract.in_place import MODEL_SUFFIXES, PlaceAnswer, PlaceQuery, guess_folders
from agents.contract.messages import to_wire
from agents.contract.requests.shared import PlaceAnswers, PlaceQueries
from agents.contract.run import FileEntry
from agents.contract.shares import find_share, read_mounts
from agents.contract.wire import from_wire
from agents.errors import ExpectedError
from agents.file_hashes import hash_cached, is_cached
from agents.shared.data.files import look_through
from agents.shared.files.folder_files import ForeignFile, list_own, open_regular
from agents.state import Home, read_json

SILENCE_S = 30.0
"""Time without a byte after which a server counts as gone, in seconds."""
_LOOK_S = 0.05
_TELL_S = 2.0
_HASHES = "hashes"


@dataclass
class Search:
    """What the searching thread has done so far; the watching one reads it."""

    answers: list[PlaceAnswer] = field(default_factory=list)
    folder: str = ""
    """Folder that it looks through."""
    num_read_bytes: int = 0
    moved_s: float = field(default_factory=time.monotonic)
    """Monotonic time of its last sign of life, in seconds."""

    def enter(self, folder: str) -> None:
        self.folder = folder
        self.moved_s = time.monotonic()

    def count(self, num_bytes: int) -> None:
        self.num_read_bytes += num_bytes
        self.moved_s = time.monotonic()


def find_shared(home: Home, job: Path, silence_s: float = SILENCE_S) -> None:
    """Print the answers to the queries in a file as one line of JSON, after lines of progress."""
    queries = from_wire(PlaceQueries, read_json(job), "job").queries
    search = Search()

    def work() -> None:
        for query in queries:
            search.answers.append(find_place(home, query, search))

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    told_s = time.monotonic()
    while worker.is_alive() and time.monotonic() - search.moved_s < silence_s:
        worker.join(_LOOK_S)
        if time.monotonic() - told_s >= _TELL_S and search.num_read_bytes:
            told_s = time.monotonic()
            read_gb = search.num_read_bytes / 1e9
            _say("progress", message=f"comparing {search.folder}: {read_gb:.1f} GB read")
    answers = search.answers[:]
    silent = f"{search.folder} does not answer: nothing was read in {silence_s:.0f} s"
    answers += [PlaceAnswer(problem=silent)] * (len(queries) - len(answers))
    _say("places", **to_wire(PlaceAnswers(answers=tuple(answers))))


def _say(kind: str, **fields: object) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def find_place(home: Home, query: PlaceQuery, search: Search) -> PlaceAnswer:
    """Return where this node has the files of the query, as is proved by their hashes."""
    problem = ""
    # Entered first: following links may already ask a server that is gone.
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
            # Asked again: looking may have mounted it.
            share = find_share(os.path.realpath(folder), read_mounts())
            return PlaceAnswer(path=path, share=share.label if share is not None else folder)
        problem = problem or found
    return PlaceAnswer(problem=problem)


def compare(folder: Path, query: PlaceQuery, memory: Path, tell: Callable[[int], None]) -> str:
    """Return how a folder differs from what the master has, or "" where it does not.

    Links are followed as in any folder of strangers, and only files that would be used count.

    Args:
        folder: on this node.
        query: what the master has.
        memory: folder of the hashes of files that have not changed since they were read.
        tell: gets the number of bytes of each block that is read.

    Raises:
        ForeignFile: a file is no ordinary one, or a link leads out of the folder.
        OSError: a file cannot be read.
        ExpectedError: likewise, while it is hashed.
    """
    wanted = {entry.path for entry in query.files}
    there = wanted if query.member is not None else set(_list_used(folder, query))
    for name in sorted(wanted - there):
        return f"{folder} has no {name}"
    for name in sorted(there - wanted):
        return f"{folder} has {name} as well"
    # All sizes before the first hash, which may take minutes.
    for entry in query.files:
        with open_regular(folder / entry.path, folder) as file:
            size = os.fstat(file.fileno()).st_size
        if size != entry.size_bytes:
            return f"{folder / entry.path} has {size} bytes instead of {entry.size_bytes}"
    return _compare_content(folder, query.files, memory, tell)


def _compare_content(
    folder: Path, files: tuple[FileEntry, ...], memory: Path, tell: Callable[[int], None]
) -> str:
    # What is known costs nothing and may differ already.
    for entry in sorted(files, key=lambda entry: not is_cached(folder / entry.path, memory)):
        if hash_cached(folder / entry.path, memory, tell) != entry.sha256:
            return f"{folder / entry.path} has another content"
    return ""


def _list_used(folder: Path, query: PlaceQuery) -> Iterator[str]:
    """Yield the names of the files that training would use of a folder."""
    if query.is_model:
        found = list_own(folder, lambda n: Path(n).suffix in MODEL_SUFFIXES and n[:1] != ".")
    else:
        found = list(look_through(folder).data)
    yield from (path.relative_to(folder).as_posix() for path in found)


def probe(path: Path) -> str:
    """Return why a file, or a file of a folder, cannot be read now; "" where all can."""
    try:
        for one in sorted(path.iterdir()) if path.is_dir() else [path]:
            if not one.is_dir():
                # Opening asks the server, whatever is cached here.
                with open_regular(one) as file:
                    file.read(1)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return ""
