"""Read all rows in the background, and keep a few numbers of each on disk.

A row takes 25 bytes, so ten million rows take a quarter of a GiB of disk and hardly any memory.
The numbers are those of a run with the same settings: rows pass through the same reader, chat
template and tokenizer.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from agents.contract.requests.rows import DataFigures, SourceFigures
from agents.contract.spec import RunSpec
from agents.contract.wire import from_wire, to_wire
from agents.trainer.data.cache import tokenize_kept
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.rows import DataFiles, RowReader
from agents.trainer.data.tally import BLANK, Skipped, Tally
from agents.trainer.data.tokens import Tokenized

CHARS_PER_TOKEN = 4.0
"""Mean number of characters per token in English, for rows without a tokenizer."""
KEPT, LEFT_OUT, CUT, DUPLICATE, EMPTY = range(5)
"""States of rows; an empty line is left out, but no loss."""
_COLUMNS = {
    "places": np.int64,
    "tokens": np.int32,
    "targets": np.int32,
    "states": np.int8,
    "hashes": np.int64,
}
_FLUSHED_ROWS = 2048
_FLUSHED_S = 0.5
_MAX_REASONS = 200
_ABOUT = "about.json"


@dataclass(slots=True)
class _Row:
    tokens: int = 0
    targets: int = 0
    state: int = KEPT
    hash: int = 0


class RowIndex:
    """Numbers of rows on disk, which grow while another thread reads them.

    Args:
        folder: its files; those of a finished index are opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.figures = DataFigures()
        self.num_rows = 0
        """Number of rows whose numbers are on disk."""
        self.starts: list[int] = []
        """Place before the first row of each file."""
        self._files: dict[str, BinaryIO] = {}

    def open(self) -> bool:
        """Take over a finished index; return False without one."""
        try:
            about = json.loads((self.folder / _ABOUT).read_bytes())
            self.figures = from_wire(DataFigures, about["figures"])
            self.starts, num_rows = about["starts"], about["num_rows"]
            sizes = [len(self.column(name, num_rows)) for name in _COLUMNS]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self.num_rows = num_rows
        return sizes == [num_rows] * len(sizes)

    def begin(self) -> None:
        """Begin empty files."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / _ABOUT).unlink(missing_ok=True)
        self._files = {name: (self.folder / name).open("wb") for name in _COLUMNS}

    def add(self, places: list[int], rows: list[_Row]) -> None:
        """Append rows."""
        values = {
            "places": places,
            "tokens": [row.tokens for row in rows],
            "targets": [row.targets for row in rows],
            "states": [row.state for row in rows],
            "hashes": [row.hash for row in rows],
        }
        for name, kind in _COLUMNS.items():
            self._files[name].write(np.array(values[name], dtype=kind).tobytes())
            self._files[name].flush()
        self.num_rows += len(places)

    def end(self, figures: DataFigures) -> None:
        """Close the files, and finish the index with the numbers of all rows."""
        for file in self._files.values():
            file.close()
        about = {"figures": to_wire(figures), "starts": self.starts, "num_rows": self.num_rows}
        (self.folder / _ABOUT).write_text(json.dumps(about), encoding="ascii")
        self.figures = figures  # last: who sees it may end this process

    def column(self, name: str, count: int | None = None) -> npt.NDArray[Any]:
        """Return the values of a column as far as they are on disk, mapped, not read."""
        count = self.num_rows if count is None else count
        kind = _COLUMNS[name]
        if not count:
            return np.zeros(0, dtype=kind)
        return np.memmap(self.folder / name, dtype=kind, mode="r", shape=(count,)).view(np.ndarray)

    def find(self, place: int) -> int | None:
        """Return the position of a row in the columns; None: it is not read yet."""
        places = self.column("places")
        at = int(np.searchsorted(places, place))
        return at if at < len(places) and places[at] == place else None

    def mark_duplicates(self) -> int:
        """Mark rows that repeat an earlier one; return their number."""
        hashes = np.array(self.column("hashes"))
        states = np.array(self.column("states"))
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        repeats = order[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)]
        with (self.folder / "states").open("r+b") as file:
            states[repeats[states[repeats] == KEPT]] = DUPLICATE
            file.write(states.tobytes())
        return len(repeats)


class _Reasons(Tally):
    """A tally that also hands each skipped row to an indexer."""

    def __init__(self, name: str, indexer: Indexer) -> None:
        super().__init__(name=name)
        self._indexer = indexer

    def skip(self, skipped: Skipped, place: int) -> None:
        Tally.skip(self, skipped, place)
        self._indexer.skip(skipped, place)


class Indexer:
    """Reads all rows once, and writes their numbers in their order.

    Args:
        files: data files.
        spec: run whose settings count.
        tokenizer: the model's tokenizer; None: tokens are estimated from characters.
        index: empty index.
    """

    def __init__(self, files: DataFiles, spec: RunSpec, tokenizer: Any, index: RowIndex) -> None:
        self._files, self._spec, self._tokenizer = files, spec, tokenizer
        self.index = index
        self._tally = _Reasons(files.name, self)
        self.reader = RowReader(files, spec.data, spec.objective, self._tally)
        # Rows in reading order, and what is known of them: the tokenizer answers in groups.
        self._order: deque[int] = deque()
        self._rows: dict[int, _Row] = {}
        self._current = 0
        self._num_waiting = 0
        self._flushed_s = time.monotonic()
        self._reasons: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()
        self._sources: list[list[int]] = []
        self._totals: Counter[str] = Counter()
        self._next_duplicates = 1000

    def run(self) -> DataFigures:
        """Read all rows; return their numbers."""
        self.index.begin()
        if self._tokenizer is None:
            for row in self._pass():
                self._rows[row.number] = _estimate(row, self._spec.sequence_tokens)
                self._current = row.number
                self._flush()
        else:
            self._tokenize()
        self._current = -1
        self._flush(is_end=True)
        self._totals["duplicates"] = self.index.mark_duplicates()
        return self._sum_up(is_whole=True)

    def _pass(self) -> Iterator[ConversationRow]:
        for row in self.reader:
            self._order.append(row.number)
            yield row

    def _tokenize(self) -> None:
        spec = self._spec
        # Rows stay apart here: joined ones would have no length of their own.
        apart = spec.data if spec.data.long_text == "cut" else replace(spec.data, long_text="split")
        rows = tokenize_kept(
            self._pass(), self.reader, self._tally, self._tokenizer, spec.sequence_tokens, apart
        )
        for one in rows:
            self._take(one)
            self._flush()

    def _take(self, one: Tokenized) -> None:
        place = one.segments[0].row
        row = self._rows.setdefault(place, _Row())
        kept = sum(len(segment.ids) for segment in one.segments)
        row.tokens += kept if one.cut_from is None else one.num_tokens
        row.targets += sum(segment.num_targets for segment in one.segments)
        if one.cut_from is not None:
            row.state = CUT
        row.hash = hash((row.hash, *(segment.ids.tobytes() for segment in one.segments)))
        self._current = place

    def skip(self, skipped: Skipped, place: int) -> None:
        """Take a row that is left out, by the reader or by the tokenizer."""
        is_blank = skipped.reason == BLANK
        # The reader skips a row that it has not yielded; the tokenizer, one of those that wait.
        if not self._order or place > self._order[-1]:
            self._order.append(place)
        self._rows[place] = _Row(state=EMPTY if is_blank else LEFT_OUT)
        if is_blank:
            return
        known = skipped.reason in self._reasons or len(self._reasons) < _MAX_REASONS
        self._reasons[skipped.reason if known else "other reasons"] += 1

    def _flush(self, *, is_end: bool = False) -> None:
        """Write the first rows whose numbers are final, now and then."""
        self._num_waiting += 1
        now_s = time.monotonic()
        is_due = self._num_waiting >= _FLUSHED_ROWS or now_s - self._flushed_s > _FLUSHED_S
        if not is_due and not is_end:
            return
        self._num_waiting, self._flushed_s = 0, now_s
        places: list[int] = []
        rows: list[_Row] = []
        while self._order:
            place = self._order[0]
            if not is_end and (place == self._current or place not in self._rows):
                break
            self._order.popleft()
            places.append(place)
            rows.append(self._rows.pop(place, _Row()))
        if places:
            self.index.add(places, rows)
            self._count(places, rows)
        if self.index.num_rows >= self._next_duplicates:
            self._next_duplicates *= 2
            self._totals["duplicates"] = self.index.mark_duplicates()
        self.index.figures = self._sum_up(is_whole=False)

    def _count(self, places: list[int], rows: list[_Row]) -> None:
        starts = self.reader._starts
        file = len(self._sources) - 1
        for place, row in zip(places, rows, strict=True):
            while file + 1 < len(starts) and place > starts[file + 1]:
                self._sources.append([0, 0, 0])
                file += 1
            source = self._sources[file]
            source[0] += row.state != EMPTY
            source[1] += row.tokens
            source[2] += row.state == LEFT_OUT
            self._totals["left_out"] += row.state == LEFT_OUT
            self._totals["cut"] += row.state == CUT
            self._totals["tokens"] += row.tokens
            self._totals["targets"] += row.targets
            self._totals["rows"] += row.state != EMPTY
            if row.state not in (LEFT_OUT, EMPTY):
                self._lengths[max(0, row.tokens - 1).bit_length()] += 1

    def _sum_up(self, *, is_whole: bool) -> DataFigures:
        self.index.starts = list(self.reader._starts)
        names = [path.name for path in self._files.paths]
        longest = max(self._lengths, default=-1)
        return DataFigures(
            format=self.reader.format,
            num_rows=self._totals["rows"],
            share=1.0 if is_whole else self.reader.share,
            is_whole=is_whole,
            is_tokenized=self._tokenizer is not None,
            num_left_out=self._totals["left_out"],
            num_cut=self._totals["cut"],
            num_duplicates=self._totals["duplicates"],
            num_tokens=self._totals["tokens"],
            num_targets=self._totals["targets"],
            lengths=tuple(self._lengths[size] for size in range(longest + 1)),
            reasons=dict(self._reasons.most_common(20)),
            offer=self._tally.offer,
            sources=tuple(
                SourceFigures(name=name, num_rows=rows, num_tokens=tokens, num_left_out=left_out)
                for name, (rows, tokens, left_out) in zip(names, self._sources, strict=False)
            ),
        )


def _estimate(row: ConversationRow, most: int) -> _Row:
    """Return the numbers of a row by its characters."""
    learned = sum(len(turn.content) for turn in row.turns if turn.role == "assistant")
    learned += len(row.text) if not row.turns else 0
    tokens = round(row.num_chars / CHARS_PER_TOKEN)
    is_cut = tokens > most and bool(row.turns)
    texts = (row.turns, row.text, row.rejected, row.rejected_text)
    return _Row(
        tokens=tokens,
        targets=round(learned / CHARS_PER_TOKEN),
        state=CUT if is_cut else KEPT,
        hash=hash(texts),
    )
