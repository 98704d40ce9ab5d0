"""Keep a node connected, in one task per node, and publish its state.

The states are `connecting` (first try), `online`, `unreachable` (retried with growing, jittered
pauses) and `refused` (host key or login: retried only on request, because more tries would look
like an attack). A ping each second measures the round trip; if one is overdue, the node counts as
unreachable at once, while the link gets a little longer to recover.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from agents.contract.messages import WireError, from_wire
from agents.contract.node import NodeFacts, Sample
from agents.contract.requests.connection import Ping
from agents.contract.requests.node import ReadFacts
from agents.contract.requests.telemetry import FollowSamples
from app.errors import REFUSALS, NodeUnreachable, RacklessError, UserError
from app.events import EventHub, NodeChanged, NodeSnapshot, SampleArrived
from app.nodes.channel import read_lines
from app.nodes.link import Link
from app.nodes.node import Node, transport_of

PING_INTERVAL_S: Final = 1.0
STALE_AFTER_S: Final = 1.8
"""Age of an unanswered ping that makes the node unreachable, in seconds. Together with the
interval, a dead node is noticed after at most 2.8 s."""
GIVE_UP_AFTER_S: Final = 15.0
"""Age of an unanswered ping that ends the link, in seconds."""
FIRST_PAUSE_S: Final = 0.5
"""Pause before the first retry, in seconds; it doubles with each further one."""
MAX_PAUSE_S: Final = 30.0
"""Maximum pause between retries, in seconds."""
STEADY_AFTER_S: Final = 20.0
"""Lifetime of a link that resets the pause between retries, in seconds."""
REST_S: Final = 2.0
"""Age of a failure below which a request fails at once instead of reconnecting, in seconds."""
REFUSED_REST_S: Final = 15.0
"""REST_S for a refused login, which counts towards the limits of fail2ban."""

# A misconfigured node looks like a malicious one, so the problem is only shown.
_DISTRUST: Final = (
    "Nothing of it was used. If you do not know why, check that PC or remove the node"
)

_log = logging.getLogger(__name__)


def pause_before(attempt: int, jitter: float) -> float:
    """Return the seconds to wait before the next try.

    Args:
        attempt: number of failures in a row, from 1.
        jitter: random number from 0 to 1, which spreads nodes that were lost together.

    >>> [pause_before(n, 0.5) for n in (1, 2, 3, 7, 20)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    """
    pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 10))
    return min(MAX_PAUSE_S, pause_s * (0.7 + 0.6 * jitter))


class NodeWatch:
    """Owner of the link to one node; `run` is its task."""

    def __init__(
        self, node: Node, open_link: Callable[[Node], Awaitable[Link]], events: EventHub
    ) -> None:
        self.node = node
        self.snapshot = NodeSnapshot(
            name=node.name,
            transport=transport_of(node.address),
            address=str(node.address),
            state="connecting",
        )
        self._open_link = open_link
        self._events = events
        self._link: Link | None = None
        self._failure: UserError | None = None
        self._failed_s = 0.0
        # Outlives a link: after a reconnect only the samples since this one are requested.
        self._newest: Sample | None = None
        self._samples_wanted = asyncio.Event()
        self._retry = asyncio.Event()
        self._is_trying = True
        self._num_tries = 0
        self._tried = asyncio.Condition()

    # ------------------------------------------------------------ interface

    async def run(self) -> None:
        """Connect and reconnect until cancelled, then close the link."""
        failures = 0
        while True:
            self._retry.clear()
            self._is_trying = True
            started_s = time.monotonic()
            error = await self._live_once()
            # A link that opens and soon breaks counts as a failure, too, so that pauses grow.
            failures = 1 if time.monotonic() - started_s > STEADY_AFTER_S else failures + 1
            # None waits without end: only a request of the user tries a refused login again.
            refused = isinstance(error, REFUSALS)
            pause_s = None if refused else pause_before(failures, random.random())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    # The deadline leaves the block here, so only a `retry` resets the count.
                    await self._retry.wait()
                    failures = 0

    async def link(self) -> Link:
        """Return the open link; try once more without one.

        Raises:
            UserError: the node cannot be reached.
        """
        if self._link is None:
            self._rest()
            # Wait for the next outcome, not for the next change: a try may already be running.
            before = self._num_tries
            self.retry()
            async with self._tried:
                await self._tried.wait_for(lambda: self._link or self._num_tries > before)
        if self._link is None:
            raise self._failure or NodeUnreachable(f"{self.node.name} cannot be reached")
        return self._link

    def retry(self) -> None:
        """Retry now instead of at the end of the pause."""
        if not self._is_trying:
            self._retry.set()

    def follow_samples(self) -> None:
        """Publish the node's samples from now on, starting with those of the last ten minutes."""
        self._samples_wanted.set()

    def remember(self, facts: NodeFacts) -> None:
        """Store newer facts in the snapshot."""
        self._publish(facts=facts)

    # ------------------------------------------------------------ one life of a link

    async def _live_once(self) -> Exception:
        """Open a link and use it until it is lost; return the reason."""
        try:
            link = await self._open_link(self.node)
        except UserError as error:
            await self._settle(None, error)
            return error
        except Exception as error:  # noqa: BLE001 - the edge: the task of a node
            await self._settle(None, self._report_bug(error))
            return error
        try:
            await self._settle(link, None)
            link.channel.complained = self._show_complaint
            return await self._serve(link)
        except Exception as error:  # noqa: BLE001 - the edge: the task of a node
            self._fail(error if isinstance(error, UserError) else self._report_bug(error))
            return error
        finally:
            # Before closing, so that a request waits for the next try instead of a dying link.
            self._link = None
            # Shielded: when the task is cancelled at exit, the agent still gets its shutdown.
            await asyncio.shield(self._close(link))

    async def _serve(self, link: Link) -> NodeUnreachable:
        tasks = [
            asyncio.create_task(work)
            for work in (self._ask_facts(link), self._follow_samples(link), self._ping(link))
        ]
        try:
            error = await link.channel.wait_lost()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(error)
        return error

    async def _close(self, link: Link) -> None:
        try:
            await link.close()
        # Not raised: the link is gone either way, and the task must reconnect.
        except (RacklessError, OSError):
            _log.exception("closing the link to %s", self.node.name)

    async def _settle(self, link: Link | None, error: UserError | None) -> None:
        """Record the outcome of a try and wake its waiters."""
        self._link, self._is_trying = link, False
        self._num_tries += 1
        if error is None:
            self._failure = None
            self._publish(state="online", problem="", hint="", last_seen_s=time.time())
        else:
            self._fail(error)
        async with self._tried:
            self._tried.notify_all()

    def _rest(self) -> None:
        """Raise the last failure if it is too recent for a new try."""
        if self._failure is None or self._is_trying:
            return
        rest_s = REFUSED_REST_S if isinstance(self._failure, REFUSALS) else REST_S
        if time.monotonic() - self._failed_s < rest_s:
            # The same exception is raised for many callers; its traceback would grow each time.
            raise self._failure.with_traceback(None)

    def _fail(self, error: UserError) -> None:
        self._failure, self._failed_s = error, time.monotonic()
        state = "refused" if isinstance(error, REFUSALS) else "unreachable"
        self._publish(state=state, problem=error.message, hint=error.hint, round_trip_s=None)

    def _report_bug(self, error: Exception) -> NodeUnreachable:
        _log.error("the task of %s failed", self.node.name, exc_info=error)
        return NodeUnreachable(
            f"{self.node.name} cannot be used: an error in Rackless itself ({error!r})",
            "The log has the details; please report it",
        )

    async def _ask_facts(self, link: Link) -> None:
        try:
            request = ReadFacts()
            facts = await link.channel.request(request.kind, timeout_s=GIVE_UP_AFTER_S)
            self._publish(facts=request.read_answer(read_lines(facts)))
        except NodeUnreachable:
            return  # reported when the link ends
        except (RacklessError, WireError) as error:
            link.channel.complain(f"its facts cannot be read: {error}")

    # ------------------------------------------------------------ ping

    async def _ping(self, link: Link) -> None:
        while True:
            sent_s = time.monotonic()
            answer = asyncio.ensure_future(link.channel.request(Ping.kind))
            try:
                # `wait` instead of a timeout: the answer may still arrive after the node is stale.
                if not await _is_done(answer, STALE_AFTER_S):
                    self._mark_stale()
                    if not await _is_done(answer, GIVE_UP_AFTER_S - STALE_AFTER_S):
                        link.channel.drop(f"no answer for {GIVE_UP_AFTER_S:.0f} s")
                        return
                if answer.exception() is not None:
                    return
            finally:
                answer.cancel()
            took_s = time.monotonic() - sent_s
            self._publish(
                state="online",
                problem=link.channel.complaint,
                hint=_DISTRUST if link.channel.complaint else "",
                round_trip_s=took_s,
                last_seen_s=time.time(),
            )
            await asyncio.sleep(max(0.0, PING_INTERVAL_S - took_s))

    def _show_complaint(self, about: str) -> None:
        self._publish(problem=about, hint=_DISTRUST)

    def _mark_stale(self) -> None:
        self._publish(
            state="unreachable",
            problem=f"{self.node.name} has not answered for {STALE_AFTER_S:.1f} s",
            hint="It may be overloaded or disconnected; runs on it keep training",
            round_trip_s=None,
        )

    # ------------------------------------------------------------ samples

    async def _follow_samples(self, link: Link) -> None:
        """Follow the samples that are missing here, once they are wanted."""
        await self._samples_wanted.wait()
        try:
            # The clock of the node, since samples carry it: older ones are replayed history.
            clock = await link.channel.request(Ping.kind, timeout_s=GIVE_UP_AFTER_S)
            wall_s = _wall_of(clock)

            def take(kind: str, data: dict[str, Any]) -> None:
                if kind == "telemetry.sample":
                    self._take_sample(link, data, replayed_before_s=wall_s)

            request = FollowSamples(after_s=0.0 if self._newest is None else self._newest.time_s)
            await link.channel.follow(
                request.kind, request.to_args(), take, timeout_s=GIVE_UP_AFTER_S
            )
        except NodeUnreachable:
            return  # reported when the link ends
        except RacklessError as error:
            link.channel.complain(f"it sends no telemetry: {error}")

    def _take_sample(self, link: Link, data: dict[str, Any], replayed_before_s: float) -> None:
        try:
            sample = from_wire(Sample, read_lines(data))
        except WireError as error:
            link.channel.complain(f"it sent a sample in a wrong form: {error}")
            return
        newest = self._newest
        # A duplicate is newer neither by time nor by number. Both count, since a clock may step
        # back and numbers restart with the recorder.
        if newest and sample.time_s <= newest.time_s and sample.seq <= newest.seq:
            return
        self._newest = sample
        replayed = sample.time_s < replayed_before_s
        self._events.publish(SampleArrived(self.node.name, sample, replayed))

    def _publish(self, **changes: Any) -> None:
        self.snapshot = replace(self.snapshot, **changes)
        self._events.publish(NodeChanged(self.snapshot))


def _wall_of(clock: dict[str, Any]) -> float:
    """Return the wall clock in the answer to a ping, or 0 if it is missing."""
    wall_s = clock.get("wall_s")
    is_number = isinstance(wall_s, (int, float)) and not isinstance(wall_s, bool)
    return float(wall_s or 0.0) if is_number else 0.0


async def _is_done(task: asyncio.Future[Any], timeout_s: float) -> bool:
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    return bool(done)
