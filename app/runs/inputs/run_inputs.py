"""Find a run's model and data on this PC, send them to the nodes, and recall them for a resume."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.messages import from_wire
from agents.contract.requests.models import InspectModel
from agents.contract.requests.runs import CompareBundle
from agents.contract.shares import SharedPlace
from agents.contract.spec import DataSpec, RunSpec
from agents.shared.models.code_references import without_code
from app.errors import BadAnswer, NodeUnreachable, UserError
from app.library.bundles import Source
from app.library.model_check import find_folder, refuse, require_usable
from app.library.models import find_model, require_whole
from app.library.shares import require_answer
from app.presentation.result_text import say_bytes, say_transfers
from app.progress import OnMessage
from app.runs.inputs.shared_inputs import Places, find_places
from app.runs.services import Services
from app.storage.hashes import HashStore
from app.storage.runs import RunRecord
from app.text import show_duration

if TYPE_CHECKING:
    from agents.shared.models.folder import ModelFolder
    from app.runs.preflight import LaunchPlan

REPORTED_BYTES = 64 * 1024**2
"""Minimum size of a source whose transfer reports its progress, in bytes."""
RETRY_S = 1.0
"""Time between two tries to send files after a connection broke, in seconds."""
MODEL, TRAIN, EVAL = "the model", "the training data", "the evaluation data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Sources of a run's model and data."""

    model: Source
    train: Source
    eval: Source | None = None
    more: tuple[Source, ...] = ()
    """Further sources of training data."""

    def named(self) -> dict[str, Source]:
        """Return the sources by their names in a sentence."""
        found = {MODEL: self.model, TRAIN: self.train}
        found |= {name_source(place): one for place, one in enumerate(self.more, start=2)}
        return found if self.eval is None else {**found, EVAL: self.eval}


def name_source(number: int) -> str:
    """Return the name of a source of training data in a sentence; the first one is 1."""
    return TRAIN if number == 1 else f"{TRAIN} ({number})"


def find_inputs(services: Services, spec: RunSpec) -> Inputs:
    """Find and check model and data on this PC. Hashes files: not for the event loop.

    Raises:
        UserError: one of them is missing or broken, or the data would be trained wrongly.
    """
    # Imported on use: lists of runs read no data.
    from agents.shared.models.fit import find_beyond
    from app.library.data import find_data

    evaluation = spec.data.eval_path
    require_answer((spec.model, *spec.data.list_names()))
    # The model first: its check takes milliseconds, reading the data may take minutes.
    require_model(services, spec)
    folder = find_folder(spec.model)
    beyond = find_beyond(services.models.inspect(folder)) if folder is not None else ()
    beyond = tuple(token for token in beyond if token not in spec.data.new_tokens)
    find = partial(find_data, hashes=services.hashes, beyond=beyond)
    train, *more = find_sources(spec.data, find)
    return Inputs(
        train=train,
        more=tuple(more),
        eval=find(evaluation, "data.eval", data=spec.data) if evaluation else None,
        model=find_model(spec.model, services.hashes, services.models, spec),
    )


def find_sources(data: DataSpec, find: Callable[..., Source]) -> tuple[Source, ...]:
    """Return the sources of training data, checked.

    Args:
        data: settings of the data.
        find: `find_data` with its stores.

    Raises:
        UserError: one of them is missing or broken, two are the same file, or more rows are to be
            held out than there are.
    """
    found: list[Source] = []
    counts: list[int | None] = []
    seen: dict[tuple[Path, str | None], str] = {}
    for source in data.list_sources():
        # Links and relative paths may lead to the same file.
        real = Path(source.path).expanduser().resolve()
        if (first := seen.setdefault((real, source.split), source.path)) != source.path:
            raise UserError(
                f"{first} and {source.path} are the same data",
                "Name it once, and let its rows count more often by weight.",
            )
        settings = data.for_source(source)
        found.append(
            find(source.path, "data.train", data=settings, split=source.split, counts=counts)
        )
    limits = [source.max_rows for source in data.list_sources()]
    known = [
        count if most is None or count is None else min(count, most)
        for count, most in zip(counts, limits, strict=True)
    ]
    num_rows = sum(count for count in known if count is not None)
    wanted = data.held_out.count(num_rows) if data.held_out is not None else 0
    if None not in known and wanted >= num_rows:
        raise UserError(
            f"{wanted:,} rows are to be held out for evaluation, but the training data has only "
            f"{num_rows:,}",
            "Hold out fewer rows, or give a file for evaluation.",
        )
    return tuple(found)


def known_model(services: Services, spec: RunSpec) -> ModelFolder | None:
    """Return this PC's knowledge of a run's model, or None."""
    from agents.shared.models.folder import ModelFolder

    folder = find_folder(spec.model)
    if folder is not None:
        return services.models.inspect(folder)
    with contextlib.suppress(UserError):
        found = services.configs.find_here(spec.model)
        return ModelFolder(config=found.config) if found is not None else None
    return None


def require_model(services: Services, spec: RunSpec) -> None:
    """Refuse a model with a problem that this PC knows.

    Raises:
        UserError: its folder, or the config of its hub id, cannot be trained.
    """
    # Imported on use: commands that do not need it start sooner.
    from agents.shared.models.config_findings import find_config_problems
    from agents.shared.models.folder import ModelFolder

    if find_folder(spec.model) is not None:
        require_whole(spec.model, services.models, spec)
        return
    found = services.configs.find_here(spec.model)
    if found is not None:  # else the nodes have or download it
        problems = tuple(find_config_problems(found.config))
        require_usable(spec.model, ModelFolder(config=found.config, findings=problems), spec)


async def require_models_there(
    services: Services, spec: RunSpec, inputs: Inputs, nodes: Sequence[str]
) -> None:
    """Check a model that is used in place on each node.

    Raises:
        UserError: a node's model cannot be trained; the message names both.
    """
    if inputs.model.destination is not None:
        return
    request = InspectModel(model=inputs.model.value, spec=spec)
    answers = await asyncio.gather(*(services.pool.agent(node).ask(request) for node in nodes))
    for node, answer in zip(nodes, answers, strict=True):
        refuse(answer.refusals, node)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInputs:
    """Paths of a run's model and data on one node."""

    model: str
    train: str
    eval: str | None
    more: tuple[str, ...] = ()
    has_parts: bool = False
    """True if the node has only the files of its layers."""
    shared: tuple[SharedPlace, ...] = ()
    """Those of these paths that are on a share."""


def recall_inputs(services: Services, run: RunRecord) -> Inputs:
    """Return the model and data of the run's first launch, or find them for the first time.

    A resume must train on the data of the start: a file edited since then is another data set.
    Files that the nodes hold need not exist here any more. Waits for the answer of file servers, so
    do not call it on the event loop.

    Raises:
        UserError: a file server does not answer, or the inputs cannot be found, or only nodes say
            what they are.
    """
    for attempt in services.runs.store.attempts(run.run_id):
        if attempt.inputs:
            inputs = from_wire(Inputs, attempt.inputs)
            # Checked first: planning reads the files, and would wait forever for a dead server.
            require_answer(one.root for one in inputs.named().values() if one.root is not None)
            return inputs
    services.runs.require_trusted(run)
    return find_inputs(services, run.spec)


async def send_inputs(
    services: Services,
    nodes: Sequence[str],
    inputs: Inputs,
    report: OnMessage = lambda line: None,
    plan: LaunchPlan | None = None,
    patience_s: float = 0.0,
) -> dict[str, NodeInputs]:
    """Send model and data to all nodes at once; return the paths there.

    Files that several nodes need leave this PC once: the nodes forward them to each other.

    Args:
        services: stores and nodes.
        nodes: nodes to send to.
        inputs: sources.
        report: callback with the progress of large transfers.
        plan: gives a node of a pipeline only the files of its layers; None for all files.
        patience_s: time for which a lost connection is tried again, in seconds; what is complete
            is not sent twice.

    Raises:
        UserError: a disk is full, or a node was lost.
    """
    first_s = math.inf
    while True:
        began_s = time.monotonic()
        try:
            return await _send_all(services, nodes, inputs, report, plan)
        except BadAnswer:
            raise  # a bug or a lie, which another try would repeat
        except NodeUnreachable as error:
            # Counted anew after each stretch in which the files made progress.
            now_s = time.monotonic()
            first_s = now_s if now_s - began_s > patience_s else min(first_s, now_s)
            if not patience_s:
                raise
            if now_s - first_s >= patience_s:
                raise NodeUnreachable(
                    f"{error.message.rstrip('.')}; it did not come back within "
                    f"{show_duration(patience_s)}, while files were sent",
                    "Check that PC and its network, then start again: what is complete there is "
                    "not sent twice.",
                    where=error.where,
                ) from error
            left = show_duration(patience_s - (now_s - first_s))
            report(f"{error.message.rstrip('.')}; sending is tried again for up to {left}")
            await asyncio.sleep(RETRY_S)


async def _send_all(
    services: Services,
    nodes: Sequence[str],
    inputs: Inputs,
    report: OnMessage,
    plan: LaunchPlan | None,
) -> dict[str, NodeInputs]:
    # Late: lists of runs copy no models, and start sooner.
    from app.runs.inputs.hub_models import spread_hub_model

    await spread_hub_model(services, nodes, inputs.model, report)
    places = await find_places(services, nodes, inputs.named(), report)
    wanted = {node: await _choose_sources(services, node, inputs, plan, places) for node in nodes}
    if len(nodes) > 1:
        sent = {node: list(sources.values()) for node, sources in wanted.items()}
        for note in await services.pool.share(sent, say_transfers(report, "sending files")):
            report(note)
    answers = await asyncio.gather(
        *(_send_to(services, node, inputs, report, wanted[node], places) for node in nodes),
        return_exceptions=True,
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return {n: a for n, a in zip(nodes, answers, strict=True) if isinstance(a, NodeInputs)}


async def _choose_sources(
    services: Services, node: str, inputs: Inputs, plan: LaunchPlan | None, places: Places
) -> dict[str, Source]:
    """Return the sources that a node needs, by name."""
    needed = {what: one for what, one in inputs.named().items() if (node, what) not in places}
    if MODEL in needed:
        needed[MODEL] = await _choose_files(services, node, inputs.model, plan)
    return needed


async def _send_to(
    services: Services,
    node: str,
    inputs: Inputs,
    report: OnMessage,
    sources: dict[str, Source],
    places: Places,
) -> NodeInputs:
    used = {what: place for (name, what), place in places.items() if name == node}
    paths = {what: place.path for what, place in used.items()}
    for what, source in sources.items():
        paths[what] = await _push(services, node, source, report, what, is_model=what == MODEL)
    return NodeInputs(
        has_parts=sources.get(MODEL, inputs.model) is not inputs.model,
        model=paths[MODEL],
        train=paths[TRAIN],
        eval=paths.get(EVAL),
        more=tuple(paths[name_source(place + 2)] for place in range(len(inputs.more))),
        shared=tuple(used.values()),
    )


async def _choose_files(
    services: Services, node: str, model: Source, plan: LaunchPlan | None
) -> Source:
    """Return the files of the model that a node needs: all of them, or those of its stages."""
    from app.library.model_parts import choose_parts  # late: lists read no model files

    cut = plan.forecast.cut if plan is not None else None
    if plan is None or cut is None or not cut.stages or model.destination is None:
        return model
    stages = [cut.stages[place.rank] for place in plan.ranks if place.node == node]
    parts = await asyncio.to_thread(choose_parts, model, stages, cut.num_layers)
    if parts is model:
        return model
    # An earlier run with the whole model on every rank may have left it there.
    whole = await services.pool.agent(node).ask(
        CompareBundle(destination=model.destination, files=tuple(model.files))
    )
    return model if whole.complete else parts


async def send(
    services: Services,
    node: str,
    source: Source,
    report: OnMessage = lambda line: None,
    what: str = "files",
    *,
    is_model: bool = False,
) -> str:
    """Send one source to a node that cannot use it in place; return the path there.

    Args:
        services: stores and nodes.
        node: node to send to.
        source: model or data.
        report: callback with the progress of a large source.
        what: name of the source in these sentences.
        is_model: True for a model, of which the node may have a copy under its hub id.

    Raises:
        UserError: a disk is full, or a file has changed and the node has no earlier copy.
    """
    places = await find_places(services, (node,), {what: source}, report)
    if (node, what) in places:
        return places[node, what].path
    return await _push(services, node, source, report, what, is_model=is_model)


async def _push(
    services: Services, node: str, source: Source, report: OnMessage, what: str, *, is_model: bool
) -> str:
    # A hub id or a path on the node: there is nothing to send.
    if source.destination is None:
        from app.runs.inputs.hub_models import find_path  # late: lists of runs copy no models

        return await find_path(services, node, source.value) if is_model else source.value
    is_large = sum(file.size_bytes for file in source.files) >= REPORTED_BYTES
    progress = say_bytes(report, f"sending {what} to {node}") if is_large else None
    try:
        return source.path_on_node(await services.pool.push(node, source, progress))
    except NodeUnreachable:
        raise  # its files are unknown
    except UserError as error:
        # A changed file makes the push fail, so look for one before blaming the disk.
        changed = await asyncio.to_thread(_find_changed, services.hashes, source)
        if changed is None:
            raise
        raise UserError(
            f"{changed} has changed since the run started, and {node} has no earlier copy",
            "Restore the file, or start a new run.",
        ) from error


def _find_changed(hashes: HashStore, source: Source) -> Path | None:
    """Return the first file whose hash differs from the source's, or None if all match."""
    for entry in source.files:
        path = Path(source.root or "", entry.path)
        try:
            if entry.path in source.cleaned:
                clean = without_code(path.read_bytes())
                found = None if clean is None else hashlib.sha256(clean).hexdigest()
            else:
                found = hashes.sha256(path)
            if found != entry.sha256:
                return path
        except OSError:
            continue  # the push has reported that it is missing
    return None
