"""Turn a checkpoint into a model folder on this PC.

The work runs on a node that holds the checkpoint, because the weights and torch are there: the
adapter is merged into its base, and what is to be smaller is quantized and proved there. The result
is fetched beside its destination, checked, and put in place with one rename.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from agents.contract.artifacts import MakeJob, MergeJob, Origin, PackagesBuild, TextSource
from agents.contract.formats import ENGINES, FORMATS, METHODS, TYPES, USUAL_TYPES, Engine, Method
from app.artifacts.estimates.forecast import describe_forecast
from app.artifacts.estimates.learning import maker_of
from app.artifacts.estimates.plan import ExportPlan, describe_place
from app.artifacts.exports.device import ExportDevice, choose_export_device
from app.artifacts.exports.place import claim_place, expect_room, free_place
from app.artifacts.exports.planner import keep_forecast, plan_export
from app.artifacts.record import record_export
from app.errors import RacklessError, UsageError, UserError
from app.events import Exported
from app.library.bundles import Source
from app.library.calibration import find_calibration
from app.library.licence import find_licence
from app.provisioning.environment import python_of, read_lock
from app.runs.checkpoints import Copy, find_copies
from app.runs.export_claims import claim_name
from app.runs.inputs import Inputs, recall_inputs, send
from app.runs.lifecycle.resume import choose_checkpoint
from app.runs.node_pool import NodeAgent
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import show_list

_LOCKS = {"gguf": "gguf", "awq": "gptqmodel", "gptq": "gptqmodel"}
"""Method -> the lock of the packages that it needs beside the training environment."""
Progress = Callable[[str], None]


async def export_run(
    services: Services,
    run_id: str,
    to: str,
    out: Path,
    checkpoint: int | None = None,
    progress: Progress | None = None,
    *,
    types: Sequence[str] = (),
    node: str | None = None,
    calibration: Path | None = None,
    engine: Engine = "gptqmodel",
) -> Exported:
    """Write the run's model as a folder `out`; return it with what was measured of it.

    Args:
        to: one of `agents.contract.formats.FORMATS`.
        types: of `agents.contract.formats.TYPES`; none: the usual one.
        node: does the work; None: the first with the checkpoint and the room.
        calibration: data file on this PC that AWQ and GPTQ are fitted to; None: the run's own.
        engine: what makes AWQ.

    Raises:
        UserError: `out` is in use, also by another export, or cannot take it, there is no whole
            checkpoint to export, or the node could not make it.
    """
    tell = progress or (lambda text: None)
    types = choose_types(to, types)
    _expect_engine(to, engine)
    out = await asyncio.to_thread(free_place, out)
    with claim_place(services, out):
        return await _export(
            services, run_id, to, out, checkpoint, tell, types, node, calibration, engine
        )


async def _export(
    services: Services,
    run_id: str,
    to: str,
    out: Path,
    checkpoint: int | None,
    tell: Progress,
    types: tuple[str, ...],
    node: str | None,
    calibration: Path | None,
    engine: Engine,
) -> Exported:
    run = services.book.get(run_id)
    inputs = await asyncio.to_thread(recall_inputs, services, run)
    own = await asyncio.to_thread(_find_calibration, services, to, calibration)
    tell("looking for the newest whole checkpoint")
    names = services.cluster.names() if node is None else (node,)
    whole = await find_whole(services, run_id, names, checkpoint)
    plan = await plan_export(services, run, to, types, checkpoint, whole, engine)
    await asyncio.to_thread(expect_room, plan, out)
    copy = _choose_place(plan, whole, tell)
    facts = await services.cluster.agent(copy.node).facts()
    agent = services.cluster.agent(copy.node)
    python = python_of(copy.node, facts)
    origin = await asyncio.to_thread(origin_of, run, copy.info.step)
    with claim_name(services, run_id, _name_result(to, copy.info.step, types, engine)) as name:
        tell(f"merging step {copy.info.step} on {copy.node}")
        exported = await agent.export_merged(
            MergeJob(
                run_id=run_id,
                step=copy.info.step,
                python=python,
                model_path=await send(services, copy.node, inputs.model, tell, "the model"),
                destination=f"runs/{run_id}/exports/merged-{copy.info.step}",
            ),
            tell,
        )
        made = exported.path
        if to in METHODS:
            device = await _expect_device(services, copy.node, choose_export_device(facts))
            made = await _make(
                services, run, inputs, copy, python, device, made, name, origin, to, types, tell,
                own, engine,
            )  # fmt: skip
        tell(f"fetching it from {copy.node}")
        try:
            await services.cluster.fetch(copy.node, made, out)
        finally:
            if made != exported.path:  # the merged model stays, for the next format
                with suppress(RacklessError):
                    await agent.delete_artifact(made)
    services.book.add_event(run_id, "exported", f"step {copy.info.step} exported to {out} as {to}")
    chosen = next(place for place in plan.places if place.node == copy.node)
    measured = keep_forecast(chosen, maker_of(to, engine))
    made_of = await asyncio.to_thread(record_export, services, out, to, types, origin, measured)
    return Exported(path=out, artifact=made_of.label, verdicts=made_of.verdicts)


async def foretell_export(
    services: Services,
    run_id: str,
    to: str,
    checkpoint: int | None = None,
    *,
    types: Sequence[str] = (),
    node: str | None = None,
    calibration: Path | None = None,
    engine: Engine = "gptqmodel",
) -> ExportPlan:
    """Return what an export that is asked for as of `export_run` would take.

    Raises:
        UserError: there is no such run, format, type, node or data file.
    """
    types = choose_types(to, types)
    _expect_engine(to, engine)
    run = services.book.get(run_id)
    _expect_nodes(services, () if node is None else (node,))
    await asyncio.to_thread(_find_calibration, services, to, calibration)
    there = None if node is None else await find_copies(services, run.run_id, (node,))
    plan = await plan_export(services, run, to, types, checkpoint, there, engine)
    places = tuple(one for one in plan.places if node in (None, one.node))
    return replace(plan, places=places)


def _expect_engine(to: str, engine: Engine) -> None:
    if engine != ENGINES[0] and to != "awq":
        raise UsageError(f"{engine} makes awq, and not {to}", "Leave --engine out.")


def _expect_nodes(services: Services, names: Sequence[str]) -> None:
    for name in names:
        if name not in services.cluster.names():
            raise UsageError(f"there is no node {name}", "Look at them: rackless nodes list")


def origin_of(run: RunRecord, step: int) -> Origin:
    """Return where the model of a checkpoint comes from. Reads the base's card."""
    spec = run.spec
    return Origin(
        base=spec.model,
        data=spec.data.train,
        run_id=run.run_id,
        run_name=run.name,
        step=step,
        licence=find_licence(spec.model),
    )


def _name_result(to: str, step: int, types: Sequence[str], engine: Engine) -> str:
    return "-".join((to, str(step), *types, *((engine,) if engine != ENGINES[0] else ())))


async def _make(
    services: Services,
    run: RunRecord,
    inputs: Inputs,
    copy: Copy,
    python: str,
    device: ExportDevice,
    merged: str,
    name: str,
    origin: Origin,
    to: str,
    types: tuple[str, ...],
    tell: Progress,
    own: Source | None,
    engine: Engine,
) -> str:
    """Quantize the merged model on the node that has it; return the folder `name` there."""
    agent = services.cluster.agent(copy.node)
    packages = await bring_packages(agent, python, to, tell, engine)
    spec = run.spec
    train = TextSource(
        path=await send(services, copy.node, inputs.train, tell, "the training data"),
        format=spec.data.format,
        objective=spec.objective,
    )
    evaluation = None
    if inputs.eval is not None:
        evaluation = replace(train, path=await send(services, copy.node, inputs.eval))
    calibration = None
    if own is not None:  # of any kind: what its rows are is seen there
        calibration = TextSource(path=await send(services, copy.node, own))
    job = MakeJob(
        python=python,
        packages=packages,
        model=merged,
        method=cast(Method, to),
        destination=f"runs/{origin.run_id}/exports/{name}",
        origin=origin,
        train=train,
        evaluation=evaluation,
        calibration=calibration,
        types=types,
        engine=engine,
        device=device.device,
        device_id=device.device_id,
    )
    tell(f"making {' and '.join(types) or to} on {copy.node}")
    return (await agent.export_made(job, tell)).path


async def _expect_device(services: Services, node: str, planned: ExportDevice) -> ExportDevice:
    """Return what makes the export after all; the merge has taken its time.

    Raises:
        UserError: runs have taken every GPU since it was planned for one.
    """
    now = choose_export_device(await services.cluster.agent(node).facts())
    if planned.gpu is not None and now.gpu is None:
        raise UserError(
            f"every GPU of {node} was taken during the merge: {now.note.partition(',')[0]}",
            "Export again once one is free, or at once on the CPU: what is merged stays there.",
        )
    return now


async def bring_packages(
    agent: NodeAgent, python: str, to: str, tell: Progress, engine: Engine = "gptqmodel"
) -> str | None:
    """Return the folder on the node with what a method needs; None: the environment has it all."""
    if to not in _LOCKS:
        return None
    lock = read_lock("autoawq" if engine == "autoawq" else _LOCKS[to])
    report = await agent.build_packages(
        PackagesBuild(
            python=python,
            lock_sha256=lock.sha256,
            lock_text=lock.text,
            requirements=lock.requirements,
        ),
        tell,
    )
    return report.path


def _choose_place(plan: ExportPlan, whole: Sequence[Copy], tell: Progress) -> Copy:
    """Return the copy on the node where the export is made the soonest.

    Raises:
        UserError: it can be made on none of them.
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
    )


def _find_calibration(services: Services, to: str, path: Path | None) -> Source | None:
    if path is None:
        return None
    if to not in ("awq", "gptq"):
        raise UsageError(f"{to} is not calibrated", "Leave --calibration out.")
    return find_calibration(path, services.hashes)


def choose_types(to: str, types: Sequence[str]) -> tuple[str, ...]:
    """Return the types as the format spells them, the usual one where none is given.

    Raises:
        UsageError: there is no such format or type.
    """
    if to not in FORMATS:
        raise UsageError(f"{to} is no export format", f"Use one of {', '.join(FORMATS)}.")
    offered = TYPES.get(to, ())
    known = {kind.lower(): kind for kind in offered}
    unknown = [kind for kind in types if kind.lower() not in known]
    if unknown:
        hint = f"Use one of {', '.join(offered)}." if offered else "Leave --type out."
        raise UsageError(f"{to} has no type {unknown[0]}", hint)
    chosen = tuple(dict.fromkeys(known[kind.lower()] for kind in types))
    if to == "gptq" and len(chosen) > 1:
        raise UsageError("gptq makes one type at a time", "Export twice, to two folders.")
    return chosen or USUAL_TYPES.get(to, ())


async def find_whole(
    services: Services, run_id: str, nodes: Sequence[str], checkpoint: int | None = None
) -> tuple[Copy, ...]:
    """Return the copies of the newest whole checkpoint, or of one that is named, on some nodes.

    Raises:
        UserError: there is none, or no such node.
    """
    _expect_nodes(services, nodes)
    copies = await find_copies(services, run_id, nodes)
    good = await choose_checkpoint(services, run_id, copies, checkpoint)
    if not good:
        raise UserError(
            f"run {run_id} has no whole checkpoint on the nodes that answer",
            "Look at them with: rackless checkpoints " + run_id,
        )
    return good
