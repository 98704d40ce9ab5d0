"""Reconcile the stored runs with the reports of the nodes, once per call.

This finds a run again after its master was killed, restores the runs of a lost database, records
attempts that nodes have started themselves, and stops zombies (old attempts on a node that
returns). Only attempts of this home's runs count, see `app.runs.belief`; others are only shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from agents.contract.mandate import ProvedAttempt
from agents.contract.requests.runs import DeleteRun
from agents.contract.run import AttemptStatus, RankPlacement
from agents.contract.spec import RunSpec
from app.errors import RacklessError
from app.events import ACTIVE_STATES, RunEventKind, RunState
from app.runs.belief import (
    believed_attempts,
    find_foreign,
    judge_statuses,
    most_common,
    place_ranks_of,
    prove_attempt,
)
from app.runs.journals.streams import sync_part, sync_parts
from app.runs.lifecycle import election
from app.runs.lifecycle.confirmation import confirm_parts
from app.runs.lifecycle.losses import hint_of_loss, note_loss
from app.runs.nodes import attempt_status
from app.runs.run import RunPart, Situation, StateJudgement, judge, may_move
from app.runs.services import Services
from app.storage.runs import AttemptRecord, RunRecord, Taken
from app.text import show_list

_log = logging.getLogger(__name__)

# A zombie has nothing worth saving: the run has continued elsewhere.
ZOMBIE_GRACE_S = 5.0
LOSS_GRACE_S = 20.0
"""Time for the ranks that survive a loss to save their state, in seconds."""
# Time for the request to arrive; the node then stops its part without the master.
STOP_REQUEST_S = 2.0
_EVENT_KINDS: dict[RunState, RunEventKind] = {"failed": "failed", "interrupted": "interrupted"}


async def reconcile_run(services: Services, run_id: str, silent: Collection[str] = ()) -> None:
    """Query the run's nodes, fetch their journals, judge the run, and act on the judgement.

    Nodes that are known to be `silent` are not asked again, which would take a while.
    """
    run = services.runs.get(run_id)
    if run.state not in ACTIVE_STATES:
        return
    if end_unsafe(services, run):
        return
    # Parts that this process has not launched yet would look lost.
    if services.is_launching(run_id):
        return
    # Stored, but neither launched nor being launched: its master died before the intent.
    if run.state == "created":
        services.runs.move(
            run_id,
            run.attempt,
            "failed",
            "the start was interrupted before any node was asked",
            f"Start it: rackless runs resume {run_id}",
        )
        return
    asked = [node for node in run.nodes if node not in silent]
    answers = await attempt_status.ask_parts(services.pool, asked, run_id, run.attempt)
    found = {part.node: part for part in answers}
    parts = tuple(found.get(node) or RunPart(node=node, silent_s=0.0) for node in run.nodes)
    # Journals first: the judgement needs the newest step and checkpoint in them.
    await sync_run(services, run, [part.node for part in parts if part.answers])
    services.runs.refresh(run_id)
    services.runs.save_progress(run_id)
    lost_after_s = services.settings.number("lost_after_s")
    # A single query does not show how long a node has been silent, but the others' heartbeats show
    # how long they have waited for it.
    patient = tuple(p if p.answers else replace(p, silent_s=lost_after_s) for p in parts)
    await apply_judgement(services, run, patient, attempt_status.idle_s(parts))


async def refresh_run(services: Services, run_id: str) -> None:
    """Reconcile a run, and adopt newer attempts or regroupings of its own nodes."""
    await reconcile_run(services, run_id)
    await adopt_newer(services, services.runs.get(run_id))


def end_unsafe(services: Services, run: RunRecord) -> bool:
    """End a stored run whose names lead out of our folder; return True if it is such a run."""
    unsafe = services.runs.why_unsafe(run)
    if unsafe is not None:
        services.runs.move(run.run_id, run.attempt, "failed", unsafe.message, unsafe.hint)
    return unsafe is not None


async def apply_judgement(
    services: Services, run: RunRecord, parts: tuple[RunPart, ...], idle: float
) -> StateJudgement:
    """Judge a run by its parts, then stop parts and store the new state as judged."""
    from app.runs.lifecycle.takeover import note_takeover, part_statuses  # lists do not need it

    note_takeover(services, run, part_statuses(parts))
    verdict = judge(make_situation(services, run, parts, idle))
    if run.stop_asked:
        await _repeat_stop(services, run, parts)
    if verdict.state not in ACTIVE_STATES:
        async with election.keeping_parts(services, run):
            await _end_parts(services, run, verdict)
            await _close(services, run, parts, verdict)
    elif may_move(run.state, verdict.state):
        if verdict.state == "running" and services.runs.is_ours(run):
            # Its launcher could not confirm, or died. All parts exist, so there is nothing to wait
            # for.
            await confirm_parts(services.pool, parts, run.run_id, run.attempt)
        services.runs.move(run.run_id, run.attempt, verdict.state, verdict.message, verdict.hint)
    return verdict


async def _end_parts(services: Services, run: RunRecord, verdict: StateJudgement) -> None:
    # Another master ends the parts of its own run.
    if verdict.stop and services.runs.is_ours(run):
        grace_s = ZOMBIE_GRACE_S if run.stop_asked else LOSS_GRACE_S
        at_loss = not run.stop_asked
        await attempt_status.stop_parts(
            services.pool, verdict.stop, run.run_id, run.attempt, grace_s, at_loss=at_loss
        )


def make_situation(
    services: Services, run: RunRecord, parts: tuple[RunPart, ...], idle: float
) -> Situation:
    snapshot = services.runs.full_snapshot(run.run_id)
    steps = [s for s in (snapshot.step, attempt_status.newest_step(parts)) if s is not None]
    return Situation(
        parts=parts,
        stop_asked=run.stop_asked,
        launching=services.is_launching(run.run_id),
        is_ours=services.runs.is_ours(run),
        step=max(steps, default=None),
        idle_s=idle,
        lost_after_s=services.settings.number("lost_after_s"),
        checkpoint_step=snapshot.newest_checkpoint_step,
        now_s=time.time(),
    )


async def sync_run(
    services: Services, run: RunRecord, nodes: Sequence[str]
) -> dict[str, RacklessError]:
    """Fetch the new bytes of the run's newest attempt; return the errors by node."""
    mirrors = {node: services.runs.mirror(run.run_id, run.attempt, node) for node in nodes}
    return await sync_parts(services.pool, mirrors, run.run_id, run.attempt)


async def sync_attempts(services: Services, run: RunRecord) -> None:
    """Fetch the missing bytes of every attempt, including those that ran unwatched."""
    await sync_run(services, run, run.nodes)
    known = services.pool.names()
    for attempt in services.runs.store.attempts(run.run_id):
        nodes = {place.node for place in attempt.placements if place.node in known}
        if attempt.attempt != run.attempt:
            earlier = replace(run, attempt=attempt.attempt)
            await sync_run(services, earlier, sorted(nodes))


async def _repeat_stop(services: Services, run: RunRecord, parts: Sequence[RunPart]) -> None:
    """Repeat a stop request: its master may have died before it reached all nodes."""
    unaware = [p.node for p in parts if p.active and p.status and p.status.state != "stopping"]
    grace_s = services.settings.number("stop_grace_s")
    # The node continues to stop once it has read the request, so its answer is not needed.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_REQUEST_S):
            await attempt_status.stop_parts(
                services.pool, unaware, run.run_id, run.attempt, grace_s
            )


async def _close(
    services: Services, run: RunRecord, parts: Sequence[RunPart], verdict: StateJudgement
) -> None:
    """Store the end of an attempt, after fetching its journals to the last byte."""
    is_shared = any(part.status is not None and part.status.election for part in parts)
    if is_shared and await adopt_newer(services, run):
        return
    await sync_run(services, run, [part.node for part in parts if part.answers])
    services.runs.refresh(run.run_id)
    message, hint = verdict.message, verdict.hint
    # Before the move, so that a stop that then finds an ended run also finds its loss.
    is_loss = verdict.state in ("failed", "interrupted")
    step = attempt_status.newest_step(parts)
    if is_loss and note_loss(services, run, verdict.cause, step, verdict.message):
        hint = hint_of_loss(run.run_id)
    elif verdict.state == "stopped" and services.recoveries.is_pending(run.run_id):
        text = "stopped at a checkpoint so that nodes can join; it continues automatically"
        message, hint = f"{text}. {message}".rstrip(". "), hint_of_loss(run.run_id)
    elif is_loss:
        await election.close_parts(services, run)
    moved = services.runs.move(run.run_id, run.attempt, verdict.state, message, hint)
    # Several masters may see the same end: only the one that stored it learns from it and reports
    # it.
    if moved:
        services.hooks.learn(services.runs.get(run.run_id))
    if moved and verdict.message:
        kind = _EVENT_KINDS.get(verdict.state, "warning")
        services.runs.add_event(run.run_id, kind, verdict.message)


# ---------------------------------------------------------------- runs that the store has lost


async def search_nodes(services: Services, nodes: Sequence[str]) -> tuple[str, ...]:
    """Ask nodes for all attempts, add lost runs of this home, stop zombies; return silent nodes."""
    answers = await attempt_status.list_attempts(services.pool, nodes)
    found: dict[str, list[AttemptStatus]] = {}
    for status in attempt_status.by_node(answers):
        found.setdefault(status.run_id, []).append(status)
    doubted: dict[str, list[AttemptStatus]] = {node: [] for node in answers}
    for run_id, listed in found.items():
        belief = await asyncio.to_thread(judge_statuses, services, run_id, listed)
        for status in belief.doubted:
            doubted[status.node].append(status)
        statuses = belief.believed
        if not statuses:
            continue
        # A run that cannot be stored must not hide the others.
        try:
            await take_in(services, run_id, statuses)
        except RacklessError as error:
            _log.warning("run %s of %s cannot be taken over: %s", run_id, statuses[0].node, error)
    foreign = await asyncio.gather(
        *(asyncio.to_thread(find_foreign, services, one) for one in doubted.values())
    )
    services.runs.set_found(dict(zip(doubted, foreign, strict=True)))
    return tuple(node for node in nodes if node not in answers)


async def adopt_newer(services: Services, run: RunRecord) -> bool:
    """Adopt a newer attempt, or a regrouping, that the run's own nodes have started.

    Returns True if there was one.
    """
    known = set(services.pool.names())
    answers = await attempt_status.list_attempts(
        services.pool, [node for node in run.nodes if node in known]
    )
    listed = attempt_status.by_node(answers)
    found = await asyncio.to_thread(believed_attempts, services, run.run_id, listed)
    newer = [s for s in attempt_status.active_attempts(found) if s.attempt > run.attempt]
    if election.find_self_started(services, run, newer) is None:
        # What is left of a stopped run is ended, by a resume or once its nodes are searched.
        return not _was_stopped(services, run) and election.adopt_regrouped(services, run, found)
    await take_in(services, run.run_id, found)
    return services.runs.get(run.run_id).attempt > run.attempt


async def take_in(services: Services, run_id: str, statuses: Sequence[AttemptStatus]) -> None:
    """Take in attempts of a run of this home, or of one that the user trusts."""
    runs = services.runs
    if runs.store.is_deleted(run_id):
        await _end_deleted(services, run_id, statuses)
        return
    newest = max(status.attempt for status in statuses)
    run = runs.store.get(run_id)
    if run is None:
        run = _add_found(services, run_id, [s for s in statuses if s.attempt == newest])
    # Another master, or its own nodes, have resumed the run.
    elif newest > run.attempt and not services.is_launching(run_id):
        later = [s for s in statuses if s.attempt == newest]
        if not _missed_stop(services, run, later):
            adopt_attempt(services, run, later)
            run = runs.get(run_id)
    if run is None:
        return
    from app.runs.lifecycle.takeover import note_takeover

    note_takeover(services, run, statuses)
    await _mirror_all(services, run, statuses)
    await _end_zombies(services, run, statuses)
    await reconcile_run(services, run_id)


def _missed_stop(services: Services, run: RunRecord, later: Sequence[AttemptStatus]) -> bool:
    """Return whether nodes started an attempt because they missed that the user stopped the run."""
    if not _was_stopped(services, run) or election.find_self_started(services, run, later) is None:
        return False
    proved = _find_proof(services, later)
    # A store that was restored may lack a later launch of this home, which the nodes recovered.
    return proved is None or proved.mandate.attempt <= run.attempt


def _was_stopped(services: Services, run: RunRecord) -> bool:
    # A run that stops at a checkpoint for nodes to join continues automatically.
    return run.state == "stopped" and not services.recoveries.is_pending(run.run_id)


def _add_found(
    services: Services, run_id: str, newest: Sequence[AttemptStatus]
) -> RunRecord | None:
    """Add a run of this home that only the nodes remember, with the settings that were signed."""
    proved = _find_proof(services, newest)
    if proved is None:
        return None
    services.runs.store.trust(run_id, proved.master_key)
    text = f"found again on {show_list([status.node for status in newest])}"
    return add_run(services, proved.mandate.spec, newest, text, proved=proved)


def _find_proof(services: Services, statuses: Iterable[AttemptStatus]) -> ProvedAttempt | None:
    proofs = (prove_attempt(services, status) for status in statuses)
    return next((one for one in proofs if one is not None), None)


def add_run(
    services: Services,
    spec: RunSpec,
    newest: Sequence[AttemptStatus],
    text: str,
    *,
    proved: ProvedAttempt | None,
) -> RunRecord:
    """Add a run that nodes list, with an event.

    Args:
        services: stores and nodes.
        spec: settings of the run.
        newest: its newest attempt on each node.
        text: sentence of the event.
        proved: verified proof of that attempt; None: the user has accepted what is listed.
    """
    run_id = newest[0].run_id
    nodes, _ = _find_places(newest, proved)
    started_s = min((s.started_s for s in newest if s.started_s), default=None)
    run = RunRecord(
        run_id=run_id,
        name=spec.name,
        state="running",
        spec=spec,
        attempt=newest[0].attempt,
        nodes=nodes,
        created_s=started_s or time.time(),
        started_s=started_s,
        ended_s=_find_end(newest),
    )
    services.runs.add(run)
    _save_attempt(services, run, newest, proved)
    services.runs.add_event(run_id, "found", text)
    return run


def _find_places(
    newest: Sequence[AttemptStatus], proved: ProvedAttempt | None
) -> tuple[tuple[str, ...], tuple[RankPlacement, ...]]:
    """Return nodes and ranks of an attempt."""
    if proved is not None:
        return proved.nodes, place_ranks_of(proved, newest)
    ranks = most_common(newest, lambda status: status.all_ranks)
    return tuple(dict.fromkeys(place.node for place in ranks)) or (newest[0].node,), ranks


def _find_end(statuses: Sequence[AttemptStatus]) -> float | None:
    """Return the end of an attempt on its last node, or None if it has not ended or is unknown."""
    ends_s = [status.ended_s for status in statuses]
    known_s = [end_s for end_s in ends_s if end_s is not None]
    return max(known_s) if known_s and len(known_s) == len(ends_s) else None


def adopt_attempt(services: Services, run: RunRecord, newest: Sequence[AttemptStatus]) -> None:
    """Store a newer attempt that another master or the run's own nodes have launched."""
    proved = _find_proof(services, newest)
    nodes, _ = _find_places(newest, proved)
    plan = election.find_self_started(services, run, newest)
    before = next(
        (one for one in services.runs.store.attempts(run.run_id) if one.attempt == run.attempt),
        None,
    )
    if plan is None:
        services.recoveries.forget_earlier(run.run_id, "replaced")
    # A guess, corrected by the following reconciliation.
    state: RunState = "running"
    # Launched by this home itself, and its store was restored to an earlier state.
    is_relaunch = plan is None and _is_ours(services, proved)
    spec = proved.mandate.spec if proved is not None and is_relaunch else run.spec
    services.runs.change(
        run.run_id,
        lambda old: replace(
            old,
            attempt=newest[0].attempt,
            nodes=nodes,
            spec=spec,
            state=state,
            message="",
            ended_s=None,
        ),
    )
    adopted = services.runs.get(run.run_id)
    earlier = services.runs.store.attempts(run.run_id)
    # Its nodes continue with this master's inputs, so the run stays this master's.
    inputs = next((one.inputs for one in earlier if one.inputs), {}) if plan is not None else {}
    # A takeover stays one, by this master or another.
    taken: Taken = before.taken if before is not None else ""
    if plan is None and taken != "away":
        taken = ""
    _save_attempt(services, adopted, newest, proved, inputs, taken)
    if plan is not None:
        election.record_election(services, adopted, plan)


def _is_ours(services: Services, proved: ProvedAttempt | None) -> bool:
    return proved is not None and proved.master_key == services.key.public


def _save_attempt(
    services: Services,
    run: RunRecord,
    newest: Sequence[AttemptStatus],
    proved: ProvedAttempt | None,
    inputs: dict[str, Any] | None = None,
    taken: Taken = "",
) -> None:
    services.runs.store.save_attempt(
        # Found attempts are recognised by missing inputs; but one that this master launched before
        # it lost its database is still its own.
        AttemptRecord(
            run_id=run.run_id,
            attempt=run.attempt,
            placements=_find_places(newest, proved)[1],
            resume_step=most_common(newest, lambda status: status.resume_step),
            launched_s=newest[0].started_s or time.time(),
            inputs=inputs or {},
            taken=taken or ("here" if _is_ours(services, proved) else ""),
            is_signed=proved is not None,
        )
    )


async def _mirror_all(
    services: Services, run: RunRecord, statuses: Sequence[AttemptStatus]
) -> None:
    """Fetch the journals of every attempt on the nodes, including ended ones."""
    for status in statuses:
        mirror = services.runs.mirror(run.run_id, status.attempt, status.node)
        agent = services.pool.agent(status.node)
        with contextlib.suppress(RacklessError):
            await sync_part(agent, mirror, run.run_id, status.attempt)
    services.runs.refresh(run.run_id)


async def _end_zombies(
    services: Services, run: RunRecord, statuses: Sequence[AttemptStatus]
) -> None:
    """Stop attempts that still run although the run has ended or a newer attempt exists."""
    # The store may still name the previous attempt; a resume stops leftovers itself.
    if services.is_launching(run.run_id):
        return
    records = {one.attempt: one for one in services.runs.store.attempts(run.run_id)}
    for status in attempt_status.active_attempts(statuses):
        if status.attempt == run.attempt and run.state in ACTIVE_STATES:
            continue
        record = records.get(status.attempt)
        is_ours = (
            record.is_ours
            if record
            else services.key.prove(status) is not None
            or election.find_self_started(services, run, [status]) is not None
        )
        if not is_ours:  # adopted: its own master ends it
            continue
        services.runs.add_event(
            run.run_id,
            "warning",
            f"attempt {status.attempt} was still running on {status.node}; it is stopped",
        )
        closing = await asyncio.to_thread(services.key.sign_closing, run.run_id, status.attempt)
        await attempt_status.stop_parts(
            services.pool,
            [status.node],
            run.run_id,
            status.attempt,
            ZOMBIE_GRACE_S,
            closing=closing,
        )
    # A node that was cut off waits for the others, which have continued without it.
    await election.close_replaced(services, run, statuses)


async def _end_deleted(services: Services, run_id: str, statuses: Sequence[AttemptStatus]) -> None:
    # Without grace: there is nothing to save, as the checkpoints are deleted next.
    for status in attempt_status.active_attempts(statuses):
        await attempt_status.stop_parts(services.pool, [status.node], run_id, status.attempt, 0.0)
    for node in {status.node for status in statuses}:
        try:
            await services.pool.agent(node).ask(DeleteRun(run_id=run_id))
        except RacklessError as error:  # tried again when the node is back online
            _log.warning("run %s could not be deleted on %s: %s", run_id, node, error)
