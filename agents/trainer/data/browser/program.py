"""Answer requests about the rows of one data set, while its index grows in the background.

The master starts it as `agents.program agents.trainer.data.browser.program JOB.json FOLDER`. Each
line on stdin is a `RowRequest`, or empty for the figures; each is answered by one line. The first
answer needs only the first bytes of the data: the thread that reads all rows starts after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agents.contract.data import ShownConversation, ShownPart, ShownRow
from agents.contract.requests.rows import (
    BrowseJob,
    DataFigures,
    RowBrief,
    RowList,
    RowRequest,
    RowState,
    WholeRow,
)
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.trainer.data.browser.index import CUT, DUPLICATE, EMPTY, LEFT_OUT, Indexer, RowIndex
from agents.trainer.data.browser.places import RowPlaces, until
from agents.trainer.data.cache import ROW_MODULES, hash_code
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.hub import find_data, find_tokenizer
from agents.trainer.data.parquet_reader import limit_memory
from agents.trainer.data.rows import DataFiles, RowReader
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokens import tokenize_rows

MAX_LISTED = 1000
"""Maximum number of rows that a sorted list has."""
MAX_INDEXES = 8
"""Maximum number of indexes that are kept."""
_MEMORY_BYTES = 3 << 30
_TEXT_CHARS = 200
_RAW_CHARS = 20_000
_LOOK_S = 0.2
_MAX_FOUND = 10_000
_STATES: dict[int, RowState] = {LEFT_OUT: "left_out", CUT: "cut", DUPLICATE: "duplicate"}
_NUM_FIRST = 20
"""Number of first rows whose columns are named."""


class Browser:
    """Rows of one data set.

    Args:
        job: data and settings.
        cache: folder of all indexes.
        folder: private folder for small files.
    """

    def __init__(self, job: BrowseJob, cache: Path, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self.files = find_data(job.path, held_out_from=job.held_out_from, split=job.split)
        self._data = job.spec.data
        self._places = RowPlaces(self.files.paths, self._data, folder)
        self.index = RowIndex(cache / make_key(job, self.files))
        self._is_known = self.index.open()
        self._thread: threading.Thread | None = None
        self._tokenizer: Any = None
        self._can_render = threading.Event()
        """Set once the tokenizer is loaded, or cannot be."""
        self._num_lines = 0
        self._search = ""
        self._matches: Iterator[int | None] = iter(())
        self._found: list[int] = []
        self._searched_all = False
        self._columns: tuple[str, ...] = ()

    # ------------------------------------------------------------ background

    def start(self) -> None:
        """Begin to read all rows, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, daemon=True)
            self._thread.start()

    def _read_all(self) -> None:
        try:
            if self._job.model_path:
                from agents.trainer.data.tokenizer import load_tokenizer  # takes seconds

                self._tokenizer, _ = load_tokenizer(
                    find_tokenizer(self._job.model_path), data=self._job.spec.data
                )
            self._can_render.set()
            if self._places.counts_by_line:
                for num_lines in self._places.find_lines():
                    self._num_lines = num_lines
            if self._is_known:
                return
            found = Indexer(self.files, self._job.spec, self._tokenizer, self.index).run()
            self.index.end(replace(found, columns=self._columns))
        except ExpectedError as error:
            text = f"{error.message} {error.hint}"
            self.index.figures = replace(self.index.figures, problem=text)
        except MemoryError:
            text = "Reading all rows takes too much memory."
            self.index.figures = replace(self.index.figures, problem=text)
        except OSError as error:
            text = f"The index of the rows cannot be written: {error}."
            self.index.figures = replace(self.index.figures, problem=text)
        finally:
            self._can_render.set()

    # ------------------------------------------------------------ answers

    def figures(self) -> DataFigures:
        """Return the numbers of the rows read so far."""
        if not self._columns:
            self.list_rows(RowRequest(count=_NUM_FIRST))
        return replace(self.index.figures, columns=self._columns)

    def list_rows(self, request: RowRequest) -> RowList:
        """Return the rows that a request asks for, as far as they are known."""
        places, num_rows, is_whole = self._choose(request)
        return RowList(rows=tuple(self._describe(places)), num_rows=num_rows, is_whole=is_whole)

    def show(self, place: int) -> WholeRow:
        """Return a row as written and as learned.

        Raises:
            ExpectedError: there is no such row.
        """
        self._sync()
        values = self._places.read([place])
        if place not in values:
            raise ExpectedError(f"There is no row {place:,}.", "Name one that is listed")
        (brief,) = self._describe([place], values)
        row = self._parse(values)[place]
        raw = json.dumps(values[place], ensure_ascii=False, indent=2, default=str)
        if not isinstance(row, ConversationRow):
            return WholeRow(brief=brief, raw=raw[:_RAW_CHARS])
        shown = self._render(row)
        if isinstance(shown, Skipped):
            return WholeRow(brief=replace(brief, reason=shown.reason), raw=raw[:_RAW_CHARS])
        return WholeRow(brief=brief, raw=raw[:_RAW_CHARS], shown=shown)

    # ------------------------------------------------------------ which rows

    def _sync(self) -> None:
        self._places.note_starts(self.index.starts)

    def _choose(self, request: RowRequest) -> tuple[Sequence[int], int, bool]:
        """Return the places of the listed rows, the number of matches, and if these are all."""
        self._sync()
        start, stop = request.start, request.start + request.count
        is_read = self.index.figures.is_whole
        if request.which == "all" and not request.search:
            if self._places.counts_by_line and not is_read:
                num_rows = max(self._num_lines, self.index.num_rows)
                if not num_rows:
                    first = self._first(stop)
                    return first[start:], len(first), False
                return range(start + 1, min(stop, num_rows) + 1), num_rows, False
            if not self.index.num_rows:
                first = self._first(stop)
                return first[start:], len(first), is_read
            places = self.index.column("places")
            return [int(one) for one in places[start:stop]], len(places), is_read
        if request.search:
            found, is_whole = self._look_for(request.search, stop)
            if request.which != "all":
                wanted = set(self._filter(request.which))
                found = [place for place in found if place in wanted]
            return found[start:stop], len(found), is_whole and is_read
        chosen = self._filter(request.which)
        return chosen[start:stop], len(chosen), is_read

    def _first(self, count: int) -> list[int]:
        """Return the places of the first rows, read at once."""
        found = []
        for place, _ in self._places.read_all():
            found.append(place)
            if len(found) >= count:
                break
        return found

    def _filter(self, which: str) -> list[int]:
        places, states = self.index.column("places"), self.index.column("states")
        by_state = {"left_out": LEFT_OUT, "cut": CUT, "duplicate": DUPLICATE}
        if which in by_state:
            return [int(one) for one in places[states == by_state[which]]]
        tokens, targets = self.index.column("tokens"), self.index.column("targets")
        usable = np.flatnonzero((states != LEFT_OUT) & (states != EMPTY))
        keys = -tokens[usable] if which == "longest" else targets[usable]
        if len(keys) > MAX_LISTED:
            usable = usable[np.argpartition(keys, MAX_LISTED)[:MAX_LISTED]]
            keys = -tokens[usable] if which == "longest" else targets[usable]
        return [int(one) for one in places[usable[np.argsort(keys, kind="stable")]]]

    def _look_for(self, text: str, count: int) -> tuple[list[int], bool]:
        """Return the rows found so far that contain a text; each request looks a little further."""
        if text != self._search:
            self._search, self._found, self._searched_all = text, [], False
            self._matches = self._places.search(text)
        goes_on = until(_LOOK_S)
        while not self._searched_all and len(self._found) < _MAX_FOUND and goes_on():
            for _ in range(1000):
                place = next(self._matches, -1)
                if place == -1:
                    self._searched_all = True
                    break
                if place is not None:
                    self._found.append(place)
        return self._found, self._searched_all or len(self._found) >= _MAX_FOUND

    # ------------------------------------------------------------ one row

    def _describe(
        self, places: Sequence[int], values: dict[int, Any] | None = None
    ) -> Iterator[RowBrief]:
        # Sorted lists name rows in another order than that of the data.
        values = self._places.read(sorted(places)) if values is None else values
        self._name_columns(values)
        rows = self._parse(values)
        for place in places:
            if place not in values:
                continue
            file, number = self._places.locate(place)
            row = rows.get(place)
            brief = RowBrief(
                place=place,
                row=number,
                file=self.files.paths[file].name if len(self.files.paths) > 1 else "",
                text=_begin(row, values[place]),
            )
            yield self._with_numbers(brief, row)

    def _with_numbers(self, brief: RowBrief, row: ConversationRow | Skipped | None) -> RowBrief:
        at = self.index.find(brief.place)
        if isinstance(row, Skipped):
            brief = replace(brief, state="left_out", reason=row.reason)
        if at is None:
            return brief
        state = _STATES.get(int(self.index.column("states")[at]), "kept")
        if brief.state == "left_out" or state == "left_out":
            return replace(brief, state="left_out")
        return replace(
            brief,
            state=state,
            num_tokens=int(self.index.column("tokens")[at]),
            num_targets=int(self.index.column("targets")[at]),
        )

    def _name_columns(self, values: dict[int, Any]) -> None:
        if not self._columns:
            first = [values[place] for place in sorted(values)[:_NUM_FIRST]]
            names = dict.fromkeys(
                str(name) for row in first if isinstance(row, dict) for name in row
            )
            self._columns = tuple(names)

    def _parse(self, values: dict[int, Any]) -> dict[int, ConversationRow | Skipped]:
        """Return rows as a run reads them."""
        copy = self._folder / "rows.jsonl"
        places = list(values)
        copy.write_text("".join(f"{_to_line(values[place])}\n" for place in places), "ascii")
        tally = _Skips(name=self.files.name)
        data = replace(self._data, encoding="utf-8")  # that of the copy
        if data.format == "auto" and self.index.figures.format != "auto":
            data = replace(data, format=self.index.figures.format)  # type: ignore[arg-type]
        files = DataFiles(name=self.files.name, paths=(copy,))
        found: dict[int, ConversationRow | Skipped] = {}
        # Lines of the copy count as places of the data.
        for row in RowReader(files, data, self._job.spec.objective, tally):
            found[places[row.number - 1]] = row
        for one in tally.all:
            place = places[one.row - 1]
            reason = str(values[place]) if isinstance(values[place], ValueError) else one.reason
            found[place] = replace(one, reason=reason)
        return found

    def _render(self, row: ConversationRow) -> ShownRow | Skipped:
        self.start()
        self._can_render.wait()
        if self._tokenizer is None:
            return _show_turns(row)
        from agents.trainer.data.preview import show_row

        spec = self._job.spec
        first = next(
            tokenize_rows(self._tokenizer, [row], spec.sequence_tokens, learn=spec.data.learn)
        )
        return first if isinstance(first, Skipped) else show_row(self._tokenizer, first.segments)


class _Skips(Tally):
    """A tally that keeps every skipped row."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.all: list[Skipped] = []

    def skip(self, skipped: Skipped, place: int) -> None:
        Tally.skip(self, skipped, place)
        self.all.append(skipped)


def _to_line(value: Any) -> str:
    if value is None:
        return ""
    return "{" if isinstance(value, ValueError) else json.dumps(value, default=str)


def _begin(row: ConversationRow | Skipped | None, value: Any) -> str:
    """Return the beginning of a row's texts on one line."""
    if isinstance(row, ConversationRow):
        turns = [turn.content for turn in row.turns if turn.role != "system"]
        text = " \u2192 ".join(turn[:_TEXT_CHARS] for turn in turns) or row.text
    else:
        text = "" if value is None or isinstance(value, ValueError) else json.dumps(value)
    return " ".join(text[: 4 * _TEXT_CHARS].split())[:_TEXT_CHARS]


def _show_turns(row: ConversationRow) -> ShownRow:
    """Return a row without its template: its answers count as learned."""
    pairs = [row.turns, row.rejected] if row.rejected else [row.turns]
    shown = []
    for turns in pairs:
        parts: list[ShownPart] = []
        for turn in turns:
            gap = "\n\n" if parts else ""
            parts.append(ShownPart(text=f"{gap}{turn.role}: ", learned=False))
            parts.append(ShownPart(text=turn.content, learned=turn.role == "assistant"))
        if not turns:
            parts = [ShownPart(text=row.text, learned=True)]
        shown.append(ShownConversation(num_tokens=0, num_targets=0, parts=tuple(parts)))
    return ShownRow(row=row.number, conversations=tuple(shown))


def make_key(job: BrowseJob, files: DataFiles) -> str:
    """Return the name of an index: a hash of all that decides its numbers, without any content."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files.paths]
    tokenizer = Path(job.model_path) / "tokenizer.json"
    parts = [
        stats,
        to_wire(job.spec.data),
        job.spec.objective,
        job.spec.sequence_tokens,
        job.model_path,
        tokenizer.stat().st_mtime_ns if job.model_path and tokenizer.exists() else 0,
        hash_code((*ROW_MODULES, "browser/index")),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def prune(cache: Path, *, keep: Path) -> None:
    """Delete the oldest indexes above the limit; never `keep`."""
    others = [one for one in cache.iterdir() if one.is_dir() and one != keep]
    others.sort(key=lambda one: one.stat().st_mtime_ns, reverse=True)
    for folder in others[MAX_INDEXES - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


def answer(browser: Browser, line: str) -> dict[str, Any]:
    """Return the answer to one line."""
    try:
        if not line.strip():
            return {"kind": "figures", "figures": to_wire(browser.figures())}
        request = from_wire(RowRequest, json.loads(line), "request")
        if request.place is not None:
            return {"kind": "row", "row": to_wire(browser.show(request.place))}
        return {"kind": "rows", "rows": to_wire(browser.list_rows(request))}
    except ExpectedError as error:
        return {"kind": "failed", "message": error.message, "hint": error.hint}
    except MemoryError:
        return {"kind": "failed", "message": "These rows take too much memory to read.", "hint": ""}


def main(argv: list[str]) -> int:
    """Answer requests until stdin ends; return the exit code."""
    job_path, cache = map(Path, argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ["HF_HUB_OFFLINE"] = "1"  # data of the hub is read from the cache alone
    try:
        job = from_wire(BrowseJob, json.loads(job_path.read_bytes()), "job")
        limit_memory(_MEMORY_BYTES)
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="rackless-rows-") as folder:
            browser = Browser(job, cache, Path(folder))
            prune(cache, keep=browser.index.folder)
            for line in sys.stdin:
                print(json.dumps(answer(browser, line)), flush=True)
                browser.start()
    except (OSError, ValueError, WireError) as error:
        print(json.dumps({"kind": "failed", "message": str(error), "hint": ""}), flush=True)
        return 1
    except ExpectedError as error:
        failed = {"kind": "failed", "message": error.message, "hint": error.hint}
        print(json.dumps(failed), flush=True)
        return 1
    return 0
