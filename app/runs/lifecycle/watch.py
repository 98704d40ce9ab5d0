"""Watch a run until it ends: mirror its journals as they grow, publish changes, judge it.

One task per node streams its journals; one loop judges the run about once a second. Several
processes may watch the same run: mirrors only grow, and all processes reach the same judgement.

A full or failing disk of this PC causes one warning and ends nothing: the nodes keep logs and
journals, and storing is retried until there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator

from agents.contract.run_layout import LOG_SUFFIX
from app.errors import NodeUnreachable, RacklessError, UserError, describe_error
from app.events import ACTIVE_STATES, EventHub, LogArrived, RunEvent, RunEventArrived
from app.runs.journals.mirror import MirrorBlocked
from app.runs.journals.streams import follow_part
from app.runs.lifecycle.election import keep_interval_s, keep_part
from app.runs.lifecycle.reconcile import apply_judgement, end_unsafe
from app.runs.nodes.attempt_status import ask_part, idle_s
from app.runs.run import RunPart
from app.runs.services import Services
from app.storage.runs import RunRecord

# Limits the load on listeners: a small model makes hundreds of steps per second.
PUBLISH_INTERVAL_S = 0.1
JUDGE_INTERVAL_S = 1.0
# Progress is stored only for lists of unwatched runs; each save costs an fsync.
SAVE_INTERVAL_S = 10.0
RETRY_S = 1.0
ABSENCE_S = 15.0
"""Gap between two queries of the nodes that shows that this PC or process itself was paused, in
seconds; queries time out after three."""


class RunWatch:
    """Watch of the newest attempt of one run."""

    def __init__(self, services: Services, run: RunRecord, events: EventHub) -> None:
        self._services = services
        self._run_id = run.run_id
        self._attempt = run.attempt
        self._nodes = run.nodes
        self._events = events
        self._parts = {node: RunPart(node=node, silent_s=0.0) for node in run.nodes}
        self._news = asyncio.Event()
        self._silent_since_s: dict[str, float] = {}
        # Pending queries of nodes.
        self._asked: dict[str, asyncio.Task[RunPart]] = {}
        self._kept_s: dict[str, float] = {}
        self._warned: set[str] = set()

    async def run_until_end(self) -> None:
        """Return when the attempt is over or a newer one has replaced it."""
        run = self._services.runs.store.get(self._run_id)
        if run is not None and end_unsafe(self._services, run):
            return
        # A failure in any task ends the watch; otherwise only the judgement ends it.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._follow(node)) for node in self._nodes]
            tasks.append(group.create_task(self._publish_news()))
            try:
                await self._judge_until_end(group)
            finally:
                for task in (*tasks, *self._asked.values()):
                    task.cancel()
        self._services.runs.refresh(self._run_id)

    # ------------------------------------------------------------ one node

    async def _follow(self, node: str) -> None:
        mirror = self._services.runs.mirror(self._run_id, self._attempt, node)

        def written(stream: str, offset: int, data: bytes) -> None:
            self._news.set()
            if stream.endswith(LOG_SUFFIX):
                self._events.publish(LogArrived(self._run_id, self._attempt, stream, offset, data))

        while True:
            # The judgement decides if a silent node is lost; here it is only retried.
            with contextlib.suppress(RacklessError), self._warning(MirrorBlocked):
                agent = self._services.pool.agent(node)
                await follow_part(agent, mirror, self._run_id, self._attempt, written)
            await asyncio.sleep(RETRY_S)

    async def _publish_news(self) -> None:
        saved_s = time.monotonic()
        while True:
            # Another process may have stored bytes that no longer arrive here.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), JUDGE_INTERVAL_S)
            # Cleared before reading, so that bytes that arrive during it set the event again.
            self._news.clear()
            self._services.runs.refresh(self._run_id)
            if time.monotonic() - saved_s > SAVE_INTERVAL_S:
                saved_s = time.monotonic()
                with self._warning(UserError):
                    self._services.runs.save_progress(self._run_id)
            await asyncio.sleep(PUBLISH_INTERVAL_S)

    # ------------------------------------------------------------ the whole

    async def _judge_until_end(self, group: asyncio.TaskGroup) -> None:
        asked_s = time.monotonic()
        while True:
            # A PC that slept has not observed its nodes' silence for that long.
            if time.monotonic() - asked_s > ABSENCE_S:
                self._silent_since_s.clear()
            asked_s = time.monotonic()
            run = self._services.runs.store.get(self._run_id)
            if run is None or run.attempt != self._attempt or run.state not in ACTIVE_STATES:
                return
            if not self._services.is_launching(self._run_id):
                parts = await self._ask_all(group)
                with self._warning(UserError):
                    verdict = await apply_judgement(self._services, run, parts, idle_s(parts))
                    if verdict.state not in ACTIVE_STATES:
                        return
            await asyncio.sleep(JUDGE_INTERVAL_S)

    @contextlib.contextmanager
    def _warning(self, kind: type[UserError]) -> Iterator[None]:
        """Publish an error of the block as a warning, each one only once, and continue after it."""
        try:
            yield
        except kind as error:
            text = describe_error(error)
            if text not in self._warned:
                self._warned.add(text)
                # Only published, since a full disk cannot store an event.
                event = RunEvent(
                    run_id=self._run_id,
                    time_s=time.time(),
                    severity="warning",
                    kind="warning",
                    text=f"{text} Training continues, and this is tried again.",
                )
                self._events.publish(RunEventArrived(event))

    async def _ask_all(self, group: asyncio.TaskGroup) -> tuple[RunPart, ...]:
        """Query all nodes; those that were silent before are not awaited."""
        # Otherwise the end of a run that has lost a node would be noticed seconds later.
        for node in self._nodes:
            if node not in self._asked:
                self._asked[node] = group.create_task(self._ask(node))
        awaited = [task for node, task in self._asked.items() if node not in self._silent_since_s]
        if awaited:
            await asyncio.wait(awaited)
        return tuple(self._take_answer(node) for node in self._nodes)

    def _take_answer(self, node: str) -> RunPart:
        if self._asked[node].done():
            return self._asked.pop(node).result()
        return RunPart(node=node, silent_s=time.monotonic() - self._silent_since_s[node])

    async def _ask(self, node: str) -> RunPart:
        """Query one node, with a short timeout: a silent node must not delay the judgement."""
        try:
            async with asyncio.timeout(JUDGE_INTERVAL_S * 3):
                part = await ask_part(self._services.pool, node, self._run_id, self._attempt)
                await self._keep(part)
        except (TimeoutError, NodeUnreachable):
            part = RunPart(node=node, silent_s=0.0)
        now_s = time.monotonic()
        if part.answers:
            self._silent_since_s.pop(node, None)
            return part
        since_s = self._silent_since_s.setdefault(node, now_s)
        return RunPart(node=node, silent_s=now_s - since_s)

    async def _keep(self, part: RunPart) -> None:
        """Tell a node at intervals that this master recovers the run, so that its nodes do not."""
        now_s = time.monotonic()
        is_due = now_s - self._kept_s.get(part.node, -math.inf) >= keep_interval_s(self._services)
        if is_due and part.status is not None and part.status.election is not None:
            self._kept_s[part.node] = now_s
            run = self._services.runs.get(self._run_id)
            if run.attempt == self._attempt and self._services.runs.is_ours(run):
                await keep_part(self._services, run, part.node)
