"""Read the rows of a file, or of all data files of a folder in order.

If a folder has both training files (`train.jsonl`) and held-out files (`test.jsonl`,
`validation.jsonl`), only one kind is read; otherwise all files are. Rows are numbered across files.
The tally counts skipped rows and decides how many are too many.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agents.contract.data import DataFinding
from agents.contract.objectives import OBJECTIVES, ROW_FORMATS, find_readers, join_or
from agents.contract.spec import DataSpec, Reasoning
from agents.errors import ExpectedError, explain_os_error
from agents.shared.data.columns import KNOWN_KEYS, choose_format
from agents.shared.data.encodings import NotUtf8, offer_encoding
from agents.shared.data.files import KINDS, kind_of, look_through
from agents.shared.data.findings import (
    RowMeanings,
    describe_reading,
    place_finding,
    refusals,
    say_refusal,
    sort_findings,
)
from agents.shared.data.offers import offer_mapping
from agents.shared.data.reshape import ColumnMapping, explain_reading
from agents.shared.data.splits import choose_named, choose_split
from agents.trainer.data.conversations import ConversationRow, read_row, read_row_by_older_rules
from agents.trainer.data.files import FileReading, read_file
from agents.trainer.data.tally import BLANK, Skipped, Tally
from agents.trainer.data.tokens import TEXT_RULES
from agents.trainer.data.turns.thoughts import treat_thoughts

# Number of rows between two checks for data that would be trained wrongly.
_CHECKED_ROWS = 1000
_SAVE = "or save the file as UTF-8"


class RefusedData(ExpectedError):
    """Raised for data that would be trained wrongly."""

    def __init__(self, name: str, findings: Sequence[DataFinding]) -> None:
        message, hint = say_refusal(name, refusals(findings))
        super().__init__(f"{message}.", hint)
        self.name = name
        self.findings = tuple(findings)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFiles:
    """The files of one data set, in reading order."""

    name: str
    """Name of the data set in messages."""
    paths: tuple[Path, ...]


def find_files(path: Path, *, held_out: bool = False, split: str | None = None) -> DataFiles:
    """Return the file, or the data files in and below the folder, sorted by name.

    Args:
        path: file or folder.
        held_out: True selects the held-out files of a folder that also has training files. See
            `splits` for the distinction.
        split: name of the split to select instead.

    Raises:
        ExpectedError: the file or the split is missing, or a folder has files of several kinds.
    """
    found = list_files(path)
    if split is not None:
        return choose_split_files(str(path), path, found, split)
    # A folder may mix training and held-out files of one data set.
    if path.is_dir():
        train, other = (choose_split(path, found, held_out=side) for side in (False, True))
        if train and other:
            found = other if held_out else train
        return DataFiles(name=str(path), paths=require_one_kind(str(path), found))
    return DataFiles(name=str(path), paths=tuple(found))


def choose_split_files(name: str, folder: Path, found: Sequence[Path], split: str) -> DataFiles:
    """Return the files of a split by its name.

    Raises:
        ExpectedError: no file's name names the split, or its files are of several kinds.
    """
    chosen = choose_named(folder, found, split) if folder.is_dir() else []
    if not chosen:
        names = [path.relative_to(folder).as_posix() or path.name for path in found[:5]]
        raise ExpectedError(
            f"{name} has no split {split}; its files are {', '.join(names)}.",
            "Name a split that is part of a file's name, or leave it out",
        )
    return DataFiles(name=name, paths=require_one_kind(name, chosen))


def list_files(path: Path) -> list[Path]:
    """Return the file, or all data files in and below the folder, sorted by name.

    Raises:
        ExpectedError: the path does not exist, or a file is compressed.
    """
    if not path.exists():
        raise ExpectedError(f"{path} does not exist.", "Check data.train of the run file")
    if not path.is_dir():
        return [path]
    try:
        found = look_through(path)
    except OSError as error:
        raise explain_os_error(error, f"looking through {path}") from error
    if found.packed is not None:
        raise ExpectedError(
            f"{found.packed} is compressed and would be left out.",
            "Unpack it, or take it out of the folder",
        )
    return list(found.data)


def require_one_kind(name: str, found: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files if all are of one kind.

    Raises:
        ExpectedError: there are several kinds, or no files.
    """
    if not found:
        raise ExpectedError(
            f"{name} holds no data file.",
            "Use .jsonl, .json, .csv, .tsv, .txt, .md, .html, .parquet or source code",
        )
    kinds = Counter(kind_of(file.name) for file in found)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise ExpectedError(
            f"{name} holds data files of several kinds: {counts}.", "Keep files of one kind in it"
        )
    return tuple(found)


def _refuse_json(path: Path, value: Any) -> None:
    """Raise for a .txt with rows of JSON, whose braces would be learned."""
    try:
        row = json.loads(value["text"].partition("\n")[0]) if value else None
    except (ValueError, RecursionError):
        return
    if isinstance(row, dict) and KNOWN_KEYS.intersection(row):
        raise ExpectedError(
            f"{path} is text by its name, but its lines are rows of JSON.",
            "Let its name end in .jsonl, or set data.format: text to learn it as it stands",
        )


class RowReader:
    """Iterates once over all rows.

    Args:
        files: files to read.
        data: settings of the data; its paths do not count.
        objective: objective, which determines the supported formats.
        tally: collects skipped rows.
        rules: version of `tokens.TEXT_RULES` at the start of the run.
        enforce: True rejects data that would be trained wrongly.
    """

    def __init__(
        self,
        files: DataFiles,
        data: DataSpec,
        objective: str,
        tally: Tally,
        *,
        rules: int = TEXT_RULES,
        enforce: bool = False,
    ) -> None:
        self._files = files
        self._objective = objective
        self._tally = tally
        self._ignored = frozenset(data.ignore_columns)
        self._enforce = enforce
        # Runs that began before rows were reshaped keep their rows.
        self._mapping = ColumnMapping(data.columns) if rules >= 3 else None
        self._read_row = (
            partial(read_row, rendered=data.rendered) if rules >= 3 else read_row_by_older_rules
        )
        self._reasoning: Reasoning = data.reasoning if rules >= 3 else "learn"
        self._meanings = RowMeanings(data.ignore_columns)
        self._num_read = 0
        self._reading_as = ""
        self._starts: list[int] = []
        self._names: list[str] = []
        self._reading = FileReading(
            documents=data.documents if rules >= 3 else "line",
            encoding=data.encoding,
            unfolds_each=rules < 3,
        )
        self._size_bytes = sum(path.stat().st_size for path in files.paths if path.exists())
        self.format: str = data.format
        """Format as requested, or as detected from the first row that is not blank."""

    def __iter__(self) -> Iterator[ConversationRow]:
        """Yield the usable rows.

        Raises:
            ExpectedError: a file cannot be read, or its format does not suit the objective.
        """
        if self.format != "auto":
            self._expect_format()
        last = 0
        for path in self._files.paths:
            self._starts.append(last)
            self._names.append(path.name)
            start = last
            for number, value in read_file(path, self._reading):
                last = start + number
                self._tally.num_rows += 1
                self._count_unread()
                # Every line of a .txt parses as text, so rows of JSON in it would go unnoticed.
                if self.format == "auto" and KINDS.get(path.suffix.lower()) == "text":
                    _refuse_json(path, value)
                row = self._read(last, value)
                if self._tally.num_rows % _CHECKED_ROWS == 0 and self._meanings.is_settled:
                    self._refuse_wrong()
                if isinstance(row, ConversationRow):
                    yield row
                else:
                    self.skip(row)
            self._count_unread()
        self._refuse_wrong()

    def _count_unread(self) -> None:
        while self._reading.unread:
            kind, name, count, refused = self._reading.unread.pop()
            self._meanings.add_columns(kind, name, count, refused=refused)

    @property
    def findings(self) -> tuple[DataFinding, ...]:
        """Findings of the rows read so far: content that is not learned."""
        found = []
        for finding in self._meanings.find():
            merged = self._tally.merge_template(finding)
            if merged is not None:
                found.append(self._place(merged))
        if count := self._reading.num_documents:
            unit = self._reading.documents
            found.append(
                DataFinding(
                    kind="documents", column=unit, count=count, total=count, consequence="note"
                )
            )
        found += describe_reading(self._reading_as, self._tally.num_rows)
        return sort_findings((*found, *self._tally.find_notes(), *self._tally.find_cut()))

    def _place(self, found: DataFinding) -> DataFinding:
        if not found.row:
            return found
        named = self._name_file(Skipped(row=found.row, reason=""))
        return place_finding(found, named.row, named.file)

    def _refuse_wrong(self) -> None:
        # A preview does not enforce: it shows the rows together with the finding.
        if self._enforce and refusals(self._meanings.find()):
            raise RefusedData(self._files.name, self.findings)

    def _read(self, number: int, value: Any) -> ConversationRow | Skipped:
        if value is None:
            return Skipped(row=number, reason=BLANK)
        given = value
        try:
            if isinstance(value, ValueError):
                raise value
            if self._mapping is not None and (reason := self._mapping.leave_out(value)):
                return Skipped(row=number, reason=reason)
            whole = self._reshape(value)
            # Before ignored columns are removed: the findings list those, too.
            if isinstance(whole, dict) and self.format != "auto":
                self._meanings.add(whole, self.format, number)
            value = self._without_ignored(whole) if self._ignored else whole
            if self.format == "auto":
                self.format = choose_format(value)
                self._expect_format()
                if isinstance(given, dict):
                    self._reading_as = explain_reading(given, value, self.format)
                self._meanings.add(whole, self.format, number)
            row = treat_thoughts(self._read_row(number, value, self.format), self._reasoning)
        except ValueError as error:
            if isinstance(error, NotUtf8):
                guessed = offer_encoding(self._files.paths[len(self._starts) - 1])
                self._offer(guessed or "data.encoding to that of the file", _SAVE)
            if not self._num_read and not isinstance(value, ValueError):
                self._offer(offer_mapping(given), "or rename its columns")
            return Skipped(row=number, reason=str(error), malformed=True)
        self._num_read += not isinstance(row, str)
        return Skipped(row=number, reason=row) if isinstance(row, str) else row

    def _offer(self, setting: str, otherwise: str) -> None:
        if setting and not self._tally.offer:
            self._tally.offer = f"Set {setting}, {otherwise}"

    def _reshape(self, value: Any) -> Any:
        if self._mapping is None or not self._ignored or not isinstance(value, dict):
            return self._mapping.apply(value) if self._mapping is not None else value
        # An ignored column must not be taken for the conversation.
        kept = {key: part for key, part in value.items() if key not in self._ignored}
        return {**self._mapping.apply(kept), **{key: value[key] for key in value.keys() - kept}}

    def _without_ignored(self, value: Any) -> Any:
        """Return a row without ignored columns, and its messages without ignored keys."""
        if isinstance(value, dict):
            return {
                key: self._without_ignored(part) if isinstance(part, (list, dict)) else part
                for key, part in value.items()
                if key not in self._ignored
            }
        return [self._without_ignored(part) for part in value] if isinstance(value, list) else value

    @property
    def share(self) -> float:
        """Fraction of the data read so far, 0 to 1, accurate to one block."""
        return min(1.0, self._reading.done_bytes / max(1, self._size_bytes))

    def skip(self, skipped: Skipped) -> None:
        """Count a skipped row, with the name of its file if there are several."""
        self._tally.skip(self._name_file(skipped), skipped.row)

    def truncate(self, row: int, num_tokens: int) -> None:
        """Count a truncated row with its original length."""
        self._tally.truncate(self._name_file(Skipped(row=row, reason=f"{num_tokens} tokens")), row)

    def count_tokens(self, row: int, num_tokens: int, num_cut: int) -> None:
        """Count the tokens of a row, and those beyond the maximum length."""
        self._tally.count_tokens(self._names[self._find_file(row)], num_tokens, num_cut)

    def _find_file(self, row: int) -> int:
        return bisect.bisect_left(self._starts, row) - 1

    def _name_file(self, named: Skipped) -> Skipped:
        # Rows are numbered across files; messages give the number within the row's own file.
        if len(self._files.paths) == 1:
            return named
        place = self._find_file(named.row)
        return replace(named, row=named.row - self._starts[place], file=self._names[place])

    def _expect_format(self) -> None:
        # Without an objective, as for calibration, any format is accepted.
        mine = OBJECTIVES.get(self._objective)
        if mine is None or self.format in mine.formats:
            return
        kind, (reader, *_) = ROW_FORMATS[self.format], find_readers(self.format)
        if kind.contents:
            raise ExpectedError(
                f"{self._files.name} holds {kind.name} rows ({kind.contents}), which need "
                f"objective {reader.name}.",
                f"Use objective: {reader.name}, or give {mine.gives}",
            )
        raise ExpectedError(
            f"objective {mine.name} needs {join_or(mine.formats)} rows, but {self._files.name} "
            f"holds {kind.name} rows.",
            f"Give {mine.gives}, or use objective: {reader.name}",
        )
