"""Count the rows that a run would leave out or cut, before anything of it is sent.

This PC counts what it can read, with the tokenizer if it has that and the training packages, else
by reading alone. Other data, such as a data set of the hub, is counted by a node, which gets no
weights for that. A count has a time limit: of large data it covers the first rows.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.data import DataPreview, SourceSpec
from agents.contract.requests.jobs import PreviewJob
from agents.contract.spec import RunSpec
from agents.shared.data.files import look_through
from agents.shared.data.findings import refusals, say_refusal
from app.errors import LeftOutRows, UserError
from app.library.chat_template import settle_template
from app.library.data import is_hub_data, require_data
from app.library.model_check import find_folder
from app.presentation.left_out_text import hint_for_losses, offer_start, say_count
from app.progress import OnMessage, messages
from app.runs.inputs.preview import Part, can_run_here, run_here
from app.runs.inputs.run_inputs import Inputs, send
from app.runs.services import Services

if TYPE_CHECKING:
    from app.runs.preflight import LaunchPlan

COUNT_S = 30.0
"""Time in which the rows of one data set are counted, in seconds."""
# fcntl: Windows has neither it nor the limits that bound foreign code.
_NEEDED = ("numpy", "fcntl")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCount:
    """Rows of one data set that a run would leave out or cut."""

    part: Part
    name: str
    """Name of the data, as the user knows it."""
    found: DataPreview | None
    """Numbers of rows; None: only a node can read the data."""


async def count_left_out(
    services: Services, spec: RunSpec, report: OnMessage = lambda text: None
) -> tuple[DataCount, ...]:
    """Return the counts of training and evaluation data, as far as this PC can read them.

    Raises:
        UserError: the data is unusable, with file, row and reason.
    """
    return tuple([await _count_here(services, one, report) for one in _list_data(spec)])


async def count_before_sending(
    services: Services, spec: RunSpec, inputs: Inputs, plan: LaunchPlan, report: OnMessage
) -> tuple[DataCount, ...]:
    """Return all counts; the first node reads what this PC cannot.

    Args:
        services: stores and nodes.
        spec: run to start.
        inputs: its model and data.
        plan: checked nodes.
        report: callback with the progress.

    Raises:
        UserError: the data is unusable, or the node cannot be reached.
    """
    counts = []
    node = plan.nodes[0]
    for one in _list_data(spec):
        count = await _count_here(services, one, report)
        if count.found is None:
            report(f"{node} reads {count.name}")
            found = await _count_there(services, one, inputs, node, plan.pythons[node], report)
            count = DataCount(part=one.part, name=count.name, found=found)
        counts.append(count)
    return tuple(counts)


def settle_losses(counts: Sequence[DataCount], report: OnMessage, *, accepts: bool) -> None:
    """Say what is left out, and refuse a start without many of the rows or tokens.

    Args:
        counts: counts of the run's data.
        report: callback with a sentence on each.
        accepts: the user has accepted the loss.

    Raises:
        LeftOutRows: more is left out than a run leaves out unasked.
    """
    for one in counts:
        if one.found is None:
            continue
        said = say_count(one.name, one.found)
        report(said)
        if one.found.loses_much and not accepts:
            raise LeftOutRows(said, hint_for_losses(one.found), offer_start(one.found))


@dataclass(frozen=True, kw_only=True, slots=True)
class _DataPart:
    """One source of training data, or evaluation data with files of its own."""

    part: Part
    place: int
    """Index of the source."""
    name: str
    spec: RunSpec
    """Run with the settings of this data alone."""

    @property
    def held_out_from(self) -> str | None:
        return None if self.part == "train" else self.spec.data.train


def _list_data(spec: RunSpec) -> tuple[_DataPart, ...]:
    """Return all data of a run; held-out rows are counted with the training data."""
    found = []
    spec = settle_template(spec)
    for place, source in enumerate(spec.data.list_sources()):
        data = spec.data.for_source(source)
        if source.split is not None:
            data = replace(data, sources=(SourceSpec(path=source.path, split=source.split),))
        one = replace(spec, data=data)
        found.append(_DataPart(part="train", place=place, name=source.path, spec=one))
    if name := spec.data.eval_path:
        one = replace(spec, data=replace(spec.data, sources=()))
        found.append(_DataPart(part="eval", place=0, name=name, spec=one))
    return tuple(found)


async def _count_here(services: Services, data: _DataPart, report: OnMessage) -> DataCount:
    spec, part, name = data.spec, data.part, data.name
    await asyncio.to_thread(require_data, name, f"data.{part}")
    path = await asyncio.to_thread(_find_readable, name)
    shown = name if is_hub_data(name) and path is None else Path(name).name
    if path is None:
        return DataCount(part=part, name=shown, found=None)
    folder = find_folder(spec.model)
    has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
    job = PreviewJob(
        python=sys.executable,
        spec=spec,
        model_path=str(folder) if has_tokenizer and can_run_here() else "",
        train_path=str(path),
        held_out_from=data.held_out_from,
        whole=False,
        count_s=COUNT_S,
    )
    found = await run_here(job, services.paths.home, report)
    return DataCount(part=part, name=shown, found=found)


def _find_readable(name: str) -> Path | None:
    """Return the absolute path of data; None: this PC lacks it, or a reader for a file of it."""
    path = Path(name).expanduser().absolute()
    if not path.exists() or not all(map(importlib.util.find_spec, _NEEDED)):
        return None
    files = look_through(path).data if path.is_dir() else (path,)
    is_parquet = any(file.suffix.lower() == ".parquet" for file in files)
    return None if is_parquet and importlib.util.find_spec("pyarrow") is None else path


async def _count_there(
    services: Services, data: _DataPart, inputs: Inputs, node: str, python: str, report: OnMessage
) -> DataPreview:
    # Late: lists of runs find no tokenizer.
    from app.library.models import find_tokenizer

    spec = data.spec
    sent = (inputs.train, *inputs.more)[data.place] if data.part == "train" else inputs.eval
    assert sent is not None
    tokenizer = await asyncio.to_thread(
        find_tokenizer, spec.model, services.hashes, services.models
    )
    job = PreviewJob(
        python=python,
        spec=spec,
        model_path=await send(
            services, node, tokenizer, report, "the model's tokenizer", is_model=True
        ),
        train_path=await send(services, node, sent, report, "the data"),
        held_out_from=data.held_out_from,
        whole=False,
        count_s=COUNT_S,
    )
    found = await services.pool.agent(node).ask(job, messages(report))
    if refused := refusals(found.findings):
        message, hint = say_refusal(data.name, refused)
        raise UserError(message, f"{hint}. Nothing was started.")
    return found
