"""Stop and delete runs, without leftovers on any node that answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from agents.contract.requests.attempts import ListAttempts, StopAttempt
from agents.contract.requests.runs import DeleteRun
from app import errors
from app.events import ACTIVE_STATES
from app.progress import OnMessage
from app.runs.export_claims import refuse_exported
from app.runs.lifecycle.election import close_parts
from app.runs.lifecycle.losses import cancel_recovery
from app.runs.lifecycle.reconcile import reconcile_run
from app.runs.nodes.attempt_status import active_attempts, ask_parts, stop_parts
from app.runs.nodes.node_pool import NodePool
from app.runs.run import RunPart
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import show_duration, show_list

# A launch starts an interpreter on every node, which takes a minute on a slow disk.
LAUNCH_TIMEOUT_S = 180.0
POLL_INTERVAL_S = 0.1
REPORT_INTERVAL_S = 1.0
# Errors of a node that cannot be asked; its part is ended when it answers again.
_NO_ANSWER = (errors.NodeUnreachable, errors.HostKeyChanged, errors.HostKeyUnknown)


async def stop_run(services: Services, run_id: str, report: OnMessage = lambda line: None) -> None:
    """Stop a run: the first call saves a checkpoint, a second call stops at once.

    Returns once no process of the run is left on any node that answers. If no node answers, the
    second call gives the run up: its processes are stopped when their node comes back.

    Args:
        services: stores and nodes.
        run_id: run to stop.
        report: callback with a sentence on each change of what the stop waits for.

    Raises:
        UserError: the run is not active and has no leftovers, or its nodes cannot be reached.
    """
    is_cancelled = cancel_recovery(services, run_id)
    run = services.runs.get(run_id)
    if is_cancelled:
        await close_parts(services, run)
    if run.state not in ACTIVE_STATES:
        await _stop_leftovers(services, run, is_needed=not is_cancelled)
        return
    again = run.stop_asked
    # Stored before the wait: `launch` reads it once all parts exist, and other masters repeat the
    # stop to nodes that missed it.
    services.runs.change(run_id, lambda old: replace(old, stop_asked=True))
    services.runs.add_event(
        run_id,
        "requested",
        "stop at once requested" if again else "stop requested, with a checkpoint",
    )
    await _wait_for_launch(services, run_id)
    run = services.runs.get(run_id)
    services.runs.move(run_id, run.attempt, "stopping", "", "")
    grace_s = 0.0 if again else services.settings.number("stop_grace_s")
    async with _reporting(services.pool, run, grace_s, report):
        left = await stop_parts(
            services.pool,
            run.nodes,
            run_id,
            run.attempt,
            grace_s,
            closing=await asyncio.to_thread(services.key.sign_closing, run_id, run.attempt),
        )
    silent = [node for node, error in left.items() if isinstance(error, errors.NodeUnreachable)]
    refused = [error for error in left.values() if not isinstance(error, errors.NodeUnreachable)]
    await reconcile_run(services, run_id)
    # Again: the run may have lost a node just before the stop was stored.
    cancel_recovery(services, run_id)
    # Judged first, so that only a run that is still open is reported or given up.
    if len(silent) == len(run.nodes):
        _handle_unreachable(services, run_id, silent, give_up=again)
    elif refused and services.runs.get(run_id).state in ACTIVE_STATES:
        raise refused[0]


@contextlib.asynccontextmanager
async def _reporting(
    pool: NodePool, run: RunRecord, grace_s: float, report: OnMessage
) -> AsyncIterator[None]:
    """Report inside the block what the ranks of a stopping run still do."""

    async def report_on() -> None:
        said = ""
        while True:
            parts = await ask_parts(pool, run.nodes, run.run_id, run.attempt)
            text = "; ".join(_describe_wait(part) for part in parts if part.active)
            if text and text != said:
                said = text
                report(f"waiting up to {show_duration(grace_s)}: {text}")
            await asyncio.sleep(REPORT_INTERVAL_S)

    task = asyncio.create_task(report_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _describe_wait(part: RunPart) -> str:
    """Return the activity of an active part's ranks, or the message about one that hangs."""
    status = part.status
    if status is None or status.message:
        return status.message.rstrip(".") if status else ""
    ranks = [
        f"rank {rank.rank} is {rank.phase}" + (f" after step {rank.step}" if rank.step else "")
        for rank in status.ranks
        if rank.exit_code is None and rank.phase
    ]
    return f"{part.node}: {', '.join(ranks) or 'its processes end'}"


async def _stop_leftovers(services: Services, run: RunRecord, *, is_needed: bool) -> None:
    """Stop leftovers of an ended run on all nodes.

    Raises:
        UserError: `is_needed`, and the nodes that answer have no leftovers; or one cannot be
            stopped.
    """
    names = services.pool.names()
    answers = await asyncio.gather(*(_find_left(services, node, run.run_id) for node in names))
    grace_s = services.settings.number("stop_grace_s")
    stopped = []
    for node, attempts in zip(names, answers, strict=True):
        for attempt in attempts or ():
            text = f"attempt {attempt} was still running on {node}; it is stopped"
            services.runs.add_event(run.run_id, "warning", text)
            left = await stop_parts(services.pool, [node], run.run_id, attempt, grace_s)
            if node in left:
                raise left[node]
            stopped.append(node)
    if stopped or not is_needed:
        return
    silent = [node for node, left in zip(names, answers, strict=True) if left is None]
    raise errors.UserError(
        f"run {run.run_id} is {run.state}, not active",
        f"There is nothing to stop on the nodes that answer; {show_list(silent)} cannot be reached."
        if silent
        else "There is nothing to stop.",
    )


async def _find_left(services: Services, node: str, run_id: str) -> list[int] | None:
    """Return the attempts of a run with processes on a node, or None if it does not answer."""
    try:
        statuses = (await services.pool.agent(node).ask(ListAttempts())).attempts
    except errors.RacklessError:
        return None
    return [status.attempt for status in active_attempts(statuses) if status.run_id == run_id]


async def _wait_for_launch(services: Services, run_id: str) -> None:
    """Wait for a launch in progress: until its end some parts do not exist yet."""
    for _ in range(int(LAUNCH_TIMEOUT_S / POLL_INTERVAL_S)):
        if not services.is_launching(run_id):
            return
        await asyncio.sleep(POLL_INTERVAL_S)


def _handle_unreachable(
    services: Services, run_id: str, silent: list[str], *, give_up: bool
) -> None:
    """Report that all nodes are silent and the state is unknown, or give the run up."""
    run = services.runs.get(run_id)
    if run.state not in ACTIVE_STATES:
        return
    if not give_up:
        raise errors.UserError(
            f"{show_list(silent)} cannot be reached, so run {run_id} may still be training there",
            "It is stopped as soon as a node answers again. To give it up now, stop it again: "
            f"rackless runs stop {run_id}",
        )
    services.runs.move(
        run_id,
        run.attempt,
        "stopped",
        f"given up: {show_list(silent)} could not be reached; what still runs there is stopped "
        "once it answers again",
        "",
    )


def require_unused(services: Services, node: str) -> None:
    """Check that no active run uses a node.

    Raises:
        UserError: a run does; the message names it.
    """
    for run in services.runs.store.all():
        if run.state in ACTIVE_STATES and node in run.nodes:
            raise errors.UserError(
                f"run {run.run_id} is {run.state} on node {node}",
                f"Stop it first: rackless runs stop {run.run_id}",
            )


async def delete_run(services: Services, run_id: str) -> tuple[str, ...]:
    """Delete a run with its checkpoints everywhere; return the nodes that cannot be reached.

    Those delete it when they come back. Remaining processes of an ended run are stopped.

    Raises:
        UserError: the run is still active, or is being exported, or a node could not delete it;
            then it stays, and can be deleted again.
    """
    # An unsafe name that a lying node made an older version store; no other master has such a run.
    if services.runs.has_unsafe_id(run_id):
        services.runs.forget(run_id)
        return ()
    await reconcile_run(services, run_id)
    run = services.runs.get(run_id)
    if run.state in ACTIVE_STATES:
        raise errors.UserError(
            f"run {run_id} is {run.state} and cannot be deleted",
            f"Stop it first: rackless runs stop {run_id}",
        )
    await asyncio.to_thread(refuse_exported, services, run_id)
    services.remove_link(run_id)
    # Marked as launching so that nothing in this process judges the run meanwhile.
    with services.launching(run_id):
        names = services.pool.names()
        answers = await asyncio.gather(*(_delete_on(services, node, run) for node in names))
        _require_deleted(run_id, dict(zip(names, answers, strict=True)))
        # Its id is remembered, so that nodes that come back later delete it as well.
        services.runs.forget(run_id)
    services.remove_folder(run_id)
    return tuple(
        node for node, error in zip(names, answers, strict=True) if isinstance(error, _NO_ANSWER)
    )


def _require_deleted(run_id: str, answers: Mapping[str, errors.RacklessError | None]) -> None:
    """Raise UserError if a node that answers has kept the run."""
    kept = {n: e for n, e in answers.items() if e and not isinstance(e, _NO_ANSWER)}
    for node, error in kept.items():
        hint = (
            error.hint
            if isinstance(error, errors.UserError)
            else "See the agent's log on that node."
        )
        raise errors.UserError(
            f"run {run_id} could not be deleted on {show_list(list(kept))}: "
            f"{error.message if isinstance(error, errors.UserError) else error}",
            f"{hint.rstrip('.')}. Then delete it again: rackless runs delete {run_id}",
            where=node,
        )


async def _delete_on(services: Services, node: str, run: RunRecord) -> errors.RacklessError | None:
    agent = services.pool.agent(node)
    try:
        for status in active_attempts((await agent.ask(ListAttempts())).attempts):
            if status.run_id != run.run_id:
                continue
            if status.attempt > run.attempt:
                return errors.UserError(
                    f"attempt {status.attempt} is {status.state} there; another master resumed it",
                    f"Stop it there, or from here: rackless runs stop {run.run_id} --node {node}",
                )
            # Without time to save, as its checkpoints are deleted next.
            await agent.ask(StopAttempt(run_id=run.run_id, attempt=status.attempt, grace_s=0.0))
        await agent.ask(DeleteRun(run_id=run.run_id))
    except errors.RacklessError as error:
        return error
    return None
