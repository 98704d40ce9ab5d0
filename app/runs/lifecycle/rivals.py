"""Two starts at the same nodes at once: one becomes a run, the other leaves nothing behind.

Nodes show a run only once it is launched there, which may be minutes after its start, when a model
is sent first. Until then a second click, or a second window, is refused by the launches that this
home has under way. A start of another home may still win the devices first; the node then refuses
ours, and it is withdrawn instead of staying as a run that failed.
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
"""File in the home whose lock makes the check for other launches and the own entry one action."""


def require_no_launch(services: Services, nodes: Sequence[str]) -> None:
    """Check that no other launch of this home is under way on these nodes.

    Raises:
        UserError: one is; the message names it.
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
    """Return why these nodes are busy with another run than `run_id`; None: none of them is."""
    for node in nodes:
        with contextlib.suppress(RacklessError):  # a node that is silent names no other run
            attempts = (await services.pool.agent(node).ask(ListAttempts())).attempts
            for status in busy_attempts(attempts):
                if status.run_id != run_id:
                    return refuse_busy(services, node, status)
    return None


async def withdraw(services: Services, run_id: str, nodes: Sequence[str]) -> None:
    """Remove a start that no node trains, here and on the nodes that took part in it."""
    await asyncio.gather(*(_delete_on(services, node, run_id) for node in nodes))
    # Its id stays behind, so that a node which missed this deletes it when it answers again.
    services.runs.forget(run_id)


async def _delete_on(services: Services, node: str, run_id: str) -> None:
    with contextlib.suppress(RacklessError):
        await services.pool.agent(node).ask(DeleteRun(run_id=run_id))
