"""Hold the process that looks through the rows of one data set.

It lives while its data set is looked at: the first rows come at once, and its numbers grow while it
reads all rows. Another data set ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.contract.data import SourceSpec
from agents.contract.messages import from_wire, to_wire
from agents.contract.requests.rows import BrowseJob, DataFigures, RowList, RowRequest, WholeRow
from agents.contract.spec import RunSpec
from app.errors import RacklessError, UserError
from app.library.chat_template import settle_template
from app.library.data import is_hub_data, require_data
from app.library.model_check import find_folder
from app.runs.inputs.preview import Part, can_run_here
from app.runs.nodes.local_program import program_environ

_PROGRAM = "agents.trainer.data.browser.program"
_MAX_LINE_BYTES = 64 << 20
_NEEDED = ("numpy", "fcntl")


@dataclass(frozen=True, kw_only=True, slots=True)
class BrowsedData:
    """Data set to look through."""

    spec: RunSpec
    """Run whose settings count."""
    part: Part = "train"
    number: int = 0
    """Place of the source among those of the training data, from 0."""
    num_opened: int = 0
    """Number of times that it was opened; opening it once more reads its files again."""

    @property
    def source(self) -> SourceSpec:
        """The source that is read."""
        data = self.spec.data
        if self.part == "eval":
            return SourceSpec(path=data.eval_path or "-")
        return data.list_sources()[self.number]

    @property
    def name(self) -> str:
        """Path or hub id of the data."""
        return self.source.path

    @property
    def columns(self) -> tuple[str, ...]:
        """Entries of the mapping by which its columns are read."""
        return self.source.columns or self.spec.data.columns

    def list_others(self) -> tuple[BrowsedData, ...]:
        """Return all data of the run, in the order of its run file."""
        data = self.spec.data
        found = [
            replace(self, part="train", number=number) for number in range(len(data.list_sources()))
        ]
        if data.eval_path is not None:
            found.append(replace(self, part="eval", number=0))
        return tuple(found)

    def map_columns(self, entries: Sequence[str]) -> BrowsedData:
        """Return the data with other meanings of its columns, which decide its format."""
        data = self.spec.data
        if self.part == "train" and data.sources:
            sources = list(data.sources)
            sources[self.number] = replace(self.source, columns=tuple(entries), format=None)
            data = replace(data, sources=tuple(sources))
        else:
            data = replace(data, columns=tuple(entries), format="auto")
        return replace(self, spec=replace(self.spec, data=data))


class DataBrowser:
    """At most one process, for the data set that was asked about last.

    Args:
        home: folder of this master.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._source: BrowsedData | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def figures(self, source: BrowsedData) -> DataFigures:
        """Return the numbers of the rows read so far.

        Raises:
            UserError: the data cannot be read on this PC.
        """
        return from_wire(DataFigures, await self._ask(source, None, "figures"))

    async def rows(self, source: BrowsedData, request: RowRequest) -> RowList:
        """Return rows; raises as `figures` does."""
        return from_wire(RowList, await self._ask(source, request, "rows"))

    async def row(self, source: BrowsedData, place: int) -> WholeRow:
        """Return one row as written and as learned; raises as `figures` does."""
        return from_wire(WholeRow, await self._ask(source, RowRequest(place=place), "row"))

    async def close(self) -> None:
        """End the process."""
        process, self._process, self._source = self._process, None, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, source: BrowsedData, request: RowRequest | None, answer: str) -> Any:
        line = json.dumps(to_wire(request)) if request is not None else ""
        # One at a time: answers come in the order of requests.
        async with self._lock:
            process = await self._find(source)
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line.encode("ascii") + b"\n")
                await process.stdin.drain()
                said = await process.stdout.readline()
            except (OSError, ValueError):
                said = b""
            except asyncio.CancelledError:
                await self.close()  # its answer would be taken for that of the next request
                raise
            if not said:
                await self.close()
                raise RacklessError(f"the program that reads {source.name} has ended")
        found = json.loads(said)
        if found.get("kind") == "failed":
            raise UserError(str(found.get("message", "")).rstrip("."), str(found.get("hint", "")))
        return found[answer]

    async def _find(self, source: BrowsedData) -> asyncio.subprocess.Process:
        process = self._process
        if process is not None and process.returncode is None and self._source == source:
            return process
        await self.close()
        job = await asyncio.to_thread(_make_job, source)
        home = self._home.absolute()  # in which the program works
        folder = home / "cache" / "rows"
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(to_wire(job), file)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agents.program", _PROGRAM, file.name, str(folder)),
            env=await asyncio.to_thread(program_environ, self._home),
            cwd=home,
            limit=_MAX_LINE_BYTES,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._source = source
        return self._process


def _make_job(source: BrowsedData) -> BrowseJob:
    """Return the job of a data set on this PC.

    Raises:
        UserError: the data is not here, or this PC has no reader for it.
    """
    path = Path(source.name).expanduser().absolute()
    is_hub = not path.exists() and is_hub_data(source.name)
    if not is_hub and not path.exists():
        raise UserError(
            f"{source.name} does not exist on this PC",
            "Choose a file, a folder, or a data set of the hub that was downloaded.",
        )
    require_data(source.name, f"data.{source.part}")
    if not all(map(importlib.util.find_spec, _NEEDED)):
        raise UserError(
            "the rows of data cannot be looked through on this system",
            "The preview of a run shows the first ones, as a node reads them.",
        )
    folder = find_folder(source.spec.model)
    has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file() and can_run_here()
    spec = settle_template(source.spec)
    if source.part == "train":
        spec = replace(spec, data=spec.data.for_source(source.source))
    return BrowseJob(
        spec=spec,
        path=source.name if is_hub else str(path),
        model_path=str(folder.absolute()) if folder is not None and has_tokenizer else "",
        held_out_from=None if source.part == "train" else source.spec.data.train,
        split=source.source.split,
    )
