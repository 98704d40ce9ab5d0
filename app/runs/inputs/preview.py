"""Preview a run's data before it starts: format, counts, skipped rows and trained parts.

This needs the model's tokenizer and the packages of the training environment, but neither weights
nor a GPU. It runs on this PC if the model's folder and the packages are here, else on the first
node of the run file that can train, which gets the data (as the run needs it there anyway) and the
tokenizer only. The tokens are cached where a run on that node finds them, so no time is lost.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agents.contract.data import DataPreview
from agents.contract.messages import from_wire, to_wire
from agents.contract.requests.jobs import PreviewJob
from agents.contract.requests.node import ReadFacts
from agents.contract.spec import RunSpec
from agents.shared.files.bounded_work import KILLS
from app.errors import RacklessError, UserError
from app.library.bundles import Source
from app.library.chat_template import settle_template
from app.library.data import find_data
from app.library.models import find_tokenizer
from app.progress import OnMessage, messages
from app.provisioning.environment import python_of
from app.runs.inputs.run_inputs import find_sources, send
from app.runs.nodes.local_program import run_program
from app.runs.preflight import choose_nodes
from app.runs.services import Services
from app.text import show_list

Part = Literal["train", "eval"]
"""Data set of a run file."""
# fcntl: the trainer's data cache takes file locks that Windows does not have.
_NEEDED = ("transformers", "tokenizers", "jinja2", "numpy", "fcntl")


async def preview_data(
    services: Services,
    spec: RunSpec,
    *,
    part: Part = "train",
    node: str | None = None,
    whole: bool = True,
    progress: OnMessage | None = None,
) -> DataPreview:
    """Return a preview of the training data of a run with this spec.

    Args:
        services: stores and nodes.
        spec: run to preview.
        part: data set to read; `eval` requires `data.eval`.
        node: node to use; None for this PC if possible, else the first suitable node.
        whole: tokenize all rows; False reads only the first rows, which takes seconds.
        progress: callback with a sentence on each stage.

    Raises:
        UserError: the data is unusable (with file, row and reason), or no PC can read it.
    """
    report = progress or (lambda text: None)
    is_of_train = part == "train" or spec.data.held_out is not None
    name = spec.data.train if is_of_train else spec.data.eval or ""
    spec = await asyncio.to_thread(settle_template, spec)
    if len(spec.data.list_sources()) > 1 and is_of_train:
        name = show_list([source.name for source in spec.data.list_sources()])
    data = await asyncio.to_thread(_find_all, services, spec, part)
    model = await asyncio.to_thread(find_tokenizer, spec.model, services.hashes, services.models)
    job = PreviewJob(
        python=sys.executable,
        spec=spec,
        model_path=model.root or "",
        train_path=data.train.value,
        more_paths=tuple(source.value for source in data.more),
        eval_path=data.eval.value if data.eval is not None else None,
        held_out=part == "eval" and spec.data.held_out is not None,
        held_out_from=spec.data.train if part == "eval" and not spec.data.held_out else None,
        whole=whole,
    )
    if node is None and model.root is not None and can_run_here():
        report(f"reading {name} on this PC")
        return await run_here(job, services.paths.home, report)
    chosen, python = await _choose_node(services, spec, node)
    report(f"reading {name} on {chosen}")
    return await _run_there(services, chosen, replace(job, python=python), model, data, report)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    train: Source
    more: tuple[Source, ...] = ()
    eval: Source | None = None


def _find_all(services: Services, spec: RunSpec, part: Part) -> _Data:
    """Return the data that a preview of this part reads."""
    data, evaluation = spec.data, spec.data.eval_path
    # Rows of any meaning are shown, together with what a run would say of them.
    if part == "eval" and data.held_out is None:
        return _Data(train=find_data(evaluation or "", "data.eval", services.hashes))

    def find(name: str, key: str, **options: Any) -> Source:
        return find_data(name, key, services.hashes, **{**options, "data": None})

    train, *more = find_sources(data, find)
    # Copies of its rows are not trained.
    other = evaluation if data.deduplicate != "off" else None
    return _Data(
        train=train, more=tuple(more), eval=find(other, "data.eval") if other is not None else None
    )


def can_run_here() -> bool:
    # Looked up, not imported: importing transformers takes seconds.
    return all(importlib.util.find_spec(name) is not None for name in _NEEDED)


async def _choose_node(services: Services, spec: RunSpec, named: str | None) -> tuple[str, str]:
    """Return the first node that can train, and its interpreter.

    Raises:
        UserError: no node can; the message is the first node's.
    """
    names = (named,) if named else choose_nodes(spec, services.pool.names())
    problem: RacklessError | None = None
    for name in names:
        try:
            return name, python_of(name, await services.pool.agent(name).ask(ReadFacts()))
        except RacklessError as error:
            problem = problem or error
    raise problem or UserError("there are no nodes yet", "Add one: rackless nodes add")


async def _run_there(
    services: Services, node: str, job: PreviewJob, model: Source, data: _Data, report: OnMessage
) -> DataPreview:
    job = replace(
        job,
        model_path=await send(services, node, model, report, "the model's files", is_model=True),
        train_path=await send(services, node, data.train, report, "the data"),
        more_paths=tuple(
            [await send(services, node, source, report, "the data") for source in data.more]
        ),
    )
    if data.eval is not None:
        path = await send(services, node, data.eval, report, "the evaluation data")
        job = replace(job, eval_path=path)
    return await services.pool.agent(node).ask(job, messages(report))


async def run_here(job: PreviewJob, home: Path, report: OnMessage) -> DataPreview:
    """Perform a job on this PC, in a process of its own.

    Raises:
        UserError: the data is unusable, or takes too much memory.
    """
    ended = await run_program("agents.trainer.data.preview", to_wire(job), home, report)
    if ended.code == 0:
        return from_wire(DataPreview, json.loads(ended.report))
    if ended.failed is not None:
        raise UserError(str(ended.failed.get("message", "")), str(ended.failed.get("hint", "")))
    if -ended.code in KILLS:
        reason, hint = KILLS[-ended.code]
        raise UserError(f"the preview was stopped: {reason}", hint)
    # The kernel's out-of-memory killer sends SIGKILL.
    if ended.code < 0:
        raise UserError(
            f"the data preview was ended by signal {-ended.code}: most likely {job.train_path} "
            "takes too much memory to read",
            "Write shorter rows, one per line (.jsonl), or preview it on a node: --node NAME",
        )
    last = ended.last_error or "no message"
    raise RacklessError(f"the data preview exited with code {ended.code}: {last}")
