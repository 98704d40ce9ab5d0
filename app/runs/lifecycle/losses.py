"""Record the loss of a rank or a node, and let the user cancel its recovery."""

from __future__ import annotations

import time

from app.events import ACTIVE_STATES, RESUMABLE_STATES
from app.runs.rejoin import find_failed_join
from app.runs.run import EndCause
from app.runs.services import Services
from app.storage.recoveries import Loss
from app.storage.runs import RunRecord


def note_loss(
    services: Services, run: RunRecord, cause: EndCause, step: int | None, reason: str
) -> bool:
    """Record the failed end of the run's attempt; return True if it will be recovered.

    Args:
        services: stores and nodes.
        run: run before the end.
        cause: cause of the attempt's end.
        step: newest step in any rank's heartbeat.
        reason: cause as a sentence.
    """
    from app.runs.recovery import find_obstacle  # lists of runs do not need it

    # Read again: the user may have stopped it while its nodes were asked.
    now = services.runs.get(run.run_id)
    if now.attempt != run.attempt or now.state not in ACTIVE_STATES:
        return services.recoveries.is_pending(run.run_id)  # another process has judged its end
    stop_asked = now.stop_asked
    losses = services.recoveries.of_run(run.run_id)
    # The run trained without the nodes that joined, so any failure is theirs.
    is_join = find_failed_join(losses, run.attempt) is not None
    obstacle = find_obstacle(
        run.spec,
        run.state,
        "lost" if is_join else cause,
        is_ours=services.runs.is_ours(run),
        stop_asked=stop_asked,
        per_hour=per_hour(services),
    )
    steps = (step, services.runs.full_snapshot(run.run_id).step)
    loss = Loss(
        run_id=run.run_id,
        attempt=run.attempt,
        cause=cause,
        step=max((s for s in steps if s is not None), default=0),
        ended_s=time.time(),
        state="left" if obstacle else "pending",
        reason=reason,
    )
    if services.recoveries.is_pending(run.run_id):
        # A recovery was interrupted during its launch: its loss is still the current one.
        if obstacle is None or cause == "unlaunched":
            return True
        services.recoveries.close(run.run_id, "left")
    services.recoveries.add(loss, run.last_stop.number)
    return obstacle is None and services.recoveries.is_pending(run.run_id)


def hint_of_loss(run_id: str) -> str:
    """Return the hint for a run that waits for its recovery."""
    return (
        "It is resumed automatically while the window or `rackless watch` is open. At once: "
        f"rackless runs resume {run_id}. Not at all: rackless runs stop {run_id}"
    )


def cancel_recovery(services: Services, run_id: str, *, has_starter: bool = False) -> bool:
    """Cancel the pending automatic resume; return True if there was one.

    Args:
        services: stores and nodes.
        run_id: run to leave as it is.
        has_starter: True if a process resumes it, which ends before it launches anything.
    """
    was_pending = services.recoveries.close(run_id, "cancelled")
    run = services.runs.get(run_id)
    if run.state not in RESUMABLE_STATES or not (was_pending or has_starter):
        return was_pending
    message = f"{run.message}; the user stopped it before it was resumed".lstrip("; ")
    services.runs.move(
        run_id, run.attempt, "stopped", message, f"Resume it: rackless runs resume {run_id}"
    )
    services.runs.add_event(run_id, "requested", "stop requested: the run is not resumed")
    return True


def per_hour(services: Services) -> int:
    """Return the maximum number of recoveries of a run within an hour."""
    return int(services.settings.number("recoveries_per_hour"))
