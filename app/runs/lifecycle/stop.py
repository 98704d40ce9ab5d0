"""Stop and delete runs, without leftovers on any node that answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from agents.contract.election import is_majority
from agents.contract.requests.attempts import ListAttempts, StopAttempt
from agents.contract.requests.runs import DeleteRun, HaltRun
from app import errors
from app.events import ACTIVE_STATES, RunState
from app.filelock import LockHolder
from app.progress import OnMessage
from app.runs.export_claims import claim_deletion, list_exports
from app.runs.lifecycle.election import close_parts
from app.runs.lifecycle.launch_order import record_stop
from app.runs.lifecycle.losses import cancel_recovery
from app.runs.lifecycle.reconcile import reconcile_run
from app.runs.nodes.attempt_status import SILENT_WAIT_S, active_attempts, ask_parts, stop_parts
from app.runs.nodes.node_pool import NodePool
from app.runs.run import RunPart
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import show_duration, show_list

STARTER_S = 3.0
"""Maximum wait for a process that launches the run to end its launch, in seconds."""
HALT_S = 10.0
"""Maximum wait for a node to refuse further launches, in seconds; one that is off takes longer."""
EXPORT_S = 5.0
"""Maximum wait for an export of the run to end, in seconds."""
POLL_INTERVAL_S = 0.1
REPORT_INTERVAL_S = 1.0
# Errors of a node that cannot be asked; its part is ended when it answers again.
_NO_ANSWER = (errors.NodeUnreachable, errors.HostKeyChanged, errors.HostKeyUnknown)
_UNLAUNCHED: frozenset[RunState] = frozenset({"created", "launching"})


async def stop_run(services: Services, run_id: str, report: OnMessage = lambda line: None) -> None:
    """Stop a run: the first call saves a checkpoint, a second call stops at once.

    A launch in progress is ended first, also one by another process, and if that is suspended. Then
    every node refuses what was sent before, and ends the parts that it has. Returns once no process
    of the run is left on any node that answers. If no node answers, the second call gives the run
    up: its processes are stopped when their node comes back.

    Args:
        services: stores and nodes.
        run_id: run to stop.
        report: callback with a sentence on each change of what the stop waits for.

    Raises:
        UserError: the run is not active and has no leftovers, or its nodes cannot be reached.
    """
    run = services.runs.get(run_id)
    # First of all: whoever launches, resumes or exports the run sees it, and `again` is read in it.
    record_stop(services, run_id)
    starter = services.runs.find_starter(run_id)
    exports = list_exports(services, run_id)
    is_cancelled = cancel_recovery(services, run_id, has_starter=starter is not None)
    if is_cancelled:
        await close_parts(services, run)
    is_active, again = run.state in ACTIVE_STATES, run.stop_asked
    if is_active:
        _ask_stop(services, run_id, again=again)
    elif not (is_cancelled or starter or exports):
        await _stop_leftovers(services, run)
        return
    everywhere = starter is not None or not is_active
    halting = asyncio.create_task(_halt(services, run, everywhere=everywhere))
    try:
        if starter is not None:
            starter = await _wait_for_starter(services, run_id, report)
    finally:
        # Connecting takes seconds, so the nodes were asked meanwhile.
        halt = await halting
    run = services.runs.get(run_id)
    if everywhere:  # what the starter did until it ended
        halt = await _halt(services, run, everywhere=True, silent=halt.silent)
    grace_s = 0.0 if again else services.settings.number("stop_grace_s")
    if run.state in _UNLAUNCHED:
        grace_s = 0.0  # nothing has been trained
    left = await _stop_active(services, run, halt.active, grace_s, report)
    await _wait_for_exports(services, run_id, report)
    if starter is not None:
        _say_suspended(services, run_id, starter, report)
    await _record_end(services, run_id, halt.silent, left, give_up=again)


def _ask_stop(services: Services, run_id: str, *, again: bool) -> None:
    # Other masters and later watches repeat the stop to nodes that missed it.
    services.runs.change(run_id, lambda old: replace(old, stop_asked=True))
    services.runs.add_event(
        run_id,
        "requested",
        "stop at once requested" if again else "stop requested, with a checkpoint",
    )


async def _wait_for_starter(
    services: Services, run_id: str, report: OnMessage
) -> LockHolder | None:
    """Wait until the process that launches the run has ended that; return it if it does not."""
    deadline_s = time.monotonic() + STARTER_S
    while (starter := services.runs.find_starter(run_id)) is not None:
        if starter.is_suspended or time.monotonic() > deadline_s:
            return starter
        report(f"waiting for {starter} to end the launch")
        await asyncio.sleep(POLL_INTERVAL_S)
    return None


def _say_suspended(services: Services, run_id: str, starter: LockHolder, report: OnMessage) -> None:
    text = (
        f"{starter} was launching the run and does not answer; it will start nothing. "
        f"{starter.advice}."
    )
    report(text)
    services.runs.add_event(run_id, "warning", text)


@dataclass(frozen=True, slots=True)
class _Halt:
    """Answers of the nodes to the request to start nothing of a run any more."""

    active: Mapping[str, tuple[int, ...]]
    """Attempts with processes on each node that answered."""
    silent: Mapping[str, errors.RacklessError]
    """Errors of the nodes that could not be asked."""


async def _halt(
    services: Services,
    run: RunRecord,
    *,
    everywhere: bool,
    silent: Mapping[str, errors.RacklessError] = MappingProxyType({}),
) -> _Halt:
    """Make the nodes of a run, or all nodes, refuse its known attempts; skip `silent` ones."""
    known = [name for name in services.pool.names() if name not in silent]
    own = [node for node in run.nodes if node in known]
    names = list(dict.fromkeys([*own, *(known if everywhere else ())]))
    request = HaltRun(run_id=run.run_id, attempt=_newest(run))
    asked = {name: asyncio.create_task(_ask_halt(services, name, request)) for name in names}
    if own:
        await asyncio.wait([asked[node] for node in own], timeout=HALT_S)
    # A resume may use other nodes, too; one of them that is off must not delay the stop.
    if asked:
        await asyncio.wait(asked.values(), timeout=SILENT_WAIT_S)
    active: dict[str, tuple[int, ...]] = {}
    missing = {node: silent.get(node) or _removed(node) for node in run.nodes if node not in known}
    for node, task in asked.items():
        answer = task.result() if task.done() else _no_answer(node)
        task.cancel()
        if isinstance(answer, _NO_ANSWER):
            missing[node] = answer
        elif isinstance(answer, errors.RacklessError):
            # A node that answers has to end its part, although it could not note the stop.
            active[node] = (run.attempt,) if node in run.nodes else ()
        else:
            active[node] = answer
    return _Halt(active=active, silent={**silent, **missing})


def _newest(run: RunRecord) -> int:
    """Return the newest attempt that may have been launched."""
    # While a resume is in progress, the next number is the one that must not start.
    return run.attempt + (run.state not in ACTIVE_STATES)


async def _ask_halt(
    services: Services, node: str, request: HaltRun
) -> tuple[int, ...] | errors.RacklessError:
    try:
        return (await services.pool.agent(node).ask(request)).active
    except errors.RacklessError as error:
        return error


def _removed(node: str) -> errors.NodeUnreachable:
    return errors.NodeUnreachable(f"node {node} was removed", "Add it again to stop its part.")


def _no_answer(node: str) -> errors.NodeUnreachable:
    return errors.NodeUnreachable(
        f"{node} did not answer within {HALT_S:.0f} s", "Check that PC.", where=node
    )


async def _stop_active(
    services: Services,
    run: RunRecord,
    active: Mapping[str, tuple[int, ...]],
    grace_s: float,
    report: OnMessage,
) -> dict[str, errors.RacklessError]:
    """Stop all attempts with processes; return the errors by node."""
    parts = [(node, attempt) for node, attempts in active.items() for attempt in attempts]
    if not parts:
        return {}
    if run.state in ACTIVE_STATES:
        services.runs.move(run.run_id, run.attempt, "stopping", "", "")
    closings: dict[int, str] = {}
    for attempt in {attempt for _, attempt in parts}:
        listed = [node for node, attempts in active.items() if attempt in attempts]
        # One node alone may name future attempts, whose recovery it could then prevent.
        if attempt <= _newest(run) or is_majority(listed, run.nodes):
            sign = services.key.sign_closing
            closings[attempt] = await asyncio.to_thread(sign, run.run_id, attempt)
    async with _reporting(services.pool, run, grace_s, report):
        answers = await asyncio.gather(
            *(
                # An attempt that another one has replaced has nothing to save.
                stop_parts(
                    services.pool,
                    [node],
                    run.run_id,
                    attempt,
                    grace_s if attempt >= run.attempt else 0.0,
                    closing=closings.get(attempt, ""),
                )
                for node, attempt in parts
            )
        )
    return {node: error for answer in answers for node, error in answer.items()}


async def _wait_for_exports(services: Services, run_id: str, report: OnMessage) -> None:
    """Wait until the exports of the run have seen the stop."""
    deadline_s = time.monotonic() + EXPORT_S
    while (exports := list_exports(services, run_id)) and time.monotonic() < deadline_s:
        report(f"waiting for an export of the run by {exports[0]} to end")
        # A suspended one cannot see the stop, and its node would go on working.
        for holder in exports:
            holder.wake()
        await asyncio.sleep(POLL_INTERVAL_S)
    for holder in exports:
        text = (
            f"{holder} was exporting the run and does not answer; the export ends once that "
            f"process continues. {holder.advice}."
        )
        report(text)
        services.runs.add_event(run_id, "warning", text)


async def _record_end(
    services: Services,
    run_id: str,
    silent: Mapping[str, errors.RacklessError],
    left: Mapping[str, errors.RacklessError],
    *,
    give_up: bool,
) -> None:
    """Store the end of the run, or raise why it has not ended everywhere."""
    run = services.runs.get(run_id)
    refused = [error for error in left.values() if not isinstance(error, errors.NodeUnreachable)]
    lost = [node for node in run.nodes if node in silent or node in left]
    if run.state in _UNLAUNCHED and not lost:
        # Not judged: a part that was never launched would look lost.
        hint = f"Resume it: rackless runs resume {run_id}"
        services.runs.move(run_id, run.attempt, "stopped", "stopped while it was launched", hint)
    # Judged first, so that only a run that is still open is reported or given up.
    with contextlib.suppress(errors.LockHeld):
        await reconcile_run(services, run_id, silent=tuple(silent))
    # Again: the run may have lost a node just before the stop was stored.
    cancel_recovery(services, run_id)
    run = services.runs.get(run_id)
    if run.state not in ACTIVE_STATES:
        return
    if refused:
        raise refused[0]
    if len(lost) == len(run.nodes):
        _handle_unreachable(services, run_id, lost, give_up=give_up)
    elif not lost:
        # A process that was suspended while it launched the run still holds its claim, so nothing
        # was judged; but every node has ended its part.
        services.runs.move(run_id, run.attempt, "stopped", "", "")


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


async def _stop_leftovers(services: Services, run: RunRecord) -> None:
    """Stop leftovers of an ended run on all nodes.

    Raises:
        UserError: the nodes that answer have no leftovers, or one cannot be stopped.
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
    if stopped:
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
    services.remove_link(run_id)
    # Marked as launching so that nothing in this process judges the run meanwhile.
    with claim_deletion(services, run_id), services.launching(run_id):
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
