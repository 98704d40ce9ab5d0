"""Check nodes before a run: rows that say what is fine, what is not, and how to fix it.

A new check is one function and one row in a table below:

- `NODE_CHECKS` judge the facts of a single node,
- `GROUP_CHECKS` compare the nodes with each other,
- `NETWORK_CHECKS` measure between the nodes, and run only if all nodes have an address.

The node's readings are collected in `agents/node/examination`; their types are in
`agents/contract/requests/examination.py`. All nodes are examined at once, and each row is reported
as soon as it is known. Each failure becomes a row, including a node that does not answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from agents.contract.requests.connection import Ping
from agents.contract.requests.examination import Examine
from agents.contract.requests.node import ReadFacts
from app.errors import RacklessError, UserError
from app.nodes.client import NodeClient
from app.nodes.endpoints import Endpoint, choose_endpoints
from app.nodes.fleet import Fleet
from app.nodes.shared_homes import find_shared_homes
from app.progress import OnMessage
from app.provisioning import check_rules
from app.provisioning.check_row import CheckedGroup, CheckedNode, CheckRow, OnRow, make_row
from app.provisioning.checks import gpu, limits, network, system, variables, wsl
from app.provisioning.checks.links import check_links, check_routes
from app.provisioning.checks.reduce import check_reduce
from app.provisioning.environment import EnvironmentLock, find_environment, read_train_lock

NODE_CHECKS: tuple[Callable[[CheckedNode], Iterable[CheckRow]], ...] = (
    check_rules.judge_reach,
    check_rules.judge_environment,
    check_rules.judge_disk,
    system.judge_inodes,
    system.judge_home,
    system.judge_memory,
    system.judge_swap,
    system.judge_shm,
    limits.judge_temporary,
    limits.judge_limits,
    check_rules.judge_clock,
    system.judge_sync,
    system.judge_sudo,
    system.judge_hostname,
    system.judge_sleep,
    system.judge_logout,
    check_rules.judge_gpus,
    gpu.judge_driver,
    gpu.judge_persistence,
    check_rules.judge_compiler,
    network.judge_ports,
    network.judge_rdma,
    check_rules.judge_wsl,
    wsl.judge_wsl_idle,
    wsl.judge_wsl_boot,
    wsl.judge_wsl_firewall,
    wsl.judge_wsl_memory,
    wsl.judge_wsl_driver,
    wsl.judge_wsl_files,
    wsl.judge_wsl_sshd,
)
GROUP_CHECKS: tuple[Callable[[CheckedGroup], Iterable[CheckRow]], ...] = (
    system.judge_shared_homes,
    check_rules.judge_pythons,
    variables.judge_variables,
    network.judge_machines,
    network.judge_host_keys,
    network.judge_interfaces,
    network.judge_carriers,
    network.judge_errors,
    network.judge_mtus,
)
NETWORK_CHECKS: tuple[
    Callable[[CheckedGroup, OnRow, OnMessage], Awaitable[Iterable[CheckRow]]], ...
] = (check_routes, check_links, check_reduce)


async def check_nodes(
    fleet: Fleet,
    names: Iterable[str],
    *,
    lock: EnvironmentLock | None = None,
    reduce_timeout_s: float = 60.0,
    on_row: OnRow | None = None,
    progress: OnMessage | None = None,
) -> tuple[CheckRow, ...]:
    """Check the nodes called `names` and the network between them.

    Args:
        fleet: fleet with the nodes.
        names: names of the nodes.
        lock: packages that their environments must have; None for those of this version's trainer.
        reduce_timeout_s: deadline of the all-reduce.
        on_row: callback with each row as soon as it is known.
        progress: callback with a sentence about the current check.

    Returns:
        The same rows in a fixed order: by node, then rows of the group and of the network.

    Raises:
        UserError: a node does not exist.
    """
    on_row, progress = on_row or _ignore, progress or _ignore
    clients = [fleet.client(name) for name in names]
    lock = lock or read_train_lock()
    examined = _Examined(len(clients), on_row, progress)
    answers = await asyncio.gather(*(examined.take(one, lock) for one in clients))
    nodes = {node.name: node for node, _ in answers if node is not None}
    endpoints, problems = _choose_endpoints(nodes)
    answering = {client.name: client for client in clients if client.name in nodes}
    group = CheckedGroup(
        clients=answering,
        nodes=nodes,
        endpoints=endpoints,
        reduce_timeout_s=reduce_timeout_s,
        shared_homes=await find_shared_homes(
            answering, {name: node.facts for name, node in nodes.items()}
        ),
        host_keys=fleet.host_keys(names),
    )
    compared = (*(row for judge in GROUP_CHECKS for row in judge(group)), *problems)
    for row in compared:
        on_row(row)
    rows = [*(row for _, found in answers for row in found), *compared]
    if endpoints:
        # One after the other: a bandwidth probe during an all-reduce would distort both figures.
        for measure in NETWORK_CHECKS:
            rows += await measure(group, on_row, progress)
    return tuple(rows)


def _ignore(_: object) -> None:
    """Discard a report that the caller did not want."""


class _Examined:
    """Collector of the nodes' answers."""

    def __init__(self, num_nodes: int, on_row: OnRow, progress: OnMessage) -> None:
        self._num_nodes = num_nodes
        self._num_done = 0
        self._on_row = on_row
        self._progress = progress

    async def take(
        self, client: NodeClient, lock: EnvironmentLock
    ) -> tuple[CheckedNode | None, tuple[CheckRow, ...]]:
        """Examine a node and report its rows; return None for a node that does not answer."""
        answer = await _examine(client, lock, self._num_nodes)
        if isinstance(answer, CheckedNode):
            node, rows = answer, tuple(row for check in NODE_CHECKS for row in check(answer))
        else:
            node, rows = None, (_unreachable(client.name, answer),)
        for row in rows:
            self._on_row(row)
        self._num_done += 1
        self._progress(f"{self._num_done} of {self._num_nodes} nodes examined")
        return node, rows


async def _examine(
    client: NodeClient, lock: EnvironmentLock, num_nodes: int
) -> CheckedNode | RacklessError:
    try:
        # The first ping may have to connect; only the second one measures the round trip.
        await client.ask(Ping())
        sent_s, began_s = time.time(), time.monotonic()
        clock = await client.ask(Ping())
        round_trip_s = time.monotonic() - began_s
        facts, examination, environment = await asyncio.gather(
            client.ask(ReadFacts()), client.ask(Examine()), find_environment(client, lock)
        )
    except RacklessError as error:
        return error
    return CheckedNode(
        name=client.name,
        facts=facts,
        environment=environment,
        examination=examination,
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
    """Return the addresses that a run would use, or the row that says why they are missing."""
    try:
        return choose_endpoints({name: node.facts for name, node in nodes.items()}), ()
    except UserError as error:
        # The error has the node's name only in its text.
        name = next((name for name in nodes if name in error.message), next(iter(nodes)))
        return {}, (make_row("network", name, "fail", error.message, error.hint),)
