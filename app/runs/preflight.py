"""Check that the chosen nodes can take part in an attempt, and plan its ranks.

This module only queries the nodes and changes nothing; it refuses with a reason and a hint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from agents.contract.node import NodeFacts
from agents.contract.parallel import find_mode, refuse_parallel, refuse_trained_weights
from agents.contract.requests.attempts import ListAttempts
from agents.contract.requests.node import ReadFacts
from agents.contract.requests.runs import RaiseFence
from agents.contract.run import RankPlacement
from agents.contract.spec import RunSpec, list_named, split_place
from app.errors import NodeUnreachable, NotAvailableYet, RacklessError, UserError
from app.nodes.endpoints import Endpoint, choose_endpoints
from app.nodes.shared_homes import require_own_homes
from app.planning.hardware.mig import describe_mig, say_turn_off
from app.provisioning.environment import python_of
from app.runs.foreign import busy_attempts, refuse_busy
from app.runs.placement import keep_listed, keep_places, place_ranks
from app.runs.services import LaunchForecast, Services
from app.text import show_list

FIT_TIMEOUT_S = 10.0
"""Maximum time for the answer of a node that would join a run, in seconds."""
STUCK_LOOKS = 6
STUCK_PAUSE_S = 0.5
"""Number of checks, and time between two in seconds, after which leftovers of an ended attempt
count as stuck; a supervisor lives briefly after it has recorded the end."""
_ENDED = ("done", "stopped", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """All data for launching an attempt, once every node has been checked."""

    ranks: tuple[RankPlacement, ...]
    endpoints: dict[str, Endpoint]
    pythons: dict[str, str]
    facts: dict[str, NodeFacts]
    forecast: LaunchForecast = field(default_factory=LaunchForecast)
    away: tuple[str, ...] = ()
    """Nodes that might take part but cannot be reached."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.node for place in self.ranks))


def choose_nodes(spec: RunSpec, known: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes that a spec requests, in its order.

    Raises:
        UserError: there are no nodes, or a name is unknown.
    """
    return choose_named(spec.nodes, known)


def choose_named(names: Literal["all"] | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes of these entries, such as `tower` or `tower:0`, each once.

    Raises:
        UserError: there are no nodes, or a name is unknown or listed twice.
    """
    if not known:
        raise UserError("there are no nodes yet", "Add one: rackless nodes add NAME --local")
    if names == "all":
        return tuple(known)
    unknown = [name for name in list_named(names) if name not in known]
    if unknown:
        raise UserError(
            f"there is no node {show_list(unknown)}; the nodes are {show_list(list(known))}",
            "Correct nodes in the run file, or add the node: rackless nodes add",
        )
    if len(set(names)) < len(names):
        raise UserError("nodes lists a node twice", "List each node once.")
    return list_named(names)


def require_supported(spec: RunSpec) -> None:
    """Check that this version can train what a spec requests.

    Raises:
        NotAvailableYet: it cannot; the message names the key and an alternative.
        UserError: no version can: keys contradict each other.
    """
    if refusal := refuse_parallel(spec.parallel):
        raise NotAvailableYet(refusal[0], f"{refusal[1]}.")
    if refusal := refuse_trained_weights(spec.parallel, spec.adapter.kind):
        raise UserError(refusal[0], f"{refusal[1]}.")


async def plan_launch(
    services: Services, spec: RunSpec, nodes: Sequence[str], own: str = ""
) -> LaunchPlan:
    """Plan the run on these nodes, and check those that the plan uses.

    Args:
        services: stores and nodes.
        spec: the run; the shares of a run to resume are left out if it has other ranks by now.
        nodes: nodes to use.
        own: id of a run to resume, whose earlier attempts do not make a node busy.

    Raises:
        UserError: a node cannot be reached, is busy, or has no suitable environment, or the run
            file's mode does not fit.
    """
    facts = await _read_facts(services, spec, nodes)
    ranks = keep_listed(place_ranks(facts), spec.nodes)
    _require_ranks(spec, ranks)
    if spec.shares is not None and len(spec.shares) != len(ranks):
        if not own:
            raise UserError(
                f"shares has {len(spec.shares)} values, but the run has {len(ranks)} ranks",
                "Give one share per rank, or leave shares out to have them measured.",
            )
        spec = replace(spec, shares=None)
    away = tuple(node for node in nodes if node not in facts)
    plan = LaunchPlan(ranks=ranks, endpoints={}, pythons={}, facts=facts, away=away)
    plan = await add_forecast(services, spec, plan)
    answers = await asyncio.gather(
        *(_check_node(services, node, own) for node in plan.nodes), return_exceptions=True
    )
    # The first problem in the order of nodes, so that the message is the same each time.
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    facts = {n: a for n, a in zip(plan.nodes, answers, strict=True) if isinstance(a, NodeFacts)}
    await require_own_homes({name: services.pool.agent(name) for name in facts}, facts)
    return replace(
        plan,
        endpoints=choose_endpoints(facts),
        pythons={name: python_of(name, known) for name, known in facts.items()},
        facts=facts,
    )


async def _read_facts(
    services: Services, spec: RunSpec, nodes: Sequence[str]
) -> dict[str, NodeFacts]:
    """Return the facts of the nodes that may take part.

    Raises:
        UserError: a node that the run file lists, or every node, cannot be reached.
    """
    answers = await asyncio.gather(
        *(services.pool.agent(node).ask(ReadFacts()) for node in nodes), return_exceptions=True
    )
    found = {n: a for n, a in zip(nodes, answers, strict=True) if isinstance(a, NodeFacts)}
    for answer in answers:
        # A plan among all nodes does without those that are off, as it says.
        may_miss = spec.nodes == "all" and spec.shares is None and bool(found)
        if isinstance(answer, BaseException) and not (
            may_miss and isinstance(answer, NodeUnreachable)
        ):
            raise answer
    return found


def _require_ranks(spec: RunSpec, ranks: Sequence[RankPlacement]) -> None:
    """Raise UserError if the run file lists a GPU that its node does not have."""
    if spec.nodes == "all":
        return
    known = {(one.node, one.device) for one in ranks}
    for entry in spec.nodes:
        node, device = split_place(entry)
        if device is not None and (node, device) not in known:
            raise UserError(
                f"nodes lists {entry}, but {node} has no GPU {device.removeprefix('cuda:')}",
                "See the GPUs of a PC: rackless nodes show " + node,
            )


async def find_fit(services: Services, nodes: Sequence[str], own: str) -> tuple[str, ...]:
    """Return the nodes that answer, are idle, can store files and can train run `own`."""
    answers = await asyncio.gather(*(_is_fit(services, node, own) for node in nodes))
    return tuple(node for node, fits in zip(nodes, answers, strict=True) if fits)


async def _is_fit(services: Services, node: str, own: str) -> bool:
    try:
        async with asyncio.timeout(FIT_TIMEOUT_S):
            facts = await _check_node(services, node, own)
            await require_usable(services, node, own)
    except (RacklessError, TimeoutError):
        return False
    # Else the next attempt would be refused after this one has ended.
    return facts.recorder != "elsewhere"


async def require_usable(services: Services, node: str, run_id: str) -> None:
    """Raise UserError if a node that answers cannot take part in the next attempt of a run.

    Its disk has failed, so it can store nothing, or no signal ends leftovers of the last attempt.
    """
    agent = services.pool.agent(node)
    # A test of the disk: writes the same files as a real fence, and changes nothing on a used node.
    await agent.ask(RaiseFence(run_id=run_id, attempt=1))
    for _ in range(STUCK_LOOKS):
        statuses = (await agent.ask(ListAttempts())).attempts
        ended = [s for s in statuses if s.run_id == run_id and s.state in _ENDED]
        stuck = [str(status.attempt) for status in ended if status.num_processes]
        if not stuck:
            return
        await asyncio.sleep(STUCK_PAUSE_S)
    what = f"processes of attempt {show_list(stuck)} of the run cannot be ended on node {node}"
    raise UserError(what, "Restart that PC")


async def add_forecast(services: Services, spec: RunSpec, plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with the ranks that it chooses and their forecast.

    Raises:
        UserError: the run file's mode does not fit these ranks.
    """
    found = await services.hooks.forecast(spec, plan.facts, plan.ranks)
    if found.problem is not None:
        raise UserError(*found.problem)
    places = found.places or [(place.node, place.device) for place in plan.ranks]
    if not found.places and find_mode(spec.parallel).uses_one_gpu:
        places = places[:1]  # the model's sizes are unknown, and so is the best GPU
    return replace(plan, ranks=keep_places(plan.ranks, places), forecast=found)


async def _check_node(services: Services, node: str, own: str) -> NodeFacts:
    agent = services.pool.agent(node)
    facts, known = await asyncio.gather(agent.ask(ReadFacts()), agent.ask(ListAttempts()))
    for status in busy_attempts(known.attempts, own):
        raise refuse_busy(services, node, status)
    # Runs were refused above with a better message; what is left are exports and the like.
    for use in facts.gpu_uses:
        if use.run_id is None:
            raise UserError(
                f"node {node} is already busy: {use.name} uses its "
                f"{'CPU' if use.uuid == 'cpu' else 'GPU'}",
                "Wait until it ends, cancel it where it began, or choose other nodes.",
                topic="gpu-in-use",
            )
    # Its CPU would train instead, far slower than a PC with such a GPU promises.
    if facts.mig_gpus and not facts.gpus:
        first = facts.mig_gpus[0]
        raise UserError(f"node {node}: {describe_mig(first)}", f"{say_turn_off(first)}.")
    python_of(node, facts)
    return facts
