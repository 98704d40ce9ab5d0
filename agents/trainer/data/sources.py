"""Load the training and evaluation data of a run from all of its sources.

One source of which every row is trained is one entry of the cache of tokens, as always. Several
sources are an entry each. If rows are chosen, all sources are read once before, and the choice is
an entry of the cache, too; see `selection`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agents.contract.data import RowChoice
from agents.contract.spec import DataSpec, RunSpec
from agents.errors import explain_os_error
from agents.file_hashes import hash_files
from agents.trainer.data.cache import (
    ReportProgress,
    hash_code,
    list_names,
    load_examples,
    lock_entry,
    report_rows,
)
from agents.trainer.data.conversations import ConversationRow
from agents.trainer.data.hub import find_data
from agents.trainer.data.joined import JoinedExamples
from agents.trainer.data.rows import DataFiles, RowReader
from agents.trainer.data.selection import Chosen, SourceRows, choose_rows
from agents.trainer.data.store import ExampleSet
from agents.trainer.data.tally import NoUsableRow, Tally
from agents.trainer.data.tokens import TEXT_RULES

Part = Literal["train", "eval"]
_ABOUT = "about.json"
# Modules whose source determines the choice of rows.
_CODE = ("conversations", "files", "near_copies", "parquet_reader", "rows", "selection")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One source of training data on this node."""

    name: str
    """Name of the source in messages; empty if it is the only one."""
    spec: RunSpec
    """Settings of the run, with those of this source."""
    files: DataFiles
    sha256: str
    max_rows: int | None = None


def find_sources(
    spec: RunSpec, paths: Sequence[str], hashes: Path | None
) -> tuple[DataSource, ...]:
    """Return the sources of a run.

    Args:
        spec: spec of the run.
        paths: path or hub id of each source on this node.
        hashes: folder of cached hashes of files.

    Raises:
        ExpectedError: a source is missing.
    """
    found = []
    sources = spec.data.list_sources()
    for source, path in zip(sources, paths, strict=True):
        files = find_data(path, split=source.split)
        found.append(
            DataSource(
                name=source.name if len(sources) > 1 else "",
                spec=replace(spec, data=spec.data.for_source(source)),
                files=files,
                sha256=hash_files(files.paths, hashes),
                max_rows=source.max_rows,
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLoader:
    """Loads both parts of a run's data, from the caches of this node."""

    spec: RunSpec
    sources: tuple[DataSource, ...]
    tokenizer: Any
    cache: Path
    """Folder of the cache of tokens."""
    evaluation: DataFiles | None = None
    """Evaluation data with files of its own."""
    evaluation_sha256: str = ""
    report: ReportProgress | None = None
    wait: Callable[[], None] = lambda: None
    rules: int = TEXT_RULES

    @property
    def sha256(self) -> str:
        """Hash of the training data, and of the choice of its rows."""
        hashes = self._list_hashes()
        if self.spec.data.chooses_rows:
            parts, _ = self._choose()
            hashes += [hashlib.sha256(part.train.tobytes()).hexdigest() for part in parts]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.sha256("".join(f"{one}\n" for one in hashes).encode("ascii")).hexdigest()

    def _list_hashes(self) -> list[str]:
        hashes = [source.sha256 for source in self.sources]
        if self.spec.data.deduplicate != "off" and self.evaluation is not None:
            hashes.append(self.evaluation_sha256)  # copies of its rows are not trained
        return hashes

    def load(self, part: Part) -> ExampleSet | None:
        """Return the examples of a part; None: nothing is evaluated.

        Raises:
            ExpectedError: the data is unusable.
        """
        if part == "eval" and self.evaluation is not None:
            data = replace(self.spec, data=replace(self.spec.data, sources=(), shuffle=True))
            return self._load(self.evaluation, self.evaluation_sha256, data)
        if part == "eval" and self.spec.data.held_out is None:
            return None
        parts, choice = self._choose() if self.spec.data.chooses_rows else (None, None)
        members = []
        for place, source in enumerate(self.sources):
            chosen = parts[place] if parts is not None else None
            rows = None
            if chosen is not None:
                rows = chosen.train if part == "train" else chosen.held_out
            if part == "eval" and (rows is None or not len(rows)):
                continue
            try:
                found = self._load(source.files, source.sha256, source.spec, rows)
            except NoUsableRow:
                if part == "train":
                    raise
                continue  # the few rows held out have nothing to learn
            members.append((source.name, found))
        if not members:
            return None
        examples = members[0][1] if len(self.sources) == 1 else JoinedExamples(members)
        examples.choice = choice
        return examples

    def _load(self, files: DataFiles, sha256: str, spec: RunSpec, rows: Any = None) -> ExampleSet:
        return load_examples(
            *(files, sha256, spec, self.tokenizer, self.cache),
            *(self.report, self.wait, self.rules, rows),
        )

    def _choose(self) -> tuple[list[Chosen], RowChoice]:
        """Return the rows to use, chosen now or by an earlier run."""
        entry = self.cache / self._make_key()
        with lock_entry(self.cache, entry.name, self.wait):
            try:
                return _read_choice(entry, len(self.sources))
            except (OSError, ValueError, KeyError, TypeError):
                parts, choice = self._make_choice()
                _write_choice(entry, parts, choice)
                return parts, choice

    def _make_choice(self) -> tuple[list[Chosen], RowChoice]:
        data = self.spec.data
        evaluated = None
        if data.deduplicate != "off" and self.evaluation is not None:
            # Its format is that of `data`, not of a source.
            read = partial(self._read, self.evaluation, replace(data, sources=()))
            evaluated = SourceRows(name=self.evaluation.name, read=read)
        return choose_rows(
            [
                SourceRows(
                    name=source.files.name,
                    read=partial(self._read, source.files, source.spec.data),
                    max_rows=source.max_rows,
                )
                for source in self.sources
            ],
            deduplicate=data.deduplicate,
            held_out=data.held_out,
            shuffles=data.shuffle,
            evaluated=evaluated,
        )

    def _read(self, files: DataFiles, data: DataSpec) -> Iterator[ConversationRow]:
        tally = Tally(name=files.name)
        reader = RowReader(
            *(files, data, self.spec.objective, tally),
            rules=self.rules,
            enforce=self.rules == TEXT_RULES,
        )
        num_kept = 0
        for row in report_rows(reader, tally, self.report):
            num_kept += 1
            yield row
        tally.check_usable(num_kept)

    def _make_key(self) -> str:
        data = asdict(self.spec.data)
        for name in ("train", "long_text"):
            del data[name]
        for source in data["sources"]:
            del source["path"], source["weight"]
        files = [source.files for source in self.sources]
        if self.evaluation is not None:
            files.append(self.evaluation)
        parts = {
            "data": [self._list_hashes(), [list_names(one) for one in files]],
            "settings": data if self.evaluation is None else {**data, "eval": ""},
            "objective": self.spec.objective,
            "rules": self.rules,
            "code": hash_code(_CODE),
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def _read_choice(entry: Path, num_sources: int) -> tuple[list[Chosen], RowChoice]:
    about = json.loads((entry / _ABOUT).read_bytes())
    parts = []
    for place in range(num_sources):
        train = np.fromfile(entry / f"train-{place}", dtype=np.int64)
        held_out = np.fromfile(entry / f"held-out-{place}", dtype=np.int64)
        if [len(train), len(held_out)] != about["sizes"][place]:
            raise ValueError(f"{entry} is damaged")
        parts.append(Chosen(train=train, held_out=held_out))
    (entry / _ABOUT).touch()  # marks the last use, for `cache.prune`
    return parts, RowChoice(**about["choice"])


def _write_choice(entry: Path, parts: Sequence[Chosen], choice: RowChoice) -> None:
    unfinished = entry.with_suffix(".unfinished")
    sizes = [[len(chosen.train), len(chosen.held_out)] for chosen in parts]
    try:
        for folder in (entry, unfinished):  # left by a killed process or a damaged disk
            shutil.rmtree(folder, ignore_errors=True)
        unfinished.mkdir()
        for place, chosen in enumerate(parts):
            chosen.train.tofile(unfinished / f"train-{place}")
            chosen.held_out.tofile(unfinished / f"held-out-{place}")
        about = {"choice": asdict(choice), "sizes": sizes}
        (unfinished / _ABOUT).write_text(json.dumps(about), encoding="ascii")
        unfinished.rename(entry)
    except OSError as error:
        raise explain_os_error(error, f"writing the choice of rows to {entry}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
