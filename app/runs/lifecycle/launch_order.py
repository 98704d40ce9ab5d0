"""Order of a launch among the stops of its run: a stop by the user ends every earlier launch.

Starter and stopper are often two processes, and the starter may be suspended. So a stop is stored
with a number. A launch remembers the number that it found when the user asked for it; a higher one
ends it, however long it slept. A later resume finds the newer number, so that the old stop does not
end it. The number is read again at short intervals, and right before each step that cannot be taken
back; the nodes refuse what was sent before the stop (`agents/supervisor/halt.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from app.errors import RunStopped, UserError
from app.events import ACTIVE_STATES
from app.filelock import describe_process
from app.runs.services import Services
from app.storage.runs import LastStop, RunRecord

POLL_S = 0.3


@dataclass(slots=True)
class LaunchOrder:
    """One launch, or another action of a run that its stop ends, such as an export."""

    run_id: str
    stops: int
    """Number of stops before it."""
    asked_s: float
    """Time at which the user asked for it, in seconds since the epoch."""
    taken_s: float
    """Time at which `stops` was read, in seconds since the epoch."""
    phase: str = "was prepared"
    """Present work, as the end of a sentence about the run."""
    refused_by: tuple[str, ...] = ()
    """Nodes that refused to launch their part."""

    def find_stop(self, run: RunRecord) -> LastStop | None:
        """Return the stop that ends this launch, or None."""
        stop = run.last_stop
        if stop.number > self.stops:
            return stop
        # A process of an earlier version stores no number.
        if run.stop_asked and run.state in ACTIVE_STATES:
            return stop
        # A command needs a second to open the store, in which the user may press Stop. A time after
        # that is of a clock which was set back since, and means nothing.
        if stop.time_s is not None and self.asked_s < stop.time_s <= self.taken_s:
            return stop
        return None


def take_order(services: Services, run_id: str, asked_s: float | None = None) -> LaunchOrder:
    """Return the order of a launch that the user asked for at `asked_s` (None: now)."""
    now_s = time.time()
    asked_s = now_s if asked_s is None else min(asked_s, now_s)
    run = services.runs.get(run_id)
    return LaunchOrder(
        run_id=run.run_id, stops=run.last_stop.number, asked_s=asked_s, taken_s=time.time()
    )


def require_not_stopped(services: Services, order: LaunchOrder) -> None:
    """Check that the user has not stopped the run since the launch was asked for.

    Raises:
        RunStopped: the user has, or has deleted it.
    """
    run = services.runs.store.get(order.run_id)
    if run is None:
        raise RunStopped(
            f"run {order.run_id} was deleted while it {order.phase}", where=order.run_id
        )
    stop = order.find_stop(run)
    if stop is not None:
        by = f" by {stop.by}" if stop.by else ""
        raise RunStopped(
            f"run {order.run_id} was stopped{by} while it {order.phase}",
            f"Resume it: rackless runs resume {order.run_id}",
            where=order.run_id,
        )


@contextlib.asynccontextmanager
async def unless_stopped(services: Services, order: LaunchOrder) -> AsyncGenerator[None]:
    """Cancel the block soon after the user stops the run.

    Raises:
        RunStopped: the user stopped it before or during the block.
    """
    require_not_stopped(services, order)
    ended = asyncio.timeout(None)

    async def watch() -> None:
        while True:
            # A store that is locked for a moment says nothing about a stop.
            with contextlib.suppress(UserError):
                try:
                    require_not_stopped(services, order)
                except RunStopped:
                    ended.reschedule(asyncio.get_running_loop().time())
                    return
            await asyncio.sleep(POLL_S)

    try:
        async with ended:
            task = asyncio.create_task(watch())
            try:
                yield
            finally:
                task.cancel()
        require_not_stopped(services, order)
    except TimeoutError:
        if ended.expired():
            require_not_stopped(services, order)
        raise
    except UserError as error:
        if not isinstance(error, RunStopped):
            require_not_stopped(services, order)  # a node may have refused because of the stop
        raise


def record_stop(services: Services, run_id: str) -> None:
    """Store that the user stops the run now."""

    def stop(run: RunRecord) -> RunRecord:
        number = run.last_stop.number + 1
        last = LastStop(number=number, time_s=time.time(), by=describe_process())
        return replace(run, last_stop=last)

    services.runs.change(run_id, stop)
