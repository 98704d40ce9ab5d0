"""Ask a running run for something, and wait until its journal tells what became of it.

The wish goes to the node of rank 0, whose trainer finds it in its next step and lets all ranks act
alike. The answer comes back the way that everything does, through the mirrored journal; so a master
that is closed in between misses nothing, and the wish is granted anyway.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from agents.contract.run import ControlRequest
from app.errors import UsageError, UserError
from app.events import ACTIVE_STATES, RESUMABLE_STATES, RankTrace, SaveResult, TraceResult
from app.runs.journals.history import AttemptHistory
from app.runs.lifecycle.reconcile import reconcile_run
from app.runs.lifecycle.waiting import wait_for_journal
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import count_of

ANSWER_S = 300.0
"""How long the next step is waited for; on a slow cluster one may take a minute."""
MOST_TRACED_STEPS = 20


async def save_now(services: Services, run_id: str) -> SaveResult:
    """Have a checkpoint written at the end of the present step, while training goes on.

    Raises:
        UserError: the run is not running, its first node cannot be reached, it ended before it
            could save, or its disk refused.
    """
    run = await _expect_running(services, run_id, "save a checkpoint")
    wish_id = await _leave(services, run, ControlRequest(wish_id=_make_id(), kind="save"))
    services.runs.add_event(run_id, "requested", "asked to save a checkpoint now")

    def find(attempt: AttemptHistory) -> SaveResult | None:
        step = attempt.request_steps.get(wish_id)
        if step is None:
            return None
        if step in attempt.failed_saves:
            raise UserError(
                f"run {run_id} could not save after step {step}: {attempt.failed_saves[step]}",
                "It trains on and tries again at its usual time.",
            )
        saved = attempt.checkpoints.get(step)
        return (
            SaveResult(step=step, stall_s=saved.stall_s, seconds=saved.seconds) if saved else None
        )

    found = await wait_for_journal(services, run, find, ANSWER_S)
    if found is not None:
        return found
    return SaveResult(
        step=services.runs.history(run_id).attempt(run.attempt).request_steps.get(wish_id)
    )


async def record_trace(services: Services, run_id: str, num_steps: int) -> TraceResult:
    """Have every rank record its next steps, and fetch the traces.

    Raises:
        UserError: `num_steps` is not possible, the run is not running, its first node cannot be
            reached, or it ended before.
    """
    if not 1 <= num_steps <= MOST_TRACED_STEPS:
        raise UsageError(
            f"{num_steps} steps cannot be recorded: it is 1 to {MOST_TRACED_STEPS}",
            "A step of a big model is tens of megabytes; 3 show what there is to see.",
        )
    run = await _expect_running(services, run_id, "record a trace")
    wish = ControlRequest(wish_id=_make_id(), kind="trace", num_steps=num_steps)
    wish_id = await _leave(services, run, wish)
    services.runs.add_event(run_id, "requested", f"asked to record {count_of(num_steps, 'step')}")
    num_ranks = len(services.runs.placements(run))

    def find(attempt: AttemptHistory) -> TraceResult | None:
        made = _find_trace(attempt, wish_id, num_ranks)
        return made if made.is_complete else None

    found = await wait_for_journal(services, run, find, ANSWER_S)
    attempt = services.runs.history(run_id).attempt(run.attempt)
    return found or _find_trace(attempt, wish_id, num_ranks)


def _find_trace(attempt: AttemptHistory, wish_id: str, num_ranks: int) -> TraceResult:
    """Return what is known of a trace; a recording that was under way is made longer by a wish."""
    step = attempt.request_steps.get(wish_id)
    if step is None:
        return TraceResult(first_step=None)
    told = [t for t in attempt.traces if t.first_step == step + 1 or _covers(t, step + 1)]
    ranks = tuple(sorted(told, key=lambda trace: trace.rank))
    is_complete = len(ranks) >= num_ranks and all(map(_is_here, ranks))
    return TraceResult(first_step=step + 1, ranks=ranks, is_complete=is_complete)


def _covers(trace: RankTrace, step: int) -> bool:
    return trace.first_step <= step <= trace.last_step


def _is_here(trace: RankTrace) -> bool:
    if trace.problem:
        return True
    path = Path(trace.path)
    return path.is_file() and path.stat().st_size == trace.size_bytes


def _make_id() -> str:
    return secrets.token_hex(6)


async def _expect_running(services: Services, run_id: str, what: str) -> RunRecord:
    """Return the run as its nodes tell it now.

    Raises:
        UserError: it does not run.
    """
    await reconcile_run(services, run_id)
    run = services.runs.get(run_id)
    if run.state == "running":
        return run
    hint = "Wait until it runs."
    if run.state in RESUMABLE_STATES:
        hint = f"Resume it first: rackless runs resume {run_id}"
    elif run.state not in ACTIVE_STATES:
        hint = f"Its checkpoints are listed by: rackless checkpoints {run_id}"
    raise UserError(f"run {run_id} is {run.state}: only a running run can {what}", hint)


async def _leave(services: Services, run: RunRecord, wish: ControlRequest) -> str:
    placements = services.runs.placements(run)
    node = placements[0].node if placements else run.nodes[0]
    await services.pool.agent(node).leave_wish(run.run_id, run.attempt, wish)
    return wish.wish_id
