"""Look nodes over before a run: rows that say what is well, what is not, and what to do about it.

All nodes are asked at once. Then each pair is tried in both directions on ports that the system
chooses, as training uses them, and at last all nodes together do one real all-reduce with a
deadline. Whatever fails becomes a row; a dead node is no exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agents.contract.node import EnvironmentReport, NodeFacts
from app.errors import RacklessError, UserError
from app.nodes.client import NodeClient
from app.nodes.endpoints import Endpoint, choose_endpoints
from app.nodes.fleet import Fleet
from app.provisioning.check_network import check_links, check_reduce
from app.provisioning.check_rules import (
    CheckRow,
    judge_clock,
    judge_compiler,
    judge_disk,
    judge_environment,
    judge_gpus,
    judge_mtus,
    judge_pythons,
    judge_wsl,
)
from app.provisioning.environment import EnvironmentLock, find_environment, read_train_lock

__all__ = ["CheckRow", "check_nodes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """A node that answered."""

    client: NodeClient
    facts: NodeFacts
    round_trip_s: float
    skew_s: float
    """The node's clock minus ours."""
    environment: EnvironmentReport


async def check_nodes(
    fleet: Fleet,
    names: Iterable[str],
    *,
    lock: EnvironmentLock | None = None,
    reduce_timeout_s: float = 60.0,
) -> tuple[CheckRow, ...]:
    """Check the nodes called `names` and the network between them.

    Args:
        lock: what their environments must fit; None: the one that this version trains with.
        reduce_timeout_s: deadline of the all-reduce.

    Raises:
        UserError: a name is not that of a node.
    """
    clients = [fleet.client(name) for name in names]
    lock = lock or read_train_lock()
    answers = await asyncio.gather(*(_examine(client, lock) for client in clients))
    rows: list[CheckRow] = []
    subjects: dict[str, _Subject] = {}
    for client, answer in zip(clients, answers, strict=True):
        if isinstance(answer, _Subject):
            subjects[client.name] = answer
            rows += _judge(client.name, answer, len(clients))
        else:
            rows.append(_unreachable(client.name, answer))
    environments = {name: subject.environment for name, subject in subjects.items()}
    rows += judge_pythons(environments)
    endpoints, problems = _choose_endpoints(subjects)
    rows += problems
    if endpoints:
        rows += judge_mtus(_mtus(subjects, endpoints))
        live = [subject.client for subject in subjects.values()]
        rows += await check_links(live, endpoints)
        rows += await check_reduce(live, endpoints, environments, reduce_timeout_s)
    return tuple(rows)


async def _examine(client: NodeClient, lock: EnvironmentLock) -> _Subject | RacklessError:
    try:
        await client.ping()  # connects, so that the next one measures only the way
        sent_s, began_s = time.time(), time.monotonic()
        clock = await client.ping()
        round_trip_s = time.monotonic() - began_s
        facts, environment = await asyncio.gather(client.facts(), find_environment(client, lock))
    except RacklessError as error:
        return error
    return _Subject(
        client=client,
        facts=facts,
        round_trip_s=round_trip_s,
        skew_s=clock.wall_s - (sent_s + round_trip_s / 2),
        environment=environment,
    )


def _judge(name: str, subject: _Subject, num_nodes: int) -> Sequence[CheckRow]:
    facts = subject.facts
    reached = f"answers in {subject.round_trip_s * 1000:.1f} ms; {facts.os}, Python {facts.python}"
    return (
        CheckRow(check="reach", node=name, status="pass", message=reached),
        judge_environment(name, subject.environment),
        judge_disk(name, facts),
        judge_clock(name, subject.skew_s, facts),
        *judge_gpus(name, facts),
        *judge_compiler(name, facts, subject.environment),
        *judge_wsl(name, facts, num_nodes),
    )


def _unreachable(name: str, error: RacklessError) -> CheckRow:
    if isinstance(error, UserError):
        message, fix = error.message, error.hint
    else:
        message, fix = f"an error in Rackless itself: {error}", "Please report it, with the log"
    return CheckRow(check="reach", node=name, status="fail", message=message, fix=fix)


def _choose_endpoints(
    subjects: dict[str, _Subject],
) -> tuple[dict[str, Endpoint], Sequence[CheckRow]]:
    """Return the addresses that a run would use, or the row that says why there are none."""
    try:
        return choose_endpoints({name: s.facts for name, s in subjects.items()}), ()
    except UserError as error:
        name = next((name for name in subjects if name in error.message), next(iter(subjects)))
        row = CheckRow(
            check="network", node=name, status="fail", message=error.message, fix=error.hint
        )
        return {}, (row,)


def _mtus(subjects: dict[str, _Subject], endpoints: dict[str, Endpoint]) -> dict[str, int | None]:
    found = {}
    for name, subject in subjects.items():
        devices = {device.name: device.mtu for device in subject.facts.interfaces}
        found[name] = devices.get(endpoints[name].interface or "")
    return found
