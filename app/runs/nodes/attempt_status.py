"""Status of the nodes' parts of an attempt: query them, stop them, and read their progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from agents.contract.requests.attempts import ListAttempts, ReadAttempt, StopAttempt
from agents.contract.run import AttemptStatus
from app.errors import REFUSALS, AgentBug, NodeUnreachable, RacklessError, UserError
from app.runs.nodes.node_pool import NodePool
from app.runs.run import RunPart

ACTIVE = frozenset({"starting", "running", "stopping"})
SILENT_WAIT_S = 2.0
"""Minimum wait for a node that was silent last time, in seconds; a connection to a PC that is off
takes many seconds to fail."""


async def ask_part(pool: NodePool, node: str, run_id: str, attempt: int) -> RunPart:
    """Return the status of a node's part; an unreachable node counts as silent."""
    began_s = time.monotonic()
    try:
        status = await pool.agent(node).ask(ReadAttempt(run_id=run_id, attempt=attempt))
    # An error inside the agent says no more than silence, and neither does a PC that refuses our
    # SSH: the run there may be fine.
    except (NodeUnreachable, AgentBug, *REFUSALS):
        return RunPart(node=node, silent_s=time.monotonic() - began_s)
    except UserError:
        # It answers but does not know this attempt, or it was removed from the nodes.
        known = node in pool.names()
        return RunPart(node=node) if known else RunPart(node=node, silent_s=0.0)
    return RunPart(node=node, status=status)


async def ask_parts(
    pool: NodePool, nodes: Sequence[str], run_id: str, attempt: int
) -> tuple[RunPart, ...]:
    """Return the parts of all nodes, queried at once."""
    return tuple(await asyncio.gather(*(ask_part(pool, node, run_id, attempt) for node in nodes)))


async def list_attempts(
    pool: NodePool, nodes: Iterable[str]
) -> dict[str, tuple[AttemptStatus, ...]]:
    """Return the attempts on each node that answers; nodes that were silent before delay
    nothing.
    """
    asked = {node: asyncio.create_task(_list_on(pool, node)) for node in nodes}
    began_s = time.monotonic()
    awaited = [task for node, task in asked.items() if not pool.is_unreachable(node)]
    try:
        if awaited:
            await asyncio.wait(awaited)
        if asked:
            # If all PCs are slow, a silent one gets as much time again as the others took.
            await asyncio.wait(
                asked.values(), timeout=max(SILENT_WAIT_S, time.monotonic() - began_s)
            )
    finally:
        for task in asked.values():
            task.cancel()
    found = {node: task.result() for node, task in asked.items() if task.done()}
    return {node: attempts for node, attempts in found.items() if attempts is not None}


def by_node(answers: Mapping[str, Iterable[AttemptStatus]]) -> list[AttemptStatus]:
    """Return all attempts, each with the name that this master has for its node."""
    # The name in an old intent may differ, and a node may name another one.
    return [replace(status, node=node) for node, statuses in answers.items() for status in statuses]


async def _list_on(pool: NodePool, node: str) -> tuple[AttemptStatus, ...] | None:
    try:
        return (await pool.agent(node).ask(ListAttempts())).attempts
    except RacklessError:
        return None


async def stop_parts(
    pool: NodePool,
    nodes: Iterable[str],
    run_id: str,
    attempt: int,
    grace_s: float,
    *,
    at_loss: bool = False,
    closing: str = "",
) -> dict[str, RacklessError]:
    """Stop the parts on all `nodes` at once; return the errors by node.

    With `at_loss`, ranks save the last completed step first, each node for itself. With `closing`,
    the signature of a user's stop, nodes that miss it learn of it from the others.
    """
    names = tuple(nodes)
    request = StopAttempt(
        run_id=run_id, attempt=attempt, grace_s=grace_s, at_loss=at_loss, closing=closing
    )
    answers = await asyncio.gather(*(_stop_part(pool, node, request) for node in names))
    return {n: error for n, error in zip(names, answers, strict=True) if error is not None}


async def _stop_part(pool: NodePool, node: str, request: StopAttempt) -> RacklessError | None:
    # `agent` would raise UserError, which callers would take for the node's refusal.
    if node not in pool.names():
        return NodeUnreachable(f"node {node} was removed", "Add it again to stop its part.")
    try:
        await pool.agent(node).ask(request)
    except RacklessError as error:
        return error
    return None


def idle_s(parts: Iterable[RunPart]) -> float:
    """Return the time since any active rank finished a step, in seconds; 0 while a rank loads or
    saves.

    Read from the ranks' heartbeats, which only the training loop writes in phase `training`.
    """
    ages = []
    for part in parts:
        if part.status is None or not part.active:
            continue
        for rank in part.status.ranks:
            if rank.phase != "training" or rank.heartbeat_age_s is None:
                return 0.0
            ages.append(rank.heartbeat_age_s)
    # The smallest age: the run makes progress as long as any rank does.
    return min(ages, default=0.0)


def newest_step(parts: Iterable[RunPart]) -> int | None:
    """Return the newest step in any rank's heartbeat."""
    steps = [
        rank.step
        for part in parts
        if part.status is not None
        for rank in part.status.ranks
        if rank.step is not None
    ]
    return max(steps, default=None)


def active_attempts(statuses: Iterable[AttemptStatus]) -> tuple[AttemptStatus, ...]:
    """Return the attempts with processes, including those that lost their supervisor."""
    return tuple(
        status
        for status in statuses
        if status.state in ACTIVE or (status.state == "lost" and status.num_processes)
    )
