"""Resume a run that lost a rank or a node, without the user.

The process that watches the run does it: the window, `rackless watch`, or a command with `--watch`.
It equals a resume by the user: older attempts are fenced and stopped, the newest intact checkpoint
within reach is copied, and the run is planned again on its nodes that answer. Two processes of one
home that watch the same run exclude each other by the launch lock; another master only watches,
since it did not launch the run. The nodes of the run wait while a master says that it recovers it
(`election`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import replace

from app.errors import RacklessError, UserError
from app.events import ACTIVE_STATES, RESUMABLE_STATES
from app.presentation.interruption_text import describe_repeated
from app.runs.interruptions import find_interruption
from app.runs.lifecycle.election import close_parts, keeping_parts
from app.runs.lifecycle.launch_order import take_order
from app.runs.lifecycle.losses import per_hour
from app.runs.lifecycle.reconcile import adopt_newer, reconcile_run
from app.runs.lifecycle.resume import Automatic, Choices, resume_run
from app.runs.recovery import Refusals, decide_recovery
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import show_duration, show_list

POLL_INTERVAL_S = 0.5
MAX_REFUSED_LAUNCHES = 2
"""Number of launches that a node may refuse before the run continues without it."""


async def recover_run(services: Services, run_id: str) -> bool:
    """Resume a run as soon as its pending loss may be recovered; return True if it is active.

    Returns False at once if the run has no pending loss, and as soon as the user stops the run or a
    limit is reached.
    """
    run = services.runs.store.get(run_id)
    if run is None:
        return False
    recovery = _Recovery(services, run_id)
    async with keeping_parts(services, run):
        while True:
            # The disk of this PC may be full for a while; the nodes do not need it.
            with contextlib.suppress(UserError):
                is_active = await recovery.advance()
                if is_active is not None:
                    return is_active
            await asyncio.sleep(POLL_INTERVAL_S)


class _Recovery:
    """Recovery of one loss, with its refusals and the last reported wait."""

    def __init__(self, services: Services, run_id: str) -> None:
        self._services = services
        self._run_id = run_id
        self._refusals = Refusals()
        self._refused_by: Counter[str] = Counter()
        self._waits_for = ""

    async def advance(self) -> bool | None:
        """Take the next step; return True if the run is active, None if undecided."""
        services, run_id = self._services, self._run_id
        run = services.runs.store.get(run_id)
        if run is not None and run.state in ACTIVE_STATES:
            return True
        if run is None or not services.recoveries.is_pending(run_id):
            return False
        if run.state not in RESUMABLE_STATES:
            services.recoveries.withdraw(run_id)  # finished before it could stop for joining nodes
            return False
        if services.is_launching(run_id):  # by the user, or another process of this home
            return None
        now_s = time.time()
        losses = services.recoveries.of_run(run_id)
        decision = decide_recovery(losses, self._refusals, now_s, per_hour(services))
        if decision.act == "give_up":
            await _give_up(services, run, decision.reason)
            return False
        if decision.act == "wait":
            self._say_wait(decision.reason, decision.until_s - now_s)
            return None
        await self._try_resume()
        return None

    def _say_wait(self, reason: str, left_s: float) -> None:
        if reason != self._waits_for:
            self._waits_for = reason
            self._services.runs.add_event(
                self._run_id,
                "warning",
                f"not resumed yet: {reason.rstrip('.')}. It is tried again in "
                f"{show_duration(max(left_s, 0.0))}.",
            )

    async def _try_resume(self) -> None:
        """Resume the run, or record why that is not possible now."""
        services, run_id = self._services, self._run_id
        if not self._refusals.count:
            text = "resuming automatically on the nodes that answer"
            services.runs.add_event(run_id, "recovery", text)
        # A node that failed to join once must not keep the others waiting, nor one that refuses to
        # launch its part again and again.
        refusing = frozenset(
            node for node, times in self._refused_by.items() if times >= MAX_REFUSED_LAUNCHES
        )
        how = Automatic(may_join=not self._refusals.count, without=refusing)
        order = take_order(services, run_id)
        try:
            await reconcile_run(services, run_id)
            await resume_run(services, run_id, Choices(), automatic=how, order=order)
        except RacklessError as error:
            self._refused_by.update(order.refused_by)
            now_s = time.time()
            self._refusals = Refusals(
                count=self._refusals.count + 1,
                first_s=self._refusals.first_s or now_s,
                last_s=now_s,
                text=error.message if isinstance(error, UserError) else str(error),
            )
            if not services.recoveries.is_pending(run_id):
                await adopt_newer(services, services.runs.get(run_id))
            return
        run = services.runs.get(run_id)
        # Another process that watches the run may have seen the new attempt end already; then this
        # loss is still the permission to resume it.
        if run.state not in RESUMABLE_STATES:
            services.recoveries.mark_resumed(run_id, run.attempt, time.time())
            _report_resume(services, run)


def _report_resume(services: Services, run: RunRecord) -> None:
    """Report where the run was resumed, how long after its loss, and the repeated steps."""
    one = find_interruption(services, run.run_id, run.attempt)
    if one is None or one.resumed_after_s is None:  # the user resumed it meanwhile
        return
    without = f", without {show_list(one.without)}" if one.without else ""
    services.runs.add_event(
        run.run_id,
        "recovery",
        f"resumed automatically on {show_list(one.resumed_nodes)}{without}, "
        f"{show_duration(one.resumed_after_s)} after {one.began_with}; "
        f"{describe_repeated(one)}",
    )


async def report_cost(services: Services, run_id: str, attempt: int) -> None:
    """Report the cost of a loss, once the recovering attempt `attempt` has done a step."""
    while True:
        one = find_interruption(services, run_id, attempt)
        if one is None or one.state != "resumed":
            return
        if one.cost_s is not None:
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    # Only one of the processes that watch the run reports it.
    if services.recoveries.mark_recovered(run_id, attempt):
        first = services.runs.history(run_id).attempt(attempt).first
        since = f" since step {first.step}" if first is not None else ""
        joined = f"the return of {show_list(one.joined)}" if one.joined else "the stop"
        what = joined if one.kind == "rejoin" else "the loss"
        services.runs.add_event(
            run_id,
            "recovery",
            f"training again{since}: {what} cost {show_duration(one.cost_s)}, and "
            f"{describe_repeated(one)}. Nothing to do.",
        )


async def _give_up(services: Services, run: RunRecord, reason: str) -> None:
    if not services.recoveries.close(run.run_id, "given_up"):
        return
    text = f"no longer resumed automatically: {reason}"
    services.runs.change(
        run.run_id,
        lambda old: replace(
            old,
            message=f"{old.message.rstrip('.')}; {text}".lstrip("; "),
            hint="Find the cause in the events and logs, then resume it: "
            f"rackless runs resume {run.run_id}",
        ),
    )
    services.runs.add_event(run.run_id, "recovery_given_up", text)
    await close_parts(services, run)
