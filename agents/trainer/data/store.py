"""Tokenized data on disk: written once as a stream, then memory-mapped by every rank.

An entry is a folder of plain arrays. `tokens` holds all ids as int32; a target is stored as its
bitwise complement, which is negative, so no second array is needed. `starts` (S + 1) and `rows` (S)
hold the start and the row number of each segment; `order` (S) and `first` (N + 1) the segments of
each example. Only if rows have weights, `token_weights` holds that of each token, and
`target_weights` (N) their sum over the targets of each example. `about.json` is written last and
the folder is then renamed into place, so an entry under its final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from agents.contract.data import DataFinding, RowChoice
from agents.contract.objectives import ROW_FORMATS
from agents.errors import ExpectedError, explain_os_error
from agents.trainer.data.examples import Example, Segment
from agents.trainer.data.packing import pack, pack_in_order
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokens import Tokenized

_ABOUT = "about.json"
_ARRAYS = {
    "tokens": np.int32,
    "starts": np.int64,
    "rows": np.int64,
    "order": np.int64,
    "first": np.int64,
    "num_tokens": np.int32,
    "num_targets": np.int32,
    "labels": np.float32,
    "token_weights": np.float32,
    "target_weights": np.float64,
}
_LABELS = "labels"
_TOKEN_WEIGHTS, _TARGET_WEIGHTS = "token_weights", "target_weights"
_OPTIONAL = (_LABELS, _TOKEN_WEIGHTS, _TARGET_WEIGHTS)
_FILLED_AT_ONCE = 1 << 20
_BUFFER_BYTES = 1 << 20


class ExampleSet:
    """The examples of a run, mapped from disk; see `agents.trainer.data.examples.Examples`.

    Args:
        folder: folder that `write_examples` and `write_about` have written.
        weighs_tokens: True if a batch counts the targets of an example, else it counts examples.

    Raises:
        OSError: the folder is missing or incomplete.
    """

    def __init__(self, folder: Path, *, weighs_tokens: bool = True) -> None:
        about: dict[str, Any] = json.loads((folder / _ABOUT).read_bytes())
        sizes = about["sizes"]
        arrays = {
            name: _map(folder / name, kind, sizes[name])
            for name, kind in _ARRAYS.items()
            if name in sizes or name not in _OPTIONAL
        }
        self.folder = folder
        self.format: str = about["format"]
        """Format of the rows, as requested or detected."""
        self.vocab_size: int = sizes["words"]
        """Size of the vocabulary that the model needs: the largest token id + 1."""
        self.num_rows: int = about["num_rows"]
        """Number of rows of the data, including skipped ones."""
        self.num_skipped: int = about["num_skipped"]
        self.num_malformed: int = about["num_malformed"]
        self.num_blank: int = about["num_blank"]
        """Number of skipped rows that are empty lines."""
        self.num_truncated: int = about["num_truncated"]
        self.skipped = tuple(Skipped(**row) for row in about["skipped"])
        """First skipped rows."""
        self.truncated = tuple(Skipped(**row) for row in about["truncated"])
        """First truncated rows; the reason is their length."""
        self.findings = tuple(DataFinding(**finding) for finding in about["findings"])
        self.choice: RowChoice | None = None
        """Rows that were chosen before they were tokenized; None: all of them."""
        self.num_tokens: npt.NDArray[np.int32] = arrays["num_tokens"]
        self.num_targets: npt.NDArray[np.int32] = arrays["num_targets"]
        targets = arrays.get(_TARGET_WEIGHTS, self.num_targets)
        self.weights = targets if weighs_tokens else np.ones_like(self.num_targets)
        self._token_weights = arrays.get(_TOKEN_WEIGHTS)
        self.labels: npt.NDArray[np.float32] | None = arrays.get(_LABELS)
        """Label of each row (N,); None if the format has no labels."""
        self._tokens, self._starts = arrays["tokens"], arrays["starts"]
        self._rows, self._order, self._first = arrays["rows"], arrays["order"], arrays["first"]

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def members(self) -> tuple[tuple[str, ExampleSet], ...]:
        """Name and examples of each source; the name is empty if there is only one."""
        return (("", self),)

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(len(member) for _, member in self.members)

    def __getitem__(self, index: int) -> Example:
        places = self._order[self._first[index] : self._first[index + 1]]
        return Example(tuple(self._segment(int(place)) for place in places))

    def first_rows(self, count: int) -> list[tuple[Segment, ...]]:
        """Return the segments of the first rows in their order, packed or not."""
        size = ROW_FORMATS[self.format].num_segments
        count = min(count, len(self._rows) // size)
        return [
            tuple(self._segment(place) for place in range(row * size, (row + 1) * size))
            for row in range(count)
        ]

    def _segment(self, place: int) -> Segment:
        own = slice(self._starts[place], self._starts[place + 1])
        stored = self._tokens[own]
        is_target = np.asarray(stored < 0)
        ids = np.where(is_target, ~stored, stored)
        weights = None if self._token_weights is None else self._token_weights[own]
        return Segment(int(self._rows[place]), ids, is_target, weights)


def _map(path: Path, kind: type, size: int) -> npt.NDArray[Any]:
    # Damage shows in the file sizes; a damaged entry is written again.
    if path.stat().st_size != size * np.dtype(kind).itemsize:
        raise OSError(f"{path} does not have the size that {_ABOUT} names")
    # A plain view: every slice of a memmap would be a slow memmap object.
    return np.memmap(path, dtype=kind, mode="r", shape=(size,)).view(np.ndarray)


class _Column:
    """Appends to one array on disk."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file: BinaryIO = (folder / name).open("wb", buffering=_BUFFER_BYTES)
        self._kind = np.dtype(_ARRAYS[name])
        self.size = 0

    def add(self, values: npt.ArrayLike) -> None:
        array = np.asarray(values, dtype=self._kind).reshape(-1)
        self._file.write(array.tobytes())
        self.size += len(array)

    def fill(self, value: float, size: int) -> None:
        """Append `value` until the column has this size."""
        while self.size < size:
            self.add(np.full(min(size - self.size, _FILLED_AT_ONCE), value))

    def close(self) -> None:
        self._file.flush()
        # The rename that completes an entry must not reach the disk before its content.
        os.fsync(self._file.fileno())
        self._file.close()


def write_examples(
    folder: Path, rows: Iterator[Tokenized], *, capacity: int | None, shuffles: bool = True
) -> dict[str, int]:
    """Write all arrays into the new `folder`; return the size of each, and `words` (`vocab_size`).

    Args:
        folder: new folder.
        rows: tokenized rows.
        capacity: maximum number of tokens of a pack; None makes each row an example.
        shuffles: False packs rows in their order.

    Raises:
        ExpectedError: the disk is full.
    """
    with _explaining_errors(folder):
        folder.mkdir(parents=True)
        sizes = _write_segments(folder, rows)
        _write_examples(folder, sizes, capacity, shuffles)
    return sizes


@contextmanager
def _explaining_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise explain_os_error(error, f"writing tokens to {folder}") from error


def _write_segments(folder: Path, rows: Iterator[Tokenized]) -> dict[str, int]:
    names = ("tokens", "starts", "rows", "first", "num_targets", _TARGET_WEIGHTS)
    columns = {name: _Column(folder, name) for name in names}
    columns["starts"].add(0)
    columns["first"].add(0)
    num_segments, vocab_size = 0, 0
    for row in rows:
        for segment in row.segments:
            ids = segment.ids
            # The complement of an id is negative, even of id 0.
            columns["tokens"].add(np.where(segment.is_target, ~ids, ids))
            columns["starts"].add(columns["tokens"].size)
            columns["rows"].add(segment.row)
            if segment.weights is not None and _TOKEN_WEIGHTS not in columns:
                columns[_TOKEN_WEIGHTS] = _Column(folder, _TOKEN_WEIGHTS)
            if (weights := columns.get(_TOKEN_WEIGHTS)) is not None:
                weights.fill(1, columns["tokens"].size - len(ids))
                weights.add(np.ones(len(ids)) if segment.weights is None else segment.weights)
            num_segments += 1
            vocab_size = max(vocab_size, int(ids.max(initial=-1)) + 1)
        columns["first"].add(num_segments)
        if row.label is not None:
            if _LABELS not in columns:
                columns[_LABELS] = _Column(folder, _LABELS)
            columns[_LABELS].add(row.label)
        columns["num_targets"].add(sum(segment.num_targets for segment in row.segments))
        columns[_TARGET_WEIGHTS].add(sum(segment.weight for segment in row.segments))
    for column in columns.values():
        column.close()
    if _TOKEN_WEIGHTS not in columns:
        del columns[_TARGET_WEIGHTS]
        (folder / _TARGET_WEIGHTS).unlink()
    return {"words": vocab_size, **{name: column.size for name, column in columns.items()}}


def _write_examples(
    folder: Path, sizes: dict[str, int], capacity: int | None, shuffles: bool
) -> None:
    """Write the segments and the counts of each example."""
    if not sizes["rows"]:
        return
    lengths = np.diff(_map(folder / "starts", np.int64, sizes["starts"])).astype(np.int32)
    first = _map(folder / "first", np.int64, sizes["first"])
    num_targets = np.array(_map(folder / "num_targets", np.int32, sizes["num_targets"]))
    order = np.arange(len(lengths), dtype=np.int64)
    if capacity is not None:
        order, first = (pack if shuffles else pack_in_order)(lengths, capacity)
        # A pack has the targets of all its rows.
        num_targets = np.add.reduceat(num_targets[order], first[:-1]).astype(np.int32)
    num_tokens = np.add.reduceat(lengths[order], first[:-1]).astype(np.int32)
    made: dict[str, npt.NDArray[Any]] = {
        "order": order,
        "num_tokens": num_tokens,
        "num_targets": num_targets,
    }
    if _TARGET_WEIGHTS in sizes:
        weights = np.array(_map(folder / _TARGET_WEIGHTS, np.float64, sizes[_TARGET_WEIGHTS]))
        if capacity is not None:
            weights = np.add.reduceat(weights[order], first[:-1])
        made[_TARGET_WEIGHTS] = weights
    made["first"] = np.array(first)
    for name, values in made.items():
        # A new file, since the arrays above are still mapped from the old one.
        (folder / name).unlink(missing_ok=True)
        column = _Column(folder, name)
        column.add(values)
        column.close()
        sizes[name] = column.size


def write_about(
    folder: Path,
    sizes: dict[str, int],
    data_format: str,
    tally: Tally,
    findings: Sequence[DataFinding] = (),
) -> None:
    """Complete the folder with a description of its arrays and of skipped rows."""
    about = {
        "format": data_format,
        "sizes": sizes,
        "num_rows": tally.num_rows,
        "num_skipped": tally.num_skipped,
        "num_malformed": tally.num_malformed,
        "num_blank": tally.num_blank,
        "num_truncated": tally.num_truncated,
        "skipped": [asdict(row) for row in tally.named],
        "truncated": [asdict(row) for row in tally.truncated],
        "findings": [asdict(finding) for finding in findings],
    }
    try:
        with (folder / _ABOUT).open("w", encoding="ascii") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise explain_os_error(error, f"writing tokens to {folder}") from error


def open_examples(folder: Path, *, weighs_tokens: bool = True) -> ExampleSet | None:
    """Return the examples stored in the folder, or None if it is missing or incomplete."""
    try:
        examples = ExampleSet(folder, weighs_tokens=weighs_tokens)
        os.utime(folder / _ABOUT)  # marks the last use, for `cache.prune`
    except (OSError, ValueError, KeyError, TypeError, ExpectedError):
        return None
    return examples
