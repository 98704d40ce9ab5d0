"""Resume a run from its newest intact checkpoint, on the same nodes or on others.

The order matters. First the remains of the old attempt may save their state and end; then the new
attempt number is raised as a fence on every node that answers, so that an old attempt can no longer
commit a checkpoint; then leftovers that came back meanwhile are stopped; then a checkpoint is
chosen and copied to the nodes that lack it; only then is anything launched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agents.contract.election import is_majority
from agents.contract.requests.attempts import ListAttempts
from agents.contract.requests.runs import RaiseFence
from agents.contract.run import AttemptStatus
from agents.contract.spec import Parallel, RunSpec, list_named, split_place
from app.errors import NodeUnreachable, RunStopped, UsageError, UserError
from app.events import RESUMABLE_STATES
from app.progress import OnMessage
from app.runs import preflight
from app.runs.belief import believed_attempts, judge_statuses
from app.runs.inputs.run_inputs import Inputs, recall_inputs, send_inputs
from app.runs.lifecycle.election import (
    adopt_regrouped,
    claim_attempt,
    most_believed,
    require_majority,
)
from app.runs.lifecycle.launch import launch
from app.runs.lifecycle.launch_order import LaunchOrder, take_order, unless_stopped
from app.runs.lifecycle.reconcile import LOSS_GRACE_S
from app.runs.lifecycle.resume_verification import count_logged, read_replay, require_replayable
from app.runs.lifecycle.start_point import delete_copies, prepare_checkpoint
from app.runs.lifecycle.takeover import require_not_taken
from app.runs.nodes.attempt_status import active_attempts, by_node, list_attempts, stop_parts
from app.runs.rejoin import REJOIN, find_absent, find_failed_join
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import show_list

# Fenced ranks cannot commit a checkpoint any more, so there is nothing to wait for.
LEFTOVER_GRACE_S = 5.0
MAX_FENCE_ROUNDS = 5
"""Maximum number of times that the nodes are asked for the next number: a node may name a higher
one each time, and refuses the launch itself if that is true."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Automatic:
    """Options of a resume that the user did not request."""

    may_join: bool = True
    """True if it may use nodes that the lost attempt did not have."""
    without: frozenset[str] = frozenset()
    """Nodes to leave out, if the others suffice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Settings that change with a resume; None to keep them."""

    learning_rate: float | None = None
    """Rate before warm-up and decay."""
    parallel: Parallel | None = None
    """Parallelism mode."""


_UNCHANGED = Changes()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Choices of the user for one resume."""

    checkpoint: int | None = None
    """Step to resume from; None for the newest intact one."""
    nodes: tuple[str, ...] | None = None
    """Nodes to use; None for the answering nodes of the last attempt."""
    verify_steps: int | None = None
    """Resume from a checkpoint with this many logged steps after it, and compare them with the
    steps of the new attempt; None to compare nothing."""
    changes: Changes = _UNCHANGED
    """Settings that change from now on."""


async def resume_run(
    services: Services,
    run_id: str,
    choices: Choices,
    report: OnMessage = lambda line: None,
    *,
    automatic: Automatic | None = None,
    order: LaunchOrder | None = None,
) -> None:
    """Launch the next attempt of a run whose stored state is fresh, see `refresh_run`.

    Args:
        services: stores and nodes.
        run_id: run to resume.
        choices: choices of the user.
        report: callback with a sentence on each stage.
        automatic: options of a resume without the user: a pending loss must allow it, also just
            before the launch, and an attempt of another master is left alone.
        order: order of this resume among the stops of the run; None: it is asked for now.

    Raises:
        RunStopped: the user stopped the run meanwhile; no part of it is left.
        UserError: the run is active or done, no node answers, the checkpoint is missing, too few
            steps are logged after it, or saved checkpoints cannot be reached.
    """
    if choices.verify_steps is not None:
        require_replayable(choices.verify_steps)
    order = order or take_order(services, run_id)
    run = _read_resumable(services, run_id)
    _choose_spec(run.spec, choices.nodes, choices.changes)
    inputs = await asyncio.to_thread(recall_inputs, services, run)
    with services.launching(run_id):
        # Read again: another process may have resumed it before this one got the lock.
        run = _read_resumable(services, run_id)
        try:
            async with unless_stopped(services, order):
                await _resume(services, run, inputs, order, automatic, choices, report)
        except RunStopped as stopped:
            _note_stop(services, run, stopped)
            raise


def _note_stop(services: Services, run: RunRecord, stopped: RunStopped) -> None:
    """Move a run whose resume was stopped to `stopped`, unless its launch has done so."""
    message = stopped.message.removeprefix(f"run {run.run_id} was ")
    now = services.runs.store.get(run.run_id)
    if now is not None and (now.state != "stopped" or now.attempt == run.attempt):
        hint = f"Resume it: rackless runs resume {run.run_id}"
        services.runs.move(run.run_id, now.attempt, "stopped", message, hint)
        services.runs.add_event(run.run_id, "requested", message)


async def _resume(
    services: Services,
    run: RunRecord,
    inputs: Inputs,
    order: LaunchOrder,
    automatic: Automatic | None,
    wanted: Choices,
    report: OnMessage,
) -> None:
    """Launch the next attempt of a run whose launch this process has claimed."""
    run_id, changes, verify_steps = run.run_id, wanted.changes, wanted.verify_steps
    order.phase = "looked for its nodes"
    if automatic is None:
        services.recoveries.forget_earlier(run_id, "replaced")
    else:
        changes = Changes(learning_rate=_choose_rate(services, run))
    spec = _choose_spec(run.spec, wanted.nodes, changes)
    team = await _choose_team(services, run, wanted.nodes, automatic)
    report(f"checking {show_list(team.nodes)}")
    attempt, team = await _end_earlier(services, run, team)
    plan = await _plan(services, run, spec, team)
    order.phase = "copied its checkpoint"
    report("choosing a checkpoint and copying it to every node")
    step, void = await prepare_checkpoint(
        services, run_id, wanted.checkpoint, plan.nodes, tuple(team.seen), verify_steps
    )
    # An automatic resume repeats these steps anyway; at another rate, their losses would differ.
    if automatic is not None and step is not None and changes.learning_rate is None:
        verify_steps = count_logged(services, run_id, step)
    replay = None
    if step is not None and verify_steps:
        replay = await asyncio.to_thread(read_replay, services, run_id, step, verify_steps)
    order.phase = "sent files"
    # Without the user, another try chooses among the nodes that answer by then.
    patience_s = services.settings.number("lost_after_s") if automatic is None else 0.0
    folders = await send_inputs(services, plan.nodes, inputs, report, plan, patience_s=patience_s)
    if automatic is not None:
        _require_pending(services, run_id)
    await delete_copies(services, void)  # last: everything else that can fail has succeeded
    report(f"launching on {show_list(plan.nodes)}")
    next_run = replace(run, attempt=attempt, spec=_keep_shares(spec, plan))
    await launch(services, next_run, plan, inputs, folders, order, step, replay)
    services.runs.change(run_id, lambda old: replace(old, spec=spec))
    _report_changes(services, run, spec, (step or 0) + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Team:
    """Nodes of the next attempt, and the attempts on all nodes."""

    nodes: tuple[str, ...]
    seen: Mapping[str, tuple[AttemptStatus, ...]]
    """Attempts on each node that answers and can take part."""
    is_shared: bool
    """True if the nodes of the run may recover it as well, so that a majority has to agree."""


async def _choose_team(
    services: Services, run: RunRecord, wanted: tuple[str, ...] | None, how: Automatic | None
) -> _Team:
    """Ask all nodes, and choose those of the next attempt.

    Raises:
        UserError: no node of the run answers, or others have resumed it or may do so.
    """
    seen = await list_attempts(services.pool, services.pool.names())
    named = by_node(seen)
    require_not_taken(services, run, named)
    if how is None:
        if wanted is not None:
            chosen = preflight.choose_named(wanted, services.pool.names())
        else:
            chosen = await _require_any(services, run, [node for node in run.nodes if node in seen])
        return _Team(nodes=chosen, seen=seen, is_shared=False)
    _require_pending(services, run.run_id)
    belief = await asyncio.to_thread(judge_statuses, services, run.run_id, named)
    ours = belief.believed
    _require_not_resumed(services, run, ours)
    trusted = _leave_out_doubted(services, run, tuple(seen), belief.doubted)
    trusted = _leave_out_refusing(services, run, trusted, how.without)
    usable = await _leave_out_unusable(services, run.run_id, trusted)
    return _Team(
        nodes=await _choose_automatically(services, run, usable, how),
        seen={node: seen[node] for node in usable},
        is_shared=any(s.attempt == run.attempt and s.election is not None for s in ours),
    )


def _leave_out_doubted(
    services: Services, run: RunRecord, nodes: tuple[str, ...], doubted: Sequence[AttemptStatus]
) -> tuple[str, ...]:
    """Return the nodes without attempts of this run that nothing proves; an event names others."""
    # Such an attempt may hold the devices or refuse the next number, and is not ours to stop.
    found = {s.node: s.attempt for s in sorted(doubted, key=lambda s: s.attempt)}
    for node, attempt in found.items():
        text = (
            f"{node} is left out: it lists an attempt {attempt} of this run, which is not of this "
            f"home. See what it is: rackless runs found"
        )
        services.runs.add_event(run.run_id, "warning", text)
    return tuple(node for node in nodes if node not in found)


def _leave_out_refusing(
    services: Services, run: RunRecord, nodes: tuple[str, ...], refusing: frozenset[str]
) -> tuple[str, ...]:
    """Return the nodes without those that refuse to launch, if a majority of the run is left."""
    kept = tuple(node for node in nodes if node not in refusing)
    gone = [node for node in nodes if node in refusing]
    if not gone or not is_majority(kept, run.nodes):
        return nodes
    text = f"{show_list(gone)} is left out: it has refused to launch its part"
    services.runs.add_event(run.run_id, "warning", text)
    return kept


async def _end_earlier(services: Services, run: RunRecord, team: _Team) -> tuple[int, _Team]:
    """End the remains of earlier attempts; return the number of the next one, and its nodes."""
    # Before the fence, behind which they could no longer save.
    await _stop_leftovers(services, run.run_id, team.seen, LOSS_GRACE_S, at_loss=True)
    claimed = run.attempt + 1
    if team.is_shared:
        claimed, granted = await claim_attempt(services, run, team.nodes)
        # Nodes that join had no part in the lost attempt, and are not asked.
        chosen = tuple(n for n in team.nodes if n in granted or n not in run.nodes)
        team = replace(team, nodes=chosen)
    nodes = tuple(team.seen)
    attempt = await _raise_fence(services, run, nodes, claimed, is_claimed=team.is_shared)
    # Asked again: an old part may have come back meanwhile.
    left = await list_attempts(services.pool, nodes)
    await _stop_leftovers(services, run.run_id, left, LEFTOVER_GRACE_S)
    return attempt, team


async def _plan(
    services: Services, run: RunRecord, spec: RunSpec, team: _Team
) -> preflight.LaunchPlan:
    """Return the plan of the next attempt with its forecast."""
    # Nodes that answer keep their listed GPUs; a node that joins brings all of its own.
    listed = () if spec.nodes == "all" else spec.nodes
    kept = [entry for entry in listed if split_place(entry)[0] in team.nodes]
    others = [node for node in team.nodes if node not in list_named(kept)]
    asked = replace(spec, nodes=(*kept, *others))
    plan = await preflight.plan_launch(services, asked, team.nodes, run.run_id)
    if team.is_shared:
        require_majority(run, plan.nodes)
    return plan


def _keep_shares(spec: RunSpec, plan: preflight.LaunchPlan) -> RunSpec:
    fits = len(spec.shares or ()) == len(plan.ranks)
    return spec if fits else replace(spec, shares=None)


def _choose_spec(spec: RunSpec, nodes: tuple[str, ...] | None, changes: Changes) -> RunSpec:
    """Return the settings of the run from now on.

    Raises:
        UsageError: a node is named twice, the learning rate is out of range, or the settings
            exclude that parallelism mode.
    """
    # Nodes that the user names replace those of the run; the others do not rejoin.
    asked: tuple[tuple[str, Any, str], ...] = (
        ("nodes", nodes, "Name each node that is to train once."),
        ("learning_rate", changes.learning_rate, "Give a lower rate than before."),
        ("parallel", changes.parallel, "Resume it as before, or in another way."),
    )
    for name, value, hint in asked:
        if value is None:
            continue
        try:
            spec = replace(spec, **{name: value})
        except ValueError as error:
            raise UsageError(str(error), hint) from error
    return spec


def _choose_rate(services: Services, run: RunRecord) -> float | None:
    """Return half the learning rate after a divergence, else None to keep it."""
    losses = services.recoveries.of_run(run.run_id)
    return run.spec.learning_rate / 2 if losses and losses[-1].cause == "diverged" else None


def _report_changes(services: Services, run: RunRecord, spec: RunSpec, step: int) -> None:
    """Add events for the settings that change from a step on."""
    texts = []
    if spec.learning_rate != run.spec.learning_rate:
        rates = f"{spec.learning_rate:g} instead of {run.spec.learning_rate:g}"
        texts.append(f"the learning rate is {rates} from step {step} on")
    if spec.parallel != run.spec.parallel:
        texts.append(
            f"parallel is {spec.parallel} instead of {run.spec.parallel} from step {step} on"
        )
    for text in texts:
        services.runs.add_event(run.run_id, "setting", text)


def _read_resumable(services: Services, run_id: str) -> RunRecord:
    """Return the run.

    Raises:
        UserError: it is done, or active.
    """
    run = services.runs.get(run_id)
    if run.state == "done":
        raise UserError(
            f"run {run.run_id} is done; there is nothing to resume",
            "To train longer, start a new run with more epochs.",
        )
    if run.state not in RESUMABLE_STATES:
        raise UserError(
            f"run {run.run_id} is {run.state} and cannot be resumed",
            f"Stop it first: rackless runs stop {run.run_id}",
        )
    return run


def _require_pending(services: Services, run_id: str) -> None:
    """Raise UserError if the user has stopped the run since its loss."""
    if not services.recoveries.is_pending(run_id):
        raise UserError(
            f"run {run_id} was stopped, so it is not resumed automatically",
            f"Resume it: rackless runs resume {run_id}",
        )


def _require_not_resumed(services: Services, run: RunRecord, ours: Sequence[AttemptStatus]) -> None:
    """Raise UserError if the run's nodes or another master have a newer attempt, which a fence
    would end.
    """
    for status in active_attempts(ours):
        if status.attempt > run.attempt:
            services.recoveries.close(run.run_id, "replaced")
            who = "its nodes have" if status.election else "another master has"
            raise UserError(
                f"{who} resumed run {run.run_id} on {status.node}",
                f"Stop it there: rackless runs stop {run.run_id} --node {status.node}",
            )
    if adopt_regrouped(services, run, ours):
        raise UserError(f"run {run.run_id} is already running")


async def _choose_automatically(
    services: Services, run: RunRecord, answering: Sequence[str], how: Automatic
) -> tuple[str, ...]:
    """Return the answering nodes of the lost attempt, and those that can join now.

    Raises:
        UserError: there are no such nodes, or the user has stopped the run.
    """
    _require_pending(services, run.run_id)  # again: asking the nodes took time
    losses = services.recoveries.of_run(run.run_id)
    lost = losses[-1].attempt
    join = find_failed_join(losses, lost) if losses[-1].cause != REJOIN else None
    # Blame the joining nodes: return to the attempt that trained without them.
    if join is not None:
        lost, how = join.attempt, Automatic(may_join=False)
    attempts = services.runs.store.attempts(run.run_id)
    placements = next((one.placements for one in attempts if one.attempt == lost), ())
    before = tuple(dict.fromkeys(place.node for place in placements)) or run.nodes
    nodes = [node for node in before if node in answering]
    absent = find_absent(run.spec, before, answering) if how.may_join else ()
    joining = await preflight.find_fit(services, absent, run.run_id)
    if not joining:
        return await _require_any(services, run, nodes)
    # In the order of the first start, which decides the ranks.
    order = services.pool.names() if run.spec.nodes == "all" else list_named(run.spec.nodes)
    return tuple(node for node in order if node in (*nodes, *joining))


async def _leave_out_unusable(
    services: Services, run_id: str, nodes: Sequence[str]
) -> tuple[str, ...]:
    """Return the nodes that can take part in the next attempt; an event names each other one.

    A node with a failed disk still answers, and would keep the others from continuing without it.

    Raises:
        NodeUnreachable: a node is gone again.
    """
    answers = await asyncio.gather(
        *(preflight.require_usable(services, node, run_id) for node in nodes),
        return_exceptions=True,
    )
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, NodeUnreachable) or not isinstance(answer, UserError | None):
            raise answer
        if answer is not None:
            text = f"{node} is left out: {answer.message}. {answer.hint}".rstrip(". ")
            services.runs.add_event(run_id, "warning", text)
    return tuple(n for n, answer in zip(nodes, answers, strict=True) if answer is None)


async def _require_any(services: Services, run: RunRecord, nodes: Sequence[str]) -> tuple[str, ...]:
    if not nodes:
        # A node that refuses the login or shows another host key raises an error with its own hint.
        for node in set(run.nodes) & set(services.pool.names()):
            with contextlib.suppress(NodeUnreachable):
                await services.pool.agent(node).ask(ListAttempts())
        raise UserError(
            f"no node of the run answers ({show_list(run.nodes)})",
            "Turn one on, or name others: rackless runs resume ID --nodes A,B",
        )
    return tuple(nodes)


async def _raise_fence(
    services: Services, run: RunRecord, nodes: Sequence[str], attempt: int, *, is_claimed: bool
) -> int:
    """Agree on the next attempt number with all `nodes`; older attempts can no longer commit.

    Raises:
        UserError: the number was claimed, and a node knows a newer one.
    """
    most: int | None = None
    for _ in range(MAX_FENCE_ROUNDS):
        request = RaiseFence(run_id=run.run_id, attempt=attempt)
        fences = await asyncio.gather(*(services.pool.agent(node).ask(request) for node in nodes))
        known = {n: max(f.attempt, f.halted) for n, f in zip(nodes, fences, strict=True)}
        most = most or most_believed(known, run, attempt)
        newest = max((f.attempt for f in fences if f.attempt <= most), default=attempt)
        halted = max((f.halted for f in fences if f.halted <= most), default=0)
        if newest <= attempt and halted < attempt:
            break
        if is_claimed:
            # The others have granted this number, and one node alone may name any.
            ahead = [node for node, number in known.items() if number > attempt]
            if not is_majority(ahead, run.nodes):
                break
            raise UserError(f"run {run.run_id} is being resumed elsewhere")
        # Another master has resumed this run, or a stop has ended the attempt of this number.
        attempt = max(newest + 1 if newest > attempt else attempt, halted + 1)
    return attempt


async def _stop_leftovers(
    services: Services,
    run_id: str,
    seen: Mapping[str, tuple[AttemptStatus, ...]],
    grace_s: float,
    *,
    at_loss: bool = False,
) -> None:
    believed = believed_attempts(services, run_id, by_node(seen))
    left = [(status.node, status.attempt) for status in active_attempts(believed)]
    await asyncio.gather(
        *(
            stop_parts(services.pool, [node], run_id, attempt, grace_s, at_loss=at_loss)
            for node, attempt in left
        )
    )
