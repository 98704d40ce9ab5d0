"""Ask the planner: gather what is known of model, data and nodes, and have the plan made.

All reading happens here, so that the planner itself is arithmetic. What had to be guessed comes
back among the plan's assumptions. A shape is remembered while its config stays what it is, since
the New run dialog asks at every key.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agents.contract.node import NodeFacts, Sample
from agents.contract.parallel import refuse_parallel
from agents.contract.run import RankPlacement
from agents.contract.spec import RunSpec
from app.errors import NodeUnreachable, UserError
from app.forecasts.forecast import make_forecast
from app.forecasts.learning import load_corrections
from app.library.configs import FoundConfig, is_hub_id
from app.library.data_key import make_data_key
from app.library.data_size import cut_and_pack, guess_data
from app.nodes.endpoints import choose_endpoints
from app.planning.candidate import Advice, Candidate, DataSize, Plan, PlanRequest
from app.planning.cluster import Cluster, LinkSpeed, Pair, make_cluster
from app.planning.model_shape import ModelShape, read_shape
from app.planning.plan import make_plan
from app.runs.services import LaunchForecast, Services
from app.storage.planning import PlanningStore
from app.text import show_list

MOST_SHAPES = 64


class Planner:
    """Makes plans; remembers shapes of models between them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._shapes: dict[str, tuple[FoundConfig, ModelShape]] = {}

    async def plan(
        self,
        spec: RunSpec,
        cluster: Cluster,
        *,
        online: Sequence[str] = (),
        silent: Sequence[str] = (),
        ask_remote: bool = True,
    ) -> Plan:
        """Return the plan for a run.

        Args:
            spec: what is asked for.
            cluster: every PC that may take part.
            online: nodes that can be asked for the model's config.
            silent: nodes that did not answer, which the plan leaves out.
            ask_remote: also ask nodes and the hub for the config; False: only what is here counts.

        Raises:
            UserError: the model's sizes cannot be found out, or there is no such node.
        """
        question, notes = await self.ask(
            spec, cluster, online=online, silent=silent, ask_remote=ask_remote
        )
        plan = _lead_with_asked(spec, await asyncio.to_thread(make_plan, question))
        advice = (*plan.advice, *_say_nodes(spec, plan, cluster))
        return replace(plan, advice=advice, assumptions=(*plan.assumptions, *notes))

    async def ask(
        self,
        spec: RunSpec,
        cluster: Cluster,
        *,
        online: Sequence[str] = (),
        silent: Sequence[str] = (),
        ask_remote: bool = True,
    ) -> tuple[PlanRequest, tuple[str, ...]]:
        """Return the planner's question, and what was assumed for it."""
        shape, shape_note = await self._find_shape(spec.model, online, ask_remote)
        data, data_note = await asyncio.to_thread(find_data_size, self._services.planning, spec)
        notes = [note for note in (shape_note, data_note) if note]
        if silent:
            verb = "does" if len(silent) == 1 else "do"
            notes.append(
                f"{show_list(list(silent))} {verb} not answer and took no part in this plan"
            )
        question = PlanRequest(
            spec=spec,
            shape=shape,
            data=data,
            cluster=cluster,
            learned=load_corrections(self._services.planning),
        )
        return question, tuple(notes)

    async def forecast(
        self, spec: RunSpec, facts: Mapping[str, NodeFacts], ranks: Sequence[RankPlacement]
    ) -> LaunchForecast:
        """Return the forecast of exactly these ranks, and which nodes slow the run down.

        One plan answers both: its candidates include all GPUs of the nodes, whether it chooses
        them or not.
        """
        cluster = describe_nodes(self._services.planning, facts)
        # A resume may run on other nodes than the run file names.
        asked = spec if spec.nodes == "all" else replace(spec, nodes=tuple(facts))
        try:
            question, _ = await self.ask(asked, cluster, ask_remote=False)
        except UserError:  # the model's sizes are not known here
            return LaunchForecast()
        plan = await asyncio.to_thread(make_plan, question)
        candidate = _find_candidate(plan, ranks)
        is_free = spec.nodes == "all" and spec.parallel == "auto"
        forecast = None
        if candidate is not None:
            forecast = make_forecast(candidate, question, ranks, plan.assumptions)
        return LaunchForecast(
            forecast=forecast,
            advice=tuple(one.text for one in plan.advice if is_free and "nodes" in one.change),
        )

    async def _find_shape(
        self, model: str, online: Sequence[str], ask_remote: bool
    ) -> tuple[ModelShape, str]:
        found = await asyncio.to_thread(self._services.configs.find_here, model)
        if found is None and model in self._shapes:
            found = self._shapes[model][0]  # a node's, or the hub's
        if found is None and not ask_remote:
            raise UserError(
                f"the sizes of {model} are not known here",
                "Name a folder with its config.json, or wait until it has been looked up.",
            )
        if found is None:
            found = await self._ask_remote(model, online)
        known = self._shapes.get(model)
        if known is None or known[0].config != found.config:
            shape = read_shape(found.config)
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            self._shapes[model] = known = (found, shape)
        shape = known[1]
        if not shape.is_exact:
            return shape, f"{shape.family} is no family that is known; counted like Llama"
        return shape, f"sizes of {model}: {found.source}" if found.source else ""

    async def _ask_remote(self, model: str, online: Sequence[str]) -> FoundConfig:
        for node in online:
            try:
                config = await self._services.pool.agent(node).model_config(model)
            except (UserError, NodeUnreachable):
                continue  # the next one may have it
            if config is not None:
                return FoundConfig(config=config, source=f"from {node}")
        if not is_hub_id(model):
            where = f"here nor on {show_list(list(online))}" if online else "here"
            raise UserError(
                f"there is no model folder {model} {where}",
                "Give the path of a folder with config.json, or a hub id such as org/name.",
            )
        return await asyncio.to_thread(self._services.configs.fetch, model)


def _find_candidate(plan: Plan, ranks: Sequence[RankPlacement]) -> Candidate | None:
    """Return the plan's candidate that trains on exactly these ranks."""
    mode = "data" if len(ranks) > 1 else "single"
    wanted = {(place.node, place.device) for place in ranks}
    for candidate in (plan.chosen, *plan.others):
        if candidate is None or candidate.mode != mode:
            continue
        if {(gpu.node, gpu.device) for gpu in candidate.gpus} == wanted:
            return candidate
    return None


def describe_nodes(
    store: PlanningStore,
    facts: Mapping[str, NodeFacts],
    samples: Mapping[str, Sample] | None = None,
) -> Cluster:
    """Return the cluster of real nodes, with everything that was measured of it."""
    try:
        endpoints = choose_endpoints(facts)
        interfaces = {name: endpoint.interface for name, endpoint in endpoints.items()}
    except UserError:  # they cannot reach each other: the start says so; a plan is still of use
        interfaces = {}
    calibrations = {(node, found.card): found for (node, _), found in store.calibrations().items()}
    return make_cluster(
        facts,
        samples=samples,
        measured=_measured_links(store),
        interfaces=interfaces,
        calibrations=calibrations,
    )


def _measured_links(store: PlanningStore) -> dict[Pair, LinkSpeed]:
    """Return each way with the slower of its two directions."""
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


def _lead_with_asked(spec: RunSpec, plan: Plan) -> Plan:
    """Show first what was asked for, where that is a way that this version cannot train."""
    refusal = refuse_parallel(spec.parallel)
    if refusal is None:
        return plan
    others = sorted(plan.others, key=lambda one: one.mode != spec.parallel)
    text = f"{refusal[0]}; auto takes the fastest way that is"
    advice = Advice(text=text, change={"parallel": "auto"})
    return replace(plan, others=tuple(others), advice=(advice,))


def _say_nodes(spec: RunSpec, plan: Plan, cluster: Cluster) -> tuple[Advice, ...]:
    """Say how to leave out what the plan leaves out: a start takes every node of the run file."""
    chosen, known = plan.chosen, [node.name for node in cluster.nodes]
    if chosen is None or spec.nodes != "all" or set(chosen.nodes) == set(known):
        return ()
    if any("nodes" in advice.change for advice in plan.advice):
        return ()
    left = [name for name in known if name not in chosen.nodes]
    text = f"A start takes every node: to leave out {show_list(left)}, name the others in nodes"
    return (Advice(text=text, change={"nodes": chosen.nodes}),)


def find_data_size(store: PlanningStore, spec: RunSpec) -> tuple[DataSize, str]:
    """Return how much there is to learn, as counted, else as guessed, else nothing."""
    counted = store.counted(make_data_key(spec))
    if counted is not None:
        size = DataSize(
            num_rows=counted.num_rows,
            mean_tokens=counted.num_tokens / counted.num_rows,
            longest_tokens=counted.longest_tokens,
        )
        return size, ""
    path = Path(os.path.expanduser(spec.data.train))
    guess = cut_and_pack(guess_data(path), spec)
    if guess.num_rows is None:
        note = f"how much {spec.data.train} holds is not known before it has been tokenized"
        return DataSize(), f"{note}: rackless preview counts it"
    size = DataSize(
        num_rows=guess.num_rows,
        mean_tokens=guess.mean_tokens,
        longest_tokens=guess.longest_tokens if guess.is_whole else None,
    )
    looked = "its rows" if guess.is_whole else "its first megabyte"
    return size, f"tokens of {path.name} guessed from {looked}, 4 characters each"
