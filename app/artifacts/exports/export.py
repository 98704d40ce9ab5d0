"""Export a checkpoint as a model folder on this PC.

The work runs on a node that holds the checkpoint, since the weights and torch are there: the
adapter is merged into its base, and for a smaller format the model is quantized and its quality
measured. The result is fetched next to its destination, verified, and moved there by one rename.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from agents.contract.formats import ENGINES, EXPORTS, METHODS, Engine, Method
from agents.contract.messages import Progress
from agents.contract.requests.environment import PackagesBuild
from agents.contract.requests.exports import MakeJob, MergeJob, Origin, TextSource
from agents.contract.requests.node import ReadFacts
from agents.contract.requests.runs import DeleteArtifact
from agents.contract.spec import DataSpec, RunSpec
from app.artifacts.estimates.forecast import describe_forecast
from app.artifacts.estimates.learning import maker_of
from app.artifacts.estimates.plan import ExportPlan, describe_place
from app.artifacts.exports.device import ExportDevice, choose_export_device
from app.artifacts.exports.place import claim_place, expect_room, free_place
from app.artifacts.exports.planner import keep_forecast, plan_export
from app.artifacts.exports.request import ExportRequest, check_request
from app.artifacts.record import record_export
from app.errors import RacklessError, UsageError, UserError
from app.events import ExportedModel
from app.library.bundles import Source
from app.library.calibration import find_calibration
from app.library.licence import find_licence
from app.nodes.shared_homes import require_own_homes
from app.progress import OnMessage, OnProgress, messages
from app.provisioning.environment import python_of, read_lock
from app.runs.checkpoints import Copy, find_copies
from app.runs.export_claims import claim_export, claim_name
from app.runs.inputs.run_inputs import Inputs, recall_inputs, send
from app.runs.lifecycle.launch_order import take_order, unless_stopped
from app.runs.lifecycle.start_point import choose_checkpoint, find_genuine
from app.runs.nodes.node_pool import NodeAgent
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import show_list


async def export_run(
    services: Services, request: ExportRequest, out: Path, progress: OnProgress | None = None
) -> ExportedModel:
    """Write the run's model as a folder `out`; return it with its measured quality.

    Raises:
        UserError: `out` exists, is used by another export or cannot be written, there is no whole
            checkpoint to export, or the node could not make it.
    """
    request = check_request(request)
    # Before any node works, so that an hour of quantizing never ends at a read-only folder.
    out = await asyncio.to_thread(free_place, out)
    run_id = services.runs.get(request.run_id).run_id
    with claim_export(services, run_id), claim_place(services, out):
        order = take_order(services, run_id, request.asked_s)
        order.phase = "was exported"
        async with unless_stopped(services, order):
            return await _export(services, request, out, progress or (lambda update: None))


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExportWork:
    """One export on its chosen node."""

    run: RunRecord
    request: ExportRequest
    inputs: Inputs
    own: Source | None
    """Calibration data that the user chose; None: the run's own data."""
    node: str
    python: str
    device: ExportDevice
    step: int
    progress: OnProgress

    def folder(self, name: str) -> str:
        return f"runs/{self.run.run_id}/exports/{name}"


async def _export(
    services: Services, request: ExportRequest, out: Path, progress: OnProgress
) -> ExportedModel:
    run = services.runs.get(request.run_id)
    inputs = await asyncio.to_thread(recall_inputs, services, run)
    # Checked now although it is sent much later, so that a bad file fails in the first second.
    own = await asyncio.to_thread(_find_calibration, services, request)
    tell = _in_phase(progress, "find")
    tell("searching for the newest whole checkpoint")
    names = services.pool.names() if request.node is None else (request.node,)
    whole = await find_whole(services, run.run_id, names, request.checkpoint)
    plan = await plan_export(services, request, whole)
    await asyncio.to_thread(expect_room, plan, out)
    copy = _choose_place(plan, whole, tell)
    facts = await services.pool.agent(copy.node).ask(ReadFacts())
    await require_own_homes({copy.node: services.pool.agent(copy.node)}, {copy.node: facts})
    work = _ExportWork(
        run=run,
        request=request,
        inputs=inputs,
        own=own,
        node=copy.node,
        python=python_of(copy.node, facts),
        device=choose_export_device(facts),
        step=copy.info.step,
        progress=progress,
    )
    origin = await asyncio.to_thread(origin_of, run, work.step)
    await _make(services, work, origin, out)
    text = f"step {work.step} exported to {out} as {request.to}"
    services.runs.add_event(run.run_id, "exported", text)
    chosen = next(place for place in plan.places if place.node == work.node)
    measured = keep_forecast(chosen, maker_of(request.to, request.engine))
    made_of = await asyncio.to_thread(
        record_export, services, out, request.to, request.types, origin, measured
    )
    return ExportedModel(path=out, artifact=made_of.label, verdicts=made_of.verdicts)


async def _make(services: Services, work: _ExportWork, origin: Origin, out: Path) -> None:
    """Make the model on its node, and fetch it to `out`."""
    run_id, agent = work.run.run_id, services.pool.agent(work.node)
    with claim_name(services, run_id, _name_result(work.request, work.step)) as name:
        merged = await _merge(services, work)
        made = merged
        if work.request.to in METHODS:
            made = await _quantize(services, work, merged, name, origin)
        _in_phase(work.progress, "fetch")(f"fetching it from {work.node}")
        try:
            await services.pool.fetch(work.node, made, out)
        finally:
            if made != merged:  # the merged model stays for exports to other formats
                with suppress(RacklessError):
                    await agent.ask(DeleteArtifact(path=made))


async def _merge(services: Services, work: _ExportWork) -> str:
    """Merge the adapter into its base on the node; return the folder there."""
    tell = _in_phase(work.progress, "merge")
    tell(f"merging step {work.step} on {work.node}")
    job = MergeJob(
        run_id=work.run.run_id,
        step=work.step,
        python=work.python,
        model_path=await send(
            services, work.node, work.inputs.model, tell, "the model", is_model=True
        ),
        destination=work.folder(f"merged-{work.step}"),
    )
    agent = services.pool.agent(work.node)
    return (await agent.ask(job, work.progress)).path


def _in_phase(progress: OnProgress, phase: str) -> OnMessage:
    return lambda message: progress(Progress(phase=phase, message=message))


async def forecast_export(services: Services, request: ExportRequest) -> ExportPlan:
    """Return the result of `export_run` for this request, and its costs on each node.

    Raises:
        UserError: there is no such run, format, type, node or data file.
    """
    request = check_request(request)
    node, run = request.node, services.runs.get(request.run_id)
    _expect_nodes(services, () if node is None else (node,))
    await asyncio.to_thread(_find_calibration, services, request)
    names = services.pool.names() if node is None else (node,)
    there = await find_copies(services, run.run_id, names)
    plan = await plan_export(services, request, there)
    places = tuple(place for place in plan.places if node in (None, place.node))
    return replace(plan, places=places)


def _expect_nodes(services: Services, names: Sequence[str]) -> None:
    for name in names:
        if name not in services.pool.names():
            raise UsageError(f"there is no node {name}", "List them: rackless nodes list")


def origin_of(run: RunRecord, step: int) -> Origin:
    """Return the origin of a checkpoint's model. Reads the base model's card."""
    spec = run.spec
    return Origin(
        base=spec.model,
        data=", ".join(source.path for source in spec.data.list_sources()),
        run_id=run.run_id,
        run_name=run.name,
        step=step,
        licence=find_licence(spec.model),
    )


def _name_result(request: ExportRequest, step: int) -> str:
    engine = (request.engine,) if request.engine != ENGINES[0] else ()
    return "-".join((request.to, str(step), *request.types, *engine))


async def _quantize(
    services: Services, work: _ExportWork, merged: str, name: str, origin: Origin
) -> str:
    """Quantize the merged model on its node; return the folder `name` there."""
    request, inputs, node = work.request, work.inputs, work.node
    device = await _expect_device(services, node, work.device)
    tell = _in_phase(work.progress, "prepare")
    agent = services.pool.agent(node)
    packages = await bring_packages(agent, work.python, request.to, tell, request.engine)
    spec = work.run.spec
    train = []
    for source, found in zip(spec.data.list_sources(), (inputs.train, *inputs.more), strict=True):
        path = await send(services, node, found, tell, "the training data")
        train.append(_describe_texts(spec, spec.data.for_source(source), path, source.split))
    evaluation = None
    if inputs.eval is not None:
        path = await send(services, node, inputs.eval)
        evaluation = _describe_texts(spec, spec.data, path)
    calibration = None
    if work.own is not None:  # in any format, which the node recognizes
        calibration = TextSource(path=await send(services, node, work.own))
    job = MakeJob(
        python=work.python,
        packages=packages,
        model=merged,
        method=cast(Method, request.to),
        destination=work.folder(name),
        origin=origin,
        train=train[0],
        more=tuple(train[1:]),
        evaluation=evaluation,
        calibration=calibration,
        types=request.types,
        engine=request.engine,
        device=device.device,
        device_id=device.device_id,
    )
    tell(f"making {' and '.join(request.types) or request.to} on {node}")
    return (await agent.ask(job, work.progress)).path


def _describe_texts(
    spec: RunSpec, data: DataSpec, path: str, split: str | None = None
) -> TextSource:
    return TextSource(
        path=path,
        format=data.format,
        objective=spec.objective,
        columns=data.columns,
        encoding=data.encoding,
        split=split,
    )


async def _expect_device(services: Services, node: str, planned: ExportDevice) -> ExportDevice:
    """Return the device that makes the export.

    Raises:
        UserError: a GPU was planned, but runs use every GPU by now.
    """
    # Chosen a second time, since a run may have started during the merge.
    now = choose_export_device(await services.pool.agent(node).ask(ReadFacts()))
    if planned.gpu is not None and now.gpu is None:
        raise UserError(
            f"every GPU of {node} was taken during the merge: {now.note.partition(',')[0]}",
            "Export again when a GPU is free, or now on the CPU; the merged model stays there.",
        )
    return now


async def bring_packages(
    agent: NodeAgent, python: str, to: str, tell: OnMessage, engine: Engine = "gptqmodel"
) -> str | None:
    """Return the folder on the node with a method's packages; None: the environment has them."""
    name = EXPORTS[to].lock
    if name is None:
        return None
    lock = read_lock("autoawq" if engine == "autoawq" else name)
    report = await agent.ask(
        PackagesBuild(
            python=python,
            lock_sha256=lock.sha256,
            lock_text=lock.text,
            requirements=lock.requirements,
        ),
        messages(tell),
    )
    return report.path


def _choose_place(plan: ExportPlan, whole: Sequence[Copy], tell: OnMessage) -> Copy:
    """Return the copy on the node that finishes the export first.

    Raises:
        UserError: no node with a copy can make it.
    """
    if plan.made is not None:
        tell(f"expected: {describe_forecast(plan.made)}")
    copies = {copy.node: copy for copy in whole}
    among = [place for place in plan.places if place.node in copies]
    for place in among:
        if not place.problems:
            tell(describe_place(place))
            return copies[place.node]
        tell(f"not on {place.node}: it {show_list(place.problems)}")
    why = "; ".join(f"{place.node} {show_list(place.problems)}" for place in among)
    raise UserError(
        f"this export cannot be made: {why}",
        "Free some room there, or choose a smaller type or another format.",
        topic="no-node-can-export",
    )


def _find_calibration(services: Services, request: ExportRequest) -> Source | None:
    if request.calibration is None:
        return None
    return find_calibration(Path(request.calibration), services.hashes)


async def find_whole(
    services: Services, run_id: str, nodes: Sequence[str], checkpoint: int | None = None
) -> tuple[Copy, ...]:
    """Return the copies of the newest complete checkpoint, or of a given one, on these nodes.

    Raises:
        UserError: there is no whole checkpoint, or no such node.
    """
    _expect_nodes(services, nodes)
    copies = await find_genuine(services, run_id, nodes, checkpoint)
    good = await choose_checkpoint(services, run_id, copies, checkpoint)
    if not good:
        raise UserError(
            f"run {run_id} has no whole checkpoint on the nodes that answer",
            "List them with: rackless checkpoints " + run_id,
        )
    return good
