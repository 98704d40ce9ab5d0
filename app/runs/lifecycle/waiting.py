"""Wait for an entry in the journals of a running attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from app.errors import UserError
from app.events import ACTIVE_STATES, StepRecord
from app.runs.journals.attempt_history import AttemptHistory
from app.runs.lifecycle.reconcile import reconcile_run, sync_run
from app.runs.services import Services
from app.storage.runs import RunRecord

POLL_INTERVAL_S = 0.3
# Judging asks every node; the journals alone show most ends of a run.
JUDGE_INTERVAL_S = 5.0
T = TypeVar("T")


async def wait_for_journal(
    services: Services,
    run: RunRecord,
    find: Callable[[AttemptHistory], T | None],
    timeout_s: float,
) -> T | None:
    """Return the first result of `find` on the attempt's journals that is not None.

    Args:
        services: stores and nodes.
        run: run whose newest attempt is watched.
        find: returns the result, or None to continue waiting.
        timeout_s: maximum time without a new step, after which None is returned.

    Raises:
        UserError: the run ended first, or `find` raised it.
    """
    judged_s = moved_s = time.monotonic()
    newest: StepRecord | None = None
    while True:
        now = services.runs.get(run.run_id)
        # Read before the journals are fetched, so that the last entries of an ended run still
        # count.
        is_over = now.attempt != run.attempt or now.state not in ACTIVE_STATES
        await sync_run(services, run, run.nodes)
        services.runs.refresh(run.run_id)
        attempt = services.runs.history(run.run_id).attempt(run.attempt)
        # A slow cluster is not a dead one: each new step restarts the timeout.
        if attempt.newest is not newest:
            newest, moved_s = attempt.newest, time.monotonic()
        found = find(attempt)
        if found is not None:
            return found
        if is_over:
            raise UserError(
                f"run {run.run_id} ended before it could do that: it is {now.state}",
                f"See the details: rackless runs show {run.run_id}",
            )
        if time.monotonic() - moved_s > timeout_s:
            return None
        if time.monotonic() - judged_s > JUDGE_INTERVAL_S:
            judged_s = time.monotonic()
            await reconcile_run(services, run.run_id)
        await asyncio.sleep(POLL_INTERVAL_S)
