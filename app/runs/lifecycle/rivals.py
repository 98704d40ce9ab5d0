"""Handle two starts at once on the same nodes: one becomes a run, the other leaves no trace.

Nodes show a run only once it is launched there, which may be minutes after its start if a model is
sent first. Until then a second click, or a second window, is refused because of this home's
launches in progress. A start of another home may still get the devices first; the node then refuses
ours, which is withdrawn instead of staying as a failed run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from agents.contract.requests.attempts import ListAttempts
from agents.contract.requests.runs import DeleteRun
from app.errors import RacklessError, UserError
from app.runs.foreign import busy_attempts, refuse_busy
from app.runs.services import Services

START_LOCK = "start.lock"
"""File in the home whose lock makes the check for other launches and the new entry atomic."""


def require_no_launch(services: Services, nodes: Sequence[str]) -> None:
    """Check that this home has no other launch in progress on these nodes.

    Raises:
        UserError: it has one; the message names it.
    """
    for run in services.runs.store.all():
        shared = [node for node in nodes if node in run.nodes]
        if shared and services.is_launching(run.run_id):
            raise UserError(
                f"node {shared[0]} is already busy: run {run.run_id} is being started there",
                f"Wait until it ends, stop it: rackless runs stop {run.run_id}, or choose other "
                "nodes in the run file.",
                where=shared[0],
            )


async def find_rival(services: Services, nodes: Sequence[str], run_id: str) -> UserError | None:
    """Return why these nodes are busy with another run than `run_id`, or None if they are not."""
    for node in nodes:
        with contextlib.suppress(RacklessError):  # a silent node reports no run
            attempts = (await services.pool.agent(node).ask(ListAttempts())).attempts
            for status in busy_attempts(attempts):
                if status.run_id != run_id:
                    return refuse_busy(services, node, status)
    return None


async def withdraw(services: Services, run_id: str, nodes: Sequence[str]) -> None:
    """Remove a start that no node trains, here and on its nodes."""
    await asyncio.gather(*(_delete_on(services, node, run_id) for node in nodes))
    # Its id is remembered, so that a node that missed this deletes the run when it answers again.
    services.runs.forget(run_id)


async def _delete_on(services: Services, node: str, run_id: str) -> None:
    with contextlib.suppress(RacklessError):
        await services.pool.agent(node).ask(DeleteRun(run_id=run_id))
