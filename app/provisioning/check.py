"""Check nodes before a run: rows that say what is fine, what is not, and how to fix it.

Adding a check takes one function and one row in a table below:

- `NODE_CHECKS` judge what a single node said of itself,
- `GROUP_CHECKS` compare the nodes with each other,
- `NETWORK_CHECKS` measure between the nodes, and run only when all of them have an address.

All nodes are asked at once. Each failure becomes a row, including a node that does not answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from app.errors import RacklessError, UserError
from app.nodes.client import NodeClient
from app.nodes.endpoints import Endpoint, choose_endpoints
from app.nodes.fleet import Fleet
from app.provisioning.check_network import check_links, check_reduce
from app.provisioning.check_row import CheckedGroup, CheckedNode, CheckRow, make_row
from app.provisioning.check_rules import (
    judge_clock,
    judge_compiler,
    judge_disk,
    judge_environment,
    judge_gpus,
    judge_mtus,
    judge_pythons,
    judge_reach,
    judge_wsl,
)
from app.provisioning.environment import EnvironmentLock, find_environment, read_train_lock

NODE_CHECKS: tuple[Callable[[CheckedNode], Iterable[CheckRow]], ...] = (
    judge_reach,
    judge_environment,
    judge_disk,
    judge_clock,
    judge_gpus,
    judge_compiler,
    judge_wsl,
)
GROUP_CHECKS: tuple[Callable[[CheckedGroup], Iterable[CheckRow]], ...] = (
    judge_pythons,
    judge_mtus,
)
NETWORK_CHECKS: tuple[Callable[[CheckedGroup], Awaitable[Iterable[CheckRow]]], ...] = (
    check_links,
    check_reduce,
)


async def check_nodes(
    fleet: Fleet,
    names: Iterable[str],
    *,
    lock: EnvironmentLock | None = None,
    reduce_timeout_s: float = 60.0,
) -> tuple[CheckRow, ...]:
    """Check the nodes called `names` and the network between them.

    Args:
        lock: packages that their environments must have; None: those of this version's trainer.
        reduce_timeout_s: deadline of the all-reduce.

    Raises:
        UserError: there is no node of that name.
    """
    clients = [fleet.client(name) for name in names]
    lock = lock or read_train_lock()
    answers = await asyncio.gather(*(_examine(one, lock, len(clients)) for one in clients))
    rows: list[CheckRow] = []
    nodes: dict[str, CheckedNode] = {}
    for client, answer in zip(clients, answers, strict=True):
        if isinstance(answer, CheckedNode):
            nodes[client.name] = answer
            rows += [row for check in NODE_CHECKS for row in check(answer)]
        else:
            rows.append(_unreachable(client.name, answer))
    endpoints, problems = _choose_endpoints(nodes)
    group = CheckedGroup(
        clients={client.name: client for client in clients if client.name in nodes},
        nodes=nodes,
        endpoints=endpoints,
        reduce_timeout_s=reduce_timeout_s,
    )
    rows += [row for judge in GROUP_CHECKS for row in judge(group)]
    rows += problems
    if endpoints:
        # One after the other: an all-reduce beside a bandwidth probe would spoil both figures.
        for measure in NETWORK_CHECKS:
            rows += await measure(group)
    return tuple(rows)


async def _examine(
    client: NodeClient, lock: EnvironmentLock, num_nodes: int
) -> CheckedNode | RacklessError:
    try:
        # The first ping may have to connect; only the second one measures the round trip.
        await client.ping()
        sent_s, began_s = time.time(), time.monotonic()
        clock = await client.ping()
        round_trip_s = time.monotonic() - began_s
        facts, environment = await asyncio.gather(client.facts(), find_environment(client, lock))
    except RacklessError as error:
        return error
    return CheckedNode(
        name=client.name,
        facts=facts,
        environment=environment,
        round_trip_s=round_trip_s,
        # The node read its clock about half a round trip after the request was sent.
        skew_s=clock.wall_s - (sent_s + round_trip_s / 2),
        num_nodes=num_nodes,
    )


def _unreachable(name: str, error: RacklessError) -> CheckRow:
    if isinstance(error, UserError):
        return make_row("reach", name, "fail", error.message, error.hint)
    message = f"an error in Rackless itself: {error}"
    return make_row("reach", name, "fail", message, "Please report it, with the log")


def _choose_endpoints(
    nodes: Mapping[str, CheckedNode],
) -> tuple[dict[str, Endpoint], tuple[CheckRow, ...]]:
    """Return the addresses that a run would use, or the row that says why there are none."""
    try:
        return choose_endpoints({name: node.facts for name, node in nodes.items()}), ()
    except UserError as error:
        # The error names the node in its text alone.
        name = next((name for name in nodes if name in error.message), next(iter(nodes)))
        return {}, (make_row("network", name, "fail", error.message, error.hint),)
