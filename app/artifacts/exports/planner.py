"""Forecast an export from the known facts of a run's model and of the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from agents.contract.formats import EXPORTS, METHODS, choose_group
from agents.contract.node import NodeFacts
from agents.contract.requests.node import ReadFacts
from agents.shared.models.export_support import find_left_wide, find_refusal
from app.artifact import ArtifactSnapshot
from app.artifacts.estimates.cost import forecast_phases
from app.artifacts.estimates.forecast import ArtifactForecast, forecast_artifact
from app.artifacts.estimates.learning import ExportFactors, ExportOutcome, find_factors, maker_of
from app.artifacts.estimates.plan import (
    ExportNode,
    ExportPlan,
    PlacePlan,
    is_too_large,
    lacks_memory,
    plan_place,
    sort_places,
)
from app.artifacts.estimates.texts import size_texts
from app.artifacts.estimates.work import Bench, PhaseForecast
from app.artifacts.exports.device import choose_export_device
from app.artifacts.exports.request import ExportRequest
from app.errors import RacklessError, UserError
from app.forecasts.planner import find_data_size
from app.library.models import weigh_weights
from app.planning.hardware.cluster import make_cluster
from app.planning.hardware.rates import find_rates
from app.planning.shape.model_shape import ModelShape, read_shape
from app.provisioning.environment import python_of
from app.runs.checkpoints import Copy
from app.runs.services import Services

_VALUE_BYTES = {"float64": 8.0, "float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_USUAL_VALUE_BYTES = 2.0
# RAM that the system itself always uses, in bytes.
_SYSTEM_RAM_BYTES = 1 << 30


async def plan_export(
    services: Services, request: ExportRequest, copies: Sequence[Copy]
) -> ExportPlan:
    """Return the sizes of an export, its costs on each node, and the obstacles.

    Args:
        request: the request, whose node is ignored: all nodes are planned.
        copies: checkpoints to choose among.
    """
    run, to, types = services.runs.get(request.run_id), request.to, request.types
    services.runs.require_trusted(run)
    checkpoint, engine = request.checkpoint, request.engine
    names = services.pool.names()
    usable = [copy for copy in copies if not copy.broken]
    steps = {copy.info.step for copy in usable if checkpoint in (None, copy.info.step)}
    step = max(steps, default=None)
    holders = {copy.node for copy in usable if copy.info.step == step}
    refusal = await asyncio.to_thread(_find_refusal, services, run.spec.model, to, engine)
    shape, value_bytes = await asyncio.to_thread(_find_shape, services, run.spec.model)
    data, _ = await asyncio.to_thread(find_data_size, services.planning, run.spec)
    texts = size_texts(data.num_rows, data.mean_tokens, data.longest_tokens)
    made = (
        None
        if shape is None
        else forecast_artifact(shape, to, types, value_bytes, texts=texts, engine=engine)
    )
    places = await asyncio.gather(
        *(_look(services, one, holders, to, types, refusal) for one in names)
    )
    outcomes = read_outcomes(await asyncio.to_thread(services.artifacts.all))
    adapter = run.spec.adapter
    targets = None if adapter.kind == "full" else adapter.targets

    def forecast(bench: Bench) -> tuple[PhaseForecast, ...]:
        if shape is None or made is None:
            return ()
        return forecast_phases(shape, to, types, made, bench, texts, targets, engine)

    plans = [
        _plan_proof(place, made, forecast, find_factors(outcomes, place.node, maker_of(to, engine)))
        for place in places
    ]
    left_wide = await asyncio.to_thread(_find_left_wide, services, run.spec.model, to)
    places_found = sort_places(plans)
    return ExportPlan(
        to=to, types=types, step=step, made=made, places=places_found, left_wide=left_wide
    )


def _plan_proof(
    place: ExportNode,
    made: ArtifactForecast | None,
    forecast: Callable[[Bench], tuple[PhaseForecast, ...]],
    factors: ExportFactors,
) -> PlacePlan:
    """Return the costs on a node; a result too large for its memory is verified from the disk."""
    packed = plan_place(place, made, forecast(place.bench), factors)
    if made is None or not made.unpacked_bytes or place.problem:
        return packed
    if not (is_too_large(made, place.bench) or lacks_memory(place, packed)):
        return packed
    small = replace(place, bench=replace(place.bench, holds_result=False))
    found = plan_place(small, made, forecast(small.bench), factors)
    is_less = (found.ram_bytes, found.vram_bytes) != (packed.ram_bytes, packed.vram_bytes)
    return found if is_less else packed  # unpacking does not help if another phase needs as much


def read_outcomes(artifacts: Sequence[ArtifactSnapshot]) -> list[ExportOutcome]:
    """Return the ratios of measurements to forecasts of past exports."""
    found = []
    for artifact in artifacts:
        measured = artifact.measured or {}
        phases, expected = measured.get("phases") or (), measured.get("forecast") or ()
        # An export skips phases whose results exist from an earlier one; only common phases count.
        both = {phase["name"] for phase in phases} & {phase["name"] for phase in expected}
        done = [phase for phase in phases if phase["name"] in both]
        planned = [phase for phase in expected if phase["name"] in both]
        seconds = _ratio(sum(p["seconds"] for p in done), sum(p["seconds"] for p in planned))
        if seconds is not None:
            outcome = ExportOutcome(
                node=str(measured.get("node", "")),
                method=str(measured.get("maker") or artifact.format),
                ended_s=artifact.created_s,
                seconds_ratio=seconds,
                ram_ratio=_ratio(_peak(done, "ram_bytes"), _peak(planned, "ram_bytes")),
                vram_ratio=_ratio(_peak(done, "vram_bytes"), _peak(planned, "vram_bytes")),
            )
            found.append(outcome)
    return found


def keep_forecast(place: PlacePlan, maker: str) -> dict[str, Any]:
    """Return the part of a forecast that is stored with the measurements."""
    phases = [asdict(phase) for phase in place.plain]
    return {"node": place.node, "maker": maker, "forecast": phases}


def _ratio(measured: float, forecast: float) -> float | None:
    return measured / forecast if measured > 0 and forecast > 0 else None


def _peak(phases: Sequence[Mapping[str, Any]], name: str) -> int:
    return max((int(phase.get(name) or 0) for phase in phases), default=0)


def _find_left_wide(services: Services, model: str, to: str) -> str:
    """Return a sentence on parts left in 16 bits; empty: none, or the config is not known here."""
    found = services.configs.find_here(model)
    return "" if found is None else find_left_wide(found.config, to) or ""


def _find_refusal(services: Services, model: str, to: str, engine: str) -> str:
    """Return why a model cannot have a format, as far as its config is known; empty: it can."""
    found = services.configs.find_here(model) if to != "merged" else None
    if found is None or "model_type" not in found.config:
        return ""
    if reason := find_refusal(found.config, to, engine):
        return f"cannot make it: {reason}"
    if not EXPORTS[to].calibrated:
        return ""
    try:
        choose_group(found.config, to)
    except ValueError as error:
        return f"cannot make it: {error}"
    return ""


def _find_shape(services: Services, model: str) -> tuple[ModelShape | None, float]:
    """Return the shape of a model, None if not known, and the bytes of one of its values."""
    found = services.configs.find_here(model)
    if found is None:
        return None, _USUAL_VALUE_BYTES
    try:
        shape = read_shape(found.config)
    except UserError:  # the planner does not know the architecture, but the export may
        return None, _USUAL_VALUE_BYTES
    return shape, find_value_bytes(found.config, weigh_weights(model), shape.num_parameters)


def find_value_bytes(
    config: Mapping[str, Any], weights_bytes: int | None, num_parameters: int
) -> float:
    """Return the bytes of a value of the loaded model.

    Args:
        config: config of the model.
        weights_bytes: size of its files; None: they are not here. It decides if the config names
            no type, since loading then keeps the type of the files.
        num_parameters: number of parameters in those files.

    >>> find_value_bytes({"torch_dtype": "float32"}, None, 1), find_value_bytes({}, None, 1)
    (4.0, 2.0)
    >>> find_value_bytes({}, 4_001_000, 1_000_000)
    4.0
    """
    text = config.get("text_config")
    for about in (config, text if isinstance(text, Mapping) else {}):
        named = str(about.get("dtype") or about.get("torch_dtype") or "")
        if (known := _VALUE_BYTES.get(named.removeprefix("torch."))) is not None:
            return known
    if weights_bytes is not None and weights_bytes > 3 * num_parameters:
        return 4.0  # more than 3 bytes per value: the files hold float32
    return _USUAL_VALUE_BYTES


async def _look(
    services: Services, node: str, holders: set[str], to: str, types: Sequence[str], refusal: str
) -> ExportNode:
    if refusal:
        return ExportNode(node=node, bench=Bench(is_gpu=False), problem=refusal)
    try:
        facts = await services.pool.agent(node).ask(ReadFacts())
    except RacklessError as error:
        return ExportNode(node=node, bench=Bench(is_gpu=False), problem=f"does not answer: {error}")
    problem = "" if node in holders else "has no complete copy of the checkpoint"
    try:
        python_of(node, facts)
    except UserError as error:
        problem = problem or error.message
    row, chosen = EXPORTS[to], choose_export_device(facts)
    is_built = row.converted_types and not set(types) <= set(row.converted_types)
    if not problem and is_built and facts.compiler is None:
        problem = "has no C++ compiler, which the K types need"
    if not problem and row.needs_gpu and chosen.gpu is None:
        problem = f"has no free GPU, which {row.name} needs"
    return ExportNode(
        node=node,
        bench=_bench(services, node, replace(facts, gpus=(chosen.gpu,) if chosen.gpu else ())),
        disk_free_bytes=facts.disk_free_bytes,
        problem=problem,
        note=chosen.note if to in METHODS else "",  # a merge runs on the CPU in any case
    )


def _bench(services: Services, node: str, facts: NodeFacts) -> Bench:
    """Return the capabilities of the only GPU in the facts, or of the CPU without one."""
    known = services.planning.calibrations()
    calibrations = {(name, found.card): found for (name, _), found in known.items()}
    (planned,) = make_cluster({node: facts}, calibrations=calibrations).nodes
    gpu = planned.gpus[0]
    rates = find_rates(gpu)
    is_gpu = gpu.device != "cpu"
    vram = gpu.memory_bytes if is_gpu else None
    return Bench(
        is_gpu=is_gpu,
        num_cores=facts.num_cores or 4,
        flops_per_s=rates.matrix_flops_per_s,
        memory_bytes_per_s=rates.copy_bytes_per_s,
        vram_bytes=None if vram is None else max(0, vram - gpu.desktop_bytes),
        ram_bytes=_find_ram(facts),
    )


def _find_ram(facts: NodeFacts) -> int | None:
    """Return the RAM that is available to an export, in bytes; None: not known."""
    if facts.memory_available_bytes is not None:
        return facts.memory_available_bytes
    return None if facts.memory_bytes is None else max(0, facts.memory_bytes - _SYSTEM_RAM_BYTES)
