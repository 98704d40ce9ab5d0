"""Send a control request to a running run, and wait for the result in its journal.

The request goes to the node of rank 0, whose trainer finds it in its next step and makes all ranks
act alike. The result comes back through the mirrored journal, so a master that is closed in between
misses nothing, and the request is still carried out.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from agents.contract.requests.attempts import ControlAttempt
from agents.contract.run import ControlRequest
from app.errors import UsageError, UserError
from app.events import ACTIVE_STATES, RESUMABLE_STATES, RankTrace, SaveResult, TraceResult
from app.runs.journals.attempt_history import AttemptHistory
from app.runs.lifecycle.reconcile import reconcile_run
from app.runs.lifecycle.waiting import wait_for_journal
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import count_of

# Maximum time without a new step; on a slow cluster a step may take a minute.
ANSWER_TIMEOUT_S = 300.0
# Each step of a big model adds tens of megabytes to the trace of every rank.
MAX_TRACED_STEPS = 20


async def save_now(services: Services, run_id: str) -> SaveResult:
    """Request a checkpoint at the end of the current step, without stopping the training.

    Raises:
        UserError: the run is not running, its first node cannot be reached, it ended first, or
            the checkpoint could not be written.
    """
    run = await _require_running(services, run_id, "save a checkpoint")
    request_id = await _send(services, run, ControlRequest(wish_id=_make_id(), kind="save"))
    services.runs.add_event(run_id, "requested", "checkpoint requested")

    def find(attempt: AttemptHistory) -> SaveResult | None:
        step = attempt.request_steps.get(request_id)
        if step is None:
            return None
        if step in attempt.failed_saves:
            raise UserError(
                f"run {run_id} could not save after step {step}: {attempt.failed_saves[step]}",
                "Training continues, and the next regular checkpoint is tried as usual.",
            )
        saved = attempt.checkpoints.get(step)
        if saved is None or not saved.is_complete:
            return None
        return SaveResult(step=step, stall_s=saved.stall_s, seconds=saved.seconds)

    found = await wait_for_journal(services, run, find, ANSWER_TIMEOUT_S)
    # Without a result in time, return the step at which the ranks acted, if they did.
    if found is not None:
        return found
    return SaveResult(
        step=services.runs.history(run_id).attempt(run.attempt).request_steps.get(request_id)
    )


async def record_trace(services: Services, run_id: str, num_steps: int) -> TraceResult:
    """Request a trace of the next steps from every rank, and fetch the files.

    Raises:
        UsageError: `num_steps` is out of range.
        UserError: the run is not running, its first node cannot be reached, or it ended first.
    """
    if not 1 <= num_steps <= MAX_TRACED_STEPS:
        raise UsageError(
            f"{num_steps} steps cannot be recorded: choose 1 to {MAX_TRACED_STEPS}",
            "A step of a big model is tens of megabytes; 3 steps are usually enough.",
        )
    run = await _require_running(services, run_id, "record a trace")
    request = ControlRequest(wish_id=_make_id(), kind="trace", num_steps=num_steps)
    request_id = await _send(services, run, request)
    services.runs.add_event(
        run_id, "requested", f"trace of {count_of(num_steps, 'step')} requested"
    )
    # Lost ranks of a regrouped attempt record no trace.
    lost = services.runs.history(run_id).attempt(run.attempt).lost_ranks
    num_ranks = len(services.runs.placements(run)) - len(lost)

    def find(attempt: AttemptHistory) -> TraceResult | None:
        made = _find_trace(attempt, request_id, num_ranks)
        return made if made.is_complete else None

    found = await wait_for_journal(services, run, find, ANSWER_TIMEOUT_S)
    attempt = services.runs.history(run_id).attempt(run.attempt)
    return found or _find_trace(attempt, request_id, num_ranks)


def _find_trace(attempt: AttemptHistory, request_id: str, num_ranks: int) -> TraceResult:
    """Return the trace so far."""
    # A request during a recording extends that recording, which then began before the request.
    step = attempt.request_steps.get(request_id)
    if step is None:
        return TraceResult(first_step=None)
    found = [t for t in attempt.traces if t.first_step == step + 1 or _covers(t, step + 1)]
    ranks = tuple(sorted(found, key=lambda trace: trace.rank))
    is_complete = len(ranks) >= num_ranks and all(map(_is_here, ranks))
    return TraceResult(first_step=step + 1, ranks=ranks, is_complete=is_complete)


def _covers(trace: RankTrace, step: int) -> bool:
    return trace.first_step <= step <= trace.last_step


def _is_here(trace: RankTrace) -> bool:
    if trace.problem:
        return True
    # The journal's line may arrive before the mirror of the file is complete.
    path = Path(trace.path)
    return path.is_file() and path.stat().st_size == trace.size_bytes


def _make_id() -> str:
    return secrets.token_hex(6)


async def _require_running(services: Services, run_id: str, what: str) -> RunRecord:
    """Return the run, reconciled with its nodes.

    Raises:
        UserError: it is not running.
    """
    await reconcile_run(services, run_id)
    run = services.runs.get(run_id)
    if run.state == "running":
        return run
    hint = "Wait until it runs."
    if run.state in RESUMABLE_STATES:
        hint = f"Resume it first: rackless runs resume {run_id}"
    elif run.state not in ACTIVE_STATES:
        hint = f"List its checkpoints: rackless checkpoints {run_id}"
    raise UserError(f"run {run_id} is {run.state}: only a running run can {what}", hint)


async def _send(services: Services, run: RunRecord, request: ControlRequest) -> str:
    # Rank 0 comes first in both; a run found on its nodes may have no placements.
    members = services.runs.history(run.run_id).attempt(run.attempt).members
    placements = services.runs.placements(run)
    node = members[0] if members else placements[0].node if placements else run.nodes[0]
    await services.pool.agent(node).ask(
        ControlAttempt(run_id=run.run_id, attempt=run.attempt, wish=request)
    )
    return request.wish_id
