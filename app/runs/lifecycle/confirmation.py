"""Tell the nodes of a launch that it is in progress, and at its end that every part runs.

A node that hears neither ends its part by itself (`agents/supervisor/confirmation.py`), so a cable
that is cut during a launch leaves no processes behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence

from agents.contract.requests.attempts import ConfirmAttempt
from app.errors import NodeUnreachable, RacklessError
from app.runs.nodes.node_pool import NodePool
from app.runs.run import RunPart

CONFIRM_S = 30.0
"""Silence of the master after which a node ends an unconfirmed part, in seconds."""
SAY_INTERVAL_S = 8.0
RETRY_S = 2.0
PATIENCE_S = 20.0


@contextlib.asynccontextmanager
async def keeping_launch_alive(
    pool: NodePool, nodes: Sequence[str], run_id: str, attempt: int
) -> AsyncIterator[None]:
    """Tell the nodes inside the block that the launch is still in progress."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(SAY_INTERVAL_S)
            # A node that has not launched its part yet refuses, which is no problem.
            await asyncio.gather(
                *(_confirm(pool, node, run_id, attempt, is_final=False) for node in nodes)
            )

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def confirm_launch(
    pool: NodePool, nodes: Iterable[str], run_id: str, attempt: int
) -> tuple[str, ...]:
    """Confirm to the nodes that every part runs; return those not reached within PATIENCE_S.

    The watch of the run tries again; a node that never gets the confirmation ends its part.
    """
    left = tuple(nodes)
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        answers = await asyncio.gather(
            *(_confirm(pool, node, run_id, attempt, is_final=True) for node in left)
        )
        left = tuple(
            node
            # Other errors need no retry: the node answers, but has no such part.
            for node, error in zip(left, answers, strict=True)
            if isinstance(error, NodeUnreachable)
        )
        if not left or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(RETRY_S)


async def confirm_parts(
    pool: NodePool, parts: Sequence[RunPart], run_id: str, attempt: int
) -> None:
    """Confirm the unconfirmed parts, once every part of the run is known to exist."""
    if any(part.status is None for part in parts):
        return
    waiting = [p.node for p in parts if p.active and p.status and not p.status.is_confirmed]
    await asyncio.gather(*(_confirm(pool, n, run_id, attempt, is_final=True) for n in waiting))


async def _confirm(
    pool: NodePool, node: str, run_id: str, attempt: int, *, is_final: bool
) -> RacklessError | None:
    try:
        await pool.agent(node).ask(
            ConfirmAttempt(run_id=run_id, attempt=attempt, is_final=is_final)
        )
    except RacklessError as error:
        return error
    return None
