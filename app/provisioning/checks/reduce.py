"""Run one real all-reduce over the nodes: with Gloo, and with NCCL if all of them have GPUs.

Its processes also report their versions of torch, CUDA and NCCL, which must fit each other and the
cards.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.contract.node import AllReduceResult, NodeFacts
from agents.contract.requests.probes import AllReduceProbe, ChoosePort
from app.errors import RacklessError, UserError
from app.nodes.client import NodeClient
from app.nodes.credential import make_credential
from app.progress import OnMessage
from app.provisioning.check_row import CheckedGroup, CheckRow, OnRow, make_row
from app.provisioning.checks.torch import judge_torch
from app.provisioning.torch_build import tried_builds

# Time for the other ranks to report once one rank has failed, in seconds.
_GRACE_S = 5.0
# Message of the agent's all-reduce probe; the ranks that it names caused the failure.
_ABSENT = re.compile(r"Rank ([\d, ]+) did not come")


async def check_reduce(
    group: CheckedGroup, on_row: OnRow, progress: OnMessage
) -> tuple[CheckRow, ...]:
    """Run an all-reduce over all nodes that can train; name the node that does not take part."""
    progress("adding numbers over all nodes (all-reduce)")
    rows = await _reduce(group)
    for row in rows:
        on_row(row)
    return rows


async def _reduce(group: CheckedGroup) -> tuple[CheckRow, ...]:
    environments = {name: node.environment for name, node in group.nodes.items()}
    able = [client for name, client in group.clients.items() if environments[name].fits]
    rows = [_skipped(name) for name, report in environments.items() if not report.fits]
    if not able:
        return tuple(rows)
    first = group.endpoints[able[0].name]
    try:
        # Chosen by the node of rank 0, which will listen there: only that node knows its free
        # ports.
        port = (await able[0].ask(ChoosePort(address=first.address))).port
    except RacklessError as error:
        return (*rows, _failed(able[0].name, error))
    # In a thread: the import of its libraries takes long.
    credential = await asyncio.to_thread(make_credential)
    probes = {
        client: AllReduceProbe(
            python=environments[client.name].python or "",
            rank=rank,
            world_size=len(able),
            master_address=first.address,
            master_port=port,
            interface=group.endpoints[client.name].interface,
            credential=credential,
            with_nccl=can_use_nccl([group.nodes[one.name].facts for one in able]),
            timeout_s=group.reduce_timeout_s,
        )
        for rank, client in enumerate(able)
    }
    outcomes = await _run_probes(probes)
    results = {name: one.result for name, one in outcomes.items() if one.result is not None}
    return (
        *rows,
        *judge_reduce([client.name for client in able], outcomes),
        *judge_nccl(results),
        *judge_torch(group, {name: one.torch for name, one in results.items() if one.torch}),
    )


def can_use_nccl(facts: Sequence[NodeFacts]) -> bool:
    """Return True if NCCL can be tried: several nodes with one build of torch, all with GPUs that
    are not leased.
    """
    builds = tried_builds({str(number): one for number, one in enumerate(facts)})
    return (
        len(facts) > 1
        and all(one.gpus and not one.gpu_uses for one in facts)
        and len(set(builds.values())) <= 1
    )


def judge_nccl(results: Mapping[str, AllReduceResult]) -> tuple[CheckRow, ...]:
    """Return a row for each rank that tried NCCL."""
    rows = []
    for name, result in results.items():
        if result.nccl_problem:
            fix = (
                "Runs can use Gloo meanwhile; NCCL needs one driver and one NCCL everywhere, and "
                "all TCP between the nodes"
            )
            rows.append(make_row("nccl", name, "fail", result.nccl_problem, fix))
        elif result.nccl_seconds is not None:
            text = f"{result.num_values} numbers with NCCL in {result.nccl_seconds * 1000:.0f} ms"
            rows.append(make_row("nccl", name, "pass", text))
    return tuple(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceOutcome:
    """Result of one node's part of the all-reduce."""

    ended_s: float
    """Monotonic time of the end, in seconds."""
    result: AllReduceResult | None = None
    error: RacklessError | None = None


def judge_reduce(
    names: Sequence[str], outcomes: Mapping[str, ReduceOutcome]
) -> tuple[CheckRow, ...]:
    """Return a row for each rank; a node missing in `outcomes` did not answer."""
    if len(outcomes) == len(names) and all(o.result and o.result.sum_ok for o in outcomes.values()):
        return tuple(_summed(name, outcomes[name].result, len(names)) for name in names)
    # One failing rank makes all others fail; only the cause gets its own fix.
    culprits = find_culprits(names, outcomes)
    rows = []
    for name in names:
        outcome = outcomes.get(name)
        if name not in culprits:
            text = f"timed out waiting for {', '.join(sorted(culprits))}"
            rows.append(make_row("all-reduce", name, "fail", text, "Fix that node first"))
        elif outcome is None or outcome.error is None:
            text = "did not answer during the all-reduce"
            if outcome is not None and outcome.result is not None:
                text = "took part, but its sum is wrong or reached no other node"
            fix = f"Check whether that PC hangs or is overloaded: rackless nodes show {name}"
            rows.append(make_row("all-reduce", name, "fail", text, fix))
        else:
            rows.append(_failed(name, outcome.error))
    return tuple(rows)


def find_culprits(names: Sequence[str], outcomes: Mapping[str, ReduceOutcome]) -> set[str]:
    """Return the nodes that caused the failure of the all-reduce.

    The cause is the rank that others report as absent, else the rank that failed first, else one
    with a wrong sum, else the silent one. The other failures are consequences.
    """
    # Failures other than reports that other ranks are absent.
    own = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome.error is not None and not _ABSENT.search(str(outcome.error))
    }
    wrong = {n for n, o in outcomes.items() if o.result is not None and not o.result.sum_ok}
    named: set[str] = set()
    for outcome in outcomes.values():
        match = _ABSENT.search(str(outcome.error or ""))
        if match is not None:
            # The numbers come from a node and are not trusted as indexes.
            named |= {names[int(rank)] for rank in match[1].split(",") if int(rank) < len(names)}
    if named:
        return named
    if own:
        return {min(own, key=lambda name: own[name].ended_s)}
    return wrong or {name for name in names if name not in outcomes} or set(names)


async def _run_probes(
    probes: Mapping[NodeClient, AllReduceProbe],
) -> dict[str, ReduceOutcome]:
    """Start all ranks at once; after the first failure, give the others only `_GRACE_S`."""
    outcomes: dict[str, ReduceOutcome] = {}

    async def take_part(client: NodeClient, probe: AllReduceProbe) -> None:
        try:
            result = await client.ask(probe)
        except RacklessError as error:
            outcomes[client.name] = ReduceOutcome(ended_s=time.monotonic(), error=error)
            # Raised again, so that FIRST_EXCEPTION ends the wait for the others.
            raise
        outcomes[client.name] = ReduceOutcome(ended_s=time.monotonic(), result=result)

    tasks = [asyncio.create_task(take_part(*item)) for item in probes.items()]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_GRACE_S)
    finally:
        # Cancelling a probe also ends its process on the node.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes


def _summed(name: str, result: AllReduceResult | None, world_size: int) -> CheckRow:
    if result is None:
        return make_row("all-reduce", name, "unknown", "no result came back", "Run the check again")
    text = f"{result.num_values} numbers over {world_size} nodes in {result.seconds * 1000:.0f} ms"
    return make_row("all-reduce", name, "pass", text)


def _skipped(name: str) -> CheckRow:
    fix = f"rackless nodes setup {name}"
    return make_row(
        "all-reduce", name, "unknown", "not checked: no training environment that fits", fix
    )


def _failed(name: str, error: RacklessError) -> CheckRow:
    hint = error.hint if isinstance(error, UserError) else "Please report it, with the log"
    return make_row("all-reduce", name, "fail", str(error), hint or f"rackless nodes show {name}")
