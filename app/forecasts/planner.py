"""Gather the known facts about model, data and nodes, and make plans and forecasts of them.

All I/O happens here, so that `app.planning` is pure arithmetic. Guesses are listed among the plan's
assumptions. Shapes are cached while their config is unchanged, since the New run dialog plans at
every key press.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agents.contract.data import DataFinding
from agents.contract.messages import WireError, from_wire, to_wire
from agents.contract.node import Calibration, NodeFacts, Sample
from agents.contract.objectives import OBJECTIVES
from agents.contract.parallel import find_mode, refuse_parallel
from agents.contract.requests.models import ReadConfig
from agents.contract.run import RankPlacement
from agents.contract.spec import RunSpec
from agents.shared.models.config_findings import find_config_problems, is_4_bit
from agents.shared.models.fit import check_targets
from agents.shared.models.folder import ModelFolder
from app.errors import RacklessError, UserError
from app.forecasts.forecast import make_forecast
from app.forecasts.learning import load_corrections, load_past
from app.library.chat_template import settle_template
from app.library.configs import LocatedConfig, is_hub_id
from app.library.data_judge import settle_by_template
from app.library.data_key import make_data_key
from app.library.data_size import DataGuess, cut_and_pack, guess_sources
from app.library.model_check import find_folder, require_usable
from app.nodes.endpoints import choose_endpoints
from app.planning.accuracy.misses import find_miss
from app.planning.best import BestLimits, FittingModel, find_fitting
from app.planning.build_context import open_case
from app.planning.candidate import Advice, Candidate, DataSize, Plan, PlanRequest
from app.planning.cut import find_absence, find_problem, make_cut
from app.planning.document import PlanDocument, describe_choice, make_document, say_changes
from app.planning.hardware.cluster import (
    ASSUMED_PC_W,
    Cluster,
    LinkSpeed,
    Pair,
    PlannedNode,
    make_cluster,
)
from app.planning.hardware.measurement_limits import find_fault
from app.planning.plan import make_plan
from app.planning.row_lengths import pick_lengths
from app.planning.shape.model_parts import ModelPart, list_parts
from app.planning.shape.model_shape import ModelShape, read_shape
from app.planning.upgrades import PriceList, Upgrades, rank_upgrades
from app.runfile.advice import advise
from app.runs.placement import keep_places, place_ranks
from app.runs.services import LaunchForecast, Services
from app.storage.planning import PlanningStore
from app.text import show_list

# Bounds of the caches, which would grow while a user types names of models and files.
MAX_SHAPES = 64
MAX_GUESSES = 16


class Planner:
    """Makes plans and caches the shapes of models between them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._shapes: dict[str, tuple[LocatedConfig, ModelShape]] = {}
        self._guesses: dict[str, DataGuess] = {}

    async def plan(
        self,
        spec: RunSpec,
        cluster: Cluster,
        *,
        online: Sequence[str] = (),
        silent: Sequence[str] = (),
        ask_remote: bool = True,
        is_imagined: bool = False,
    ) -> Plan:
        """Return the plan for a run.

        Args:
            spec: requested run.
            cluster: PCs that may take part.
            online: nodes that can be asked for the model's config.
            silent: nodes that did not answer, which the plan leaves out.
            ask_remote: whether to ask nodes and the hub for a config that is not on this PC.
            is_imagined: whether the PCs are described in a file; else the next start executes the
                plan.

        Raises:
            UserError: the model's sizes are unknown, or there is no such node.
        """
        request, notes = await self.build_request(
            spec, cluster, online=online, silent=silent, ask_remote=ask_remote
        )
        # In a thread, like all reads below: large plans would block the event loop.
        plan = _put_requested_first(spec, await asyncio.to_thread(make_plan, request))
        if plan.chosen is not None and not is_imagined:
            document = make_document(request, plan.chosen)
            await asyncio.to_thread(self._keep_shown, spec, document)
        findings = await asyncio.to_thread(self._judge_data, spec)
        # Without a chosen plan, warnings refer to the nearest miss, which is shown instead.
        shown = plan.chosen or (plan.others[0] if plan.others else None)
        devices = [gpu.device for gpu in shown.gpus] if shown is not None else []
        model = await asyncio.to_thread(self._inspect, spec) or self._config_only(spec.model)
        past = await asyncio.to_thread(load_past, self._services.planning)
        return replace(
            plan,
            assumptions=(*plan.assumptions, *notes),
            warnings=advise(spec, devices, model=model, num_rows=request.data.num_rows),
            miss=find_miss(past, {(gpu.node, gpu.device) for gpu in shown.gpus}) if shown else None,
            findings=findings,
        )

    async def rank_upgrades(
        self,
        spec: RunSpec,
        cluster: Cluster,
        prices: PriceList,
        *,
        online: Sequence[str] = (),
        silent: Sequence[str] = (),
        ask_remote: bool = True,
    ) -> Upgrades:
        """Return purchases for a run, ranked by speed for the price; arguments as for `plan`."""
        request, notes = await self.build_request(
            spec, cluster, online=online, silent=silent, ask_remote=ask_remote
        )

        def rank() -> Upgrades:
            plan = make_plan(request)
            found = rank_upgrades(request, prices, plan.chosen)
            return replace(found, notes=(*found.notes, *plan.assumptions, *notes))

        return await asyncio.to_thread(rank)

    async def find_fitting(
        self, spec: RunSpec, cluster: Cluster, models: Sequence[str], limits: BestLimits
    ) -> tuple[tuple[FittingModel, ...], tuple[str, ...]]:
        """Return which of these models fit, for the data of a run, and the assumptions.

        Models whose sizes are not known on this PC, or that no run can train, are left out.

        Raises:
            UserError: there is a budget, but no price of energy.
        """
        cluster = self._add_energy(cluster)
        if limits.budget is not None and not (limits.price_per_kwh or cluster.price_per_kwh):
            raise UserError(
                "a budget needs the price of energy",
                "Set the price of a kilowatt-hour in the settings, or add --price-per-kwh 0.35.",
            )
        shapes = []
        for model in models:
            with contextlib.suppress(UserError):
                shape, _ = await self._find_shape(replace(spec, model=model), (), ask_remote=False)
                shapes.append((model, shape))
        data, note = await asyncio.to_thread(
            find_data_size, self._services.planning, spec, self._guess
        )
        request = PlanRequest(
            spec=spec,
            shape=shapes[0][1],
            data=data,
            cluster=cluster,
            learned=load_corrections(self._services.planning),
        )
        found = await asyncio.to_thread(find_fitting, request, shapes, limits)
        notes = (*open_case(request).assumptions, note)
        return found, tuple(one for one in notes if one)

    async def list_parts(self, spec: RunSpec) -> tuple[ModelPart, ...]:
        """Return the parts of the model that a run leaves untouched.

        Raises:
            UserError: the model's sizes are not known on this PC.
        """
        shape, _ = await self._find_shape(spec, (), ask_remote=False)
        return list_parts(shape, spec)

    async def build_request(
        self,
        spec: RunSpec,
        cluster: Cluster,
        *,
        online: Sequence[str] = (),
        silent: Sequence[str] = (),
        ask_remote: bool = True,
    ) -> tuple[PlanRequest, tuple[str, ...]]:
        """Return the plan request, and the assumptions made for it."""
        folder = await asyncio.to_thread(self._inspect, spec)
        shape, shape_note = await self._find_shape(spec, online, ask_remote)
        data, data_note = await asyncio.to_thread(
            find_data_size, self._services.planning, spec, self._guess
        )
        # A folder with only a config can be planned, but not started.
        weights_note = ""
        if folder is not None and not folder.tensors:
            weights_note = f"{spec.model} holds no weights: a start needs them"
        notes = [note for note in (shape_note, weights_note, data_note) if note]
        notes += await asyncio.to_thread(_list_faults, self._services.planning, cluster)
        notes += [f"{node.name}: {text}" for node in cluster.nodes for text in node.unused_gpus]
        if silent:
            verb = "does" if len(silent) == 1 else "do"
            notes.append(
                f"{show_list(list(silent))} {verb} not answer and took no part in this plan"
            )
        planned = _plan_as_qlora(spec, self._config_only(spec.model).config)
        if planned is not spec:
            notes.append(f"the weights of {spec.model} are in 4 bits: planned like qlora")
        request = PlanRequest(
            spec=planned,
            shape=shape,
            data=data,
            cluster=self._add_energy(cluster),
            learned=load_corrections(self._services.planning),
        )
        return request, tuple(notes)

    def _add_energy(self, cluster: Cluster) -> Cluster:
        """Return the cluster with what the settings say about power and its price."""
        settings = self._services.settings
        price, power_w = settings.number("price_per_kwh"), settings.number("pc_power_w")
        # The default is an assumption, which the plan names.
        if power_w != ASSUMED_PC_W:
            nodes = [n if n.pc_w is not None else replace(n, pc_w=power_w) for n in cluster.nodes]
            cluster = replace(cluster, nodes=tuple(nodes))
        if cluster.price_per_kwh is None and price:
            cluster = replace(cluster, price_per_kwh=price)
        return cluster

    def _guess(self, spec: RunSpec) -> DataGuess:
        """Return the guess of a run's data, cached while its files are unchanged."""
        key = make_data_key(spec)
        found = self._guesses.get(key)
        if found is None:
            if len(self._guesses) >= MAX_GUESSES:
                self._guesses.clear()
            found = self._guesses[key] = guess_run_data(spec)
        return found

    def _judge_data(self, spec: RunSpec) -> tuple[DataFinding, ...]:
        return settle_by_template(self._guess(spec).findings, settle_template(spec))

    async def forecast(
        self,
        spec: RunSpec,
        facts: Mapping[str, NodeFacts],
        ranks: Sequence[RankPlacement],
        samples: Mapping[str, Sample] | None = None,
    ) -> LaunchForecast:
        """Return the choice of ranks and its forecast: the plan that was shown, if nothing changed.

        Args:
            spec: the run.
            facts: nodes that may take part.
            ranks: ranks that may take part.
            samples: newest sample of each node, as for the plan that is shown.
        """
        cluster = describe_nodes(self._services.planning, facts, samples, ranks)
        try:
            request, _ = await self.build_request(spec, cluster, online=tuple(facts))
        except UserError:  # the model's sizes are not known
            return LaunchForecast()
        plan = await asyncio.to_thread(make_plan, request)
        if plan.chosen is None:
            return _forecast_misfit(request, plan, ranks)
        document = make_document(request, plan.chosen)
        shown = await asyncio.to_thread(self._find_shown, spec)
        changed = ""
        if shown is not None and shown.conditions == document.conditions:
            document = shown  # by value: what other programs hold on a GPU may have changed
        elif shown is not None and shown.id != document.id:
            what = say_changes(shown.conditions, document.conditions)
            now = describe_choice(cluster, document.candidate)
            changed = f"since plan {shown.id} was shown, {what}: it is {now} now"
        candidate = document.candidate
        places = tuple((gpu.node, gpu.device) for gpu in candidate.gpus)
        kept = keep_places(ranks, places)
        left = set(facts) - {node for node, _ in places}
        is_part = len(places) < len(ranks)
        return LaunchForecast(
            forecast=make_forecast(candidate, request, kept, plan.assumptions),
            cut=make_cut(candidate, kept, request.shape.num_layers),
            problem=find_problem(candidate, plan.advice),
            advice=_say_left(cluster, candidate, sorted(left)) if is_part else (),
            places=places,
            nodes=cluster.name_places(places) if is_part else (),
            plan_id=document.id,
            changed=changed,
        )

    def _find_shown(self, spec: RunSpec) -> PlanDocument | None:
        """Return the plan that was last shown for these settings, or None."""
        found = self._services.planning.shown_plan(_make_spec_key(spec))
        try:
            return None if found is None else from_wire(PlanDocument, found)
        except WireError:  # stored by another version
            return None

    def _keep_shown(self, spec: RunSpec, document: PlanDocument) -> None:
        self._services.planning.save_shown_plan(_make_spec_key(spec), to_wire(document))

    def _inspect(self, spec: RunSpec) -> ModelFolder | None:
        """Return the inspected model folder; None: it is not on this PC.

        Raises:
            UserError: no run, or not this run, can train it.
        """
        folder = find_folder(spec.model)
        if folder is None:
            return None
        # A plan needs only the config and must not wait for a large tokenizer.
        found = self._services.models.inspect(folder, parts="present", whole=False)
        require_usable(spec.model, found, spec)
        return found

    def _config_only(self, model: str) -> ModelFolder:
        """Return a folder with the config of a model whose files are not on this PC."""
        return ModelFolder(config=self._shapes[model][0].config)

    async def _find_shape(
        self, spec: RunSpec, online: Sequence[str], ask_remote: bool
    ) -> tuple[ModelShape, str]:
        model = spec.model
        found = await asyncio.to_thread(self._services.configs.find_here, model)
        if found is None and model in self._shapes:
            found = self._shapes[model][0]  # received from a node or the hub before
        if found is None and not ask_remote:
            raise UserError(
                f"the sizes of {model} are not known here",
                "Give a folder with its config.json, or wait until the model has been looked up.",
            )
        if found is None:
            found = await self._ask_remote(model, online)
        # The config is compared, since the files of a folder may have changed.
        known = self._shapes.get(model)
        if known is None or known[0].config != found.config:
            folder = ModelFolder(
                config=found.config, findings=tuple(find_config_problems(found.config))
            )
            require_usable(model, folder, spec)
            shape = read_shape(found.config)
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[model] = known = (found, shape)
        shape = known[1]
        _require_targets(spec, shape)
        if not shape.is_exact:
            return shape, f"{shape.family} is an unknown family; planned like Llama"
        return shape, f"sizes of {model}: {found.source}" if found.source else ""

    async def _ask_remote(self, model: str, online: Sequence[str]) -> LocatedConfig:
        for node in online:
            try:
                config = (await self._services.pool.agent(node).ask(ReadConfig(model=model))).config
            except RacklessError:
                continue  # another node may have it
            if config is not None:
                return LocatedConfig(config=config, source=f"from {node}")
        if not is_hub_id(model):
            where = f"here nor on {show_list(list(online))}" if online else "here"
            raise UserError(
                f"there is no model folder {model} {where}",
                "Give the path of a folder with config.json, or a hub id such as org/name.",
            )
        return await asyncio.to_thread(self._services.configs.fetch, model)


def _plan_as_qlora(spec: RunSpec, config: Mapping[str, Any]) -> RunSpec:
    """Return the spec to plan with: LoRA on a model with 4-bit weights becomes QLoRA."""
    if spec.adapter.kind != "lora" or not is_4_bit(config) or spec.precision == "fp64":
        return spec
    return replace(spec, adapter=replace(spec.adapter, kind="qlora"))


def _require_targets(spec: RunSpec, shape: ModelShape) -> None:
    """Check that the adapter's targets are layers of a model whose weights are not on this PC.

    Raises:
        UserError: a target is not a layer.
    """
    targets = spec.adapter.targets
    # Experts are not linear layers in the shape, but a target may name them like ones.
    is_known = shape.is_exact and not shape.num_experts
    if spec.adapter.kind == "full" or targets == "all-linear" or not is_known:
        return
    for misfit in check_targets(targets, ["lm_head", *shape.name_linear()]):
        raise UserError(f"{misfit.key} {misfit.text}", f"{misfit.hint}.")


def _forecast_misfit(
    request: PlanRequest, plan: Plan, ranks: Sequence[RankPlacement]
) -> LaunchForecast:
    """Return the forecast of a run that fits in no way: the whole model on each rank that it may
    use, whose error names the missing memory, or the reason to refuse it.
    """
    spec = request.spec
    kept = ranks[:1] if find_mode(spec.parallel).uses_one_gpu else ranks
    wanted = {(place.node, place.device) for place in kept}
    whole = "data" if len(kept) > 1 else "single"
    mode = whole if find_mode(spec.parallel).holds == "model" else spec.parallel
    found = [
        one
        for one in plan.others
        if one.mode == mode and {(gpu.node, gpu.device) for gpu in one.gpus} == wanted
    ]
    candidate = min(found, key=lambda one: (not one.fits, one.step_s), default=None)
    if candidate is None:
        return LaunchForecast(problem=find_absence(request, plan.advice, len(kept)))
    return LaunchForecast(
        forecast=make_forecast(candidate, request, kept, plan.assumptions),
        cut=make_cut(candidate, kept, request.shape.num_layers),
        problem=find_problem(candidate, plan.advice),
    )


def _say_left(cluster: Cluster, candidate: Candidate, left: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence on the GPUs that take no part."""
    who = show_list(left) if left else "some GPUs"
    verb = "takes" if len(left) == 1 else "take"
    return (f"{who} {verb} no part: the plan is {describe_choice(cluster, candidate)}",)


def _make_spec_key(spec: RunSpec) -> str:
    """Return a key of all settings but the name, which a form changes by itself."""
    settings = {**to_wire(spec), "name": ""}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def describe_nodes(
    store: PlanningStore,
    facts: Mapping[str, NodeFacts],
    samples: Mapping[str, Sample] | None = None,
    ranks: Sequence[RankPlacement] | None = None,
) -> Cluster:
    """Return the cluster of real nodes, with all measurements.

    Args:
        store: measurements.
        facts: facts by node.
        samples: newest sample by node.
        ranks: ranks that may take part; None: those of all nodes. Names of one PC share its GPUs.
    """
    try:
        endpoints = choose_endpoints(facts)
        interfaces = {name: endpoint.interface for name, endpoint in endpoints.items()}
    except UserError:  # no common network: the start reports it, and a plan is still useful
        interfaces = {}
    nodes = {node.name: node for node in make_cluster(facts).nodes}
    calibrations = {
        (node, found.card): found
        for (node, _), found in store.calibrations().items()
        if node in nodes and not _find_fault(found, nodes[node])
    }
    cluster = make_cluster(
        facts,
        samples=samples,
        measured=_measured_links(store),
        interfaces=interfaces,
        calibrations=calibrations,
    )
    able = {(one.node, one.device) for one in (ranks or place_ranks(facts))}
    return replace(
        cluster,
        nodes=tuple(
            replace(node, gpus=tuple(gpu for gpu in node.gpus if (node.name, gpu.device) in able))
            for node in cluster.nodes
        ),
    )


def _find_fault(found: Calibration, node: PlannedNode) -> str:
    capability = next((gpu.capability for gpu in node.gpus if gpu.name == found.card), None)
    return find_fault(found, node.num_cores, capability)


def _list_faults(store: PlanningStore, cluster: Cluster) -> list[str]:
    """Return a sentence on each stored measurement that the plan rejects."""
    nodes = {node.name: node for node in cluster.nodes}
    return [
        f"{node}: the measurement of {found.card} is not used: {fault}"
        for (node, _), found in store.calibrations().items()
        if node in nodes and (fault := _find_fault(found, nodes[node]))
    ]


def _measured_links(store: PlanningStore) -> dict[Pair, LinkSpeed]:
    """Return each measured link with the slower of its two directions."""
    # A ring sends in both directions at once, so the slower one limits it.
    links: dict[Pair, LinkSpeed] = {}
    for record in store.links():
        if record.bytes_per_s is None:
            continue
        pair = frozenset((record.node, record.peer))
        known = links.get(pair)
        links[pair] = LinkSpeed(
            bytes_per_s=min(record.bytes_per_s, known.bytes_per_s if known else float("inf")),
            latency_s=max(record.round_trip_s, known.latency_s if known else 0.0),
            source="measured",
        )
    return links


def _put_requested_first(spec: RunSpec, plan: Plan) -> Plan:
    """Put the requested mode first among the others if this version cannot train it yet."""
    refusal = refuse_parallel(spec.parallel)
    if refusal is None:
        return plan
    others = sorted(plan.others, key=lambda one: one.mode != spec.parallel)
    text = f"{refusal[0]}; parallel: auto takes the fastest mode that can train"
    advice = Advice(text=text, change={"parallel": "auto"})
    return replace(plan, others=tuple(others), advice=(advice,))


def guess_run_data(spec: RunSpec) -> DataGuess:
    """Return the guess of a run's data from its first rows, truncated and packed as by the run."""
    return cut_and_pack(guess_sources(spec.data), spec)


def find_data_size(
    store: PlanningStore, spec: RunSpec, guess_size: Callable[[RunSpec], DataGuess] = guess_run_data
) -> tuple[DataSize, str]:
    """Return the size of the data with its source: counted, else guessed, else unknown."""
    counted = store.counted(make_data_key(spec))
    if counted is not None:
        size = DataSize(
            num_rows=counted.num_rows,
            mean_tokens=counted.num_tokens / counted.num_rows,
            longest_tokens=counted.longest_tokens,
        )
        return size, ""
    sources = spec.data.list_sources()
    name = show_list([source.name for source in sources])
    guess = guess_size(spec)
    if guess.num_rows is None:
        name = name if len(sources) > 1 else spec.data.train
        note = f"the size of {name} is unknown until it has been tokenized"
        return DataSize(), f"{note}: rackless preview counts it"
    size = DataSize(
        num_rows=guess.num_rows,
        is_estimated=not guess.is_whole,
        mean_tokens=guess.mean_tokens,
        # The longest row of a sample says nothing about the rest.
        longest_tokens=guess.longest_tokens if guess.is_whole else None,
        lengths=_typical_lengths(spec, guess),
    )
    sample = "its rows" if guess.is_whole else "its first megabyte"
    return size, f"tokens of {name} estimated from {sample}, at 4 characters each"


def _typical_lengths(spec: RunSpec, guess: DataGuess) -> tuple[int, ...]:
    """Return typical lengths of truncated rows; empty if the run packs them."""
    if spec.packing:
        return ()
    return pick_lengths(
        guess.lengths, spec.sequence_tokens * OBJECTIVES[spec.objective].num_segments
    )
