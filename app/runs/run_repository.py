"""Repository of runs: the only place that changes a stored run and publishes the change.

All other modules of `app.runs` get runs from it, report changes to it, or make it read new data of
the mirrors.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agents.contract.run import RankPlacement
from agents.contract.spec import RunSpec
from app.errors import UserError
from app.events import (
    ACTIVE_STATES,
    RESUMABLE_STATES,
    EventHub,
    FoundRun,
    FoundRunsChanged,
    RunChanged,
    RunDeleted,
    RunEvent,
    RunEventArrived,
    RunEventKind,
    RunSnapshot,
    RunState,
    Severity,
    StepsArrived,
)
from app.filelock import LockHolder, is_held, read_holder
from app.paths import Paths, UnsafeName
from app.runs.journals.history import RunHistory
from app.runs.journals.mirror import Mirror
from app.runs.run import may_move
from app.runs.snapshot import make_progress, make_snapshot
from app.storage.recoveries import RecoveryStore
from app.storage.runs import RunRecord, RunStore
from app.text import show_list

# Severity of the master's own events by kind; others are `info`. Events from journals bring theirs.
_SEVERITIES: dict[RunEventKind, Severity] = {
    "advice": "warning",
    "warning": "warning",
    "checkpoint_damaged": "warning",
    "checkpoint_failed": "warning",
    "interrupted": "error",
    "failed": "error",
    "recovery_given_up": "error",
}


LAUNCH_LOCK = "launch.lock"
RESUME_LOCK = "resume.lock"
"""Held from the request of a resume on, before which the state of the run is read."""


class RunRepository:
    def __init__(
        self, paths: Paths, store: RunStore, recoveries: RecoveryStore, events: EventHub
    ) -> None:
        self.paths = paths
        self.store = store
        self._recoveries = recoveries
        self._events = events
        self._histories: dict[str, RunHistory] = {}
        self._seen: dict[str, RunRecord] = {}
        self._started: frozenset[str] = frozenset()
        self._found: dict[str, tuple[FoundRun, ...]] = {}
        # Number of the newest event that was published or skipped, and later ones of this process.
        self._event_number: int | None = None
        self._own_events: set[int] = set()

    # ------------------------------------------------------------ reading

    def get(self, run_id: str) -> RunRecord:
        """Return a run by its id or an unambiguous prefix of it.

        Raises:
            UserError: there is no such run, or several match.
        """
        run = self.store.get(run_id)
        if run is not None:
            return run
        # An empty text would match every run.
        fitting = [run for run in self.store.all() if run_id and run.run_id.startswith(run_id)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise UserError(
                f"{run_id} matches {len(fitting)} run ids",
                "Type more of the id.",
                where=f"run {run_id}",
            )
        raise UserError(
            f"there is no run {run_id}", "List all runs: rackless runs list", where=f"run {run_id}"
        )

    def snapshot(self, run_id: str) -> RunSnapshot:
        run = self.get(run_id)
        # Lists show all runs: reading the journals of ended ones would take too long.
        history = self.history(run_id) if run.state in ACTIVE_STATES else None
        return self._snapshot(run, history)

    def full_snapshot(self, run_id: str) -> RunSnapshot:
        """Return the run with the last figures of its ranks, even if it has ended."""
        run = self.get(run_id)
        return self._snapshot(run, self.history(run_id))

    def _snapshot(self, run: RunRecord, history: RunHistory | None) -> RunSnapshot:
        snapshot = make_snapshot(run, self.placements(run), history)
        has_ended = run.state in RESUMABLE_STATES
        return replace(
            snapshot,
            is_recovering=has_ended and self._recoveries.is_pending(run.run_id),
            is_resuming=has_ended and self.find_starter(run.run_id) is not None,
            is_foreign=not self.is_ours(run),
        )

    def snapshots(self) -> tuple[RunSnapshot, ...]:
        """Return every run, newest first."""
        return tuple(self.snapshot(run.run_id) for run in self.store.all())

    def placements(self, run: RunRecord) -> tuple[RankPlacement, ...]:
        """Return the ranks of the newest attempt."""
        for attempt in self.store.attempts(run.run_id):
            if attempt.attempt == run.attempt:
                return attempt.placements
        return ()

    def rank_nodes(self, run_id: str, attempt: int) -> dict[int, str]:
        """Return the node of each rank of an attempt; empty if they are not known."""
        for one in self.store.attempts(run_id):
            if one.attempt == attempt:
                return {place.rank: place.node for place in one.placements}
        return {}

    def is_ours(self, run: RunRecord) -> bool:
        """Return True if this master has launched the newest attempt, or taken it over."""
        return any(
            attempt.attempt == run.attempt and attempt.is_ours
            for attempt in self.store.attempts(run.run_id)
        )

    def find_starter(self, run_id: str) -> LockHolder | None:
        """Return the living process that launches the run or resumes it, or None."""
        folder = self._folder(run_id)
        if folder is None:
            return None  # no run with such an id is ever launched
        for path in (folder / LAUNCH_LOCK, folder / RESUME_LOCK):
            if is_held(path):
                return read_holder(path) or LockHolder(
                    pid=0, command="unknown", since_s=time.time()
                )
        return None

    def history(self, run_id: str) -> RunHistory:
        """Return the run's history, read up to the current end of the mirrors."""
        history = self._histories.get(run_id)
        if history is None:
            places = functools.partial(self.rank_nodes, run_id)
            history = RunHistory(run_id, self._folder(run_id), places)
            history.refresh()
            self._histories[run_id] = history
        return history

    def why_unsafe(self, run: RunRecord) -> UnsafeName | None:
        """Return why the files of a stored run must not be touched, or None if they may be."""
        try:
            for node in run.nodes:
                self.paths.part(run.run_id, run.attempt, node)
            self.paths.run(run.run_id)
        except UnsafeName as error:
            return error
        return None

    def has_unsafe_id(self, run_id: str) -> bool:
        """Return True if a stored run has an id that leads out of the folder of runs."""
        return self.store.get(run_id) is not None and self._folder(run_id) is None

    def _folder(self, run_id: str) -> Path | None:
        # A run that a lying node made an older version store is shown, but without its files.
        try:
            return self.paths.run(run_id)
        except UnsafeName:
            return None

    def mirror(self, run_id: str, attempt: int, node: str) -> Mirror:
        """Return the mirror of one node's part of an attempt.

        Raises:
            UserError: the run or the node has a name that leads elsewhere.
        """
        part = self.paths.part(run_id, attempt, node)

        def refused(stream: str, error: UserError) -> None:
            self._add_once(run_id, f"{node}: {error.message}")

        return Mirror(part, below=self.paths.runs, refused=refused)

    def events(self, run_id: str) -> list[RunEvent]:
        """Return the run's events, oldest first."""
        events = [*self.store.events(run_id), *self.history(run_id).events]
        return sorted(events, key=lambda event: event.time_s)

    def found(self) -> tuple[FoundRun, ...]:
        """Return the runs that nodes listed in this process and that are not known to be ours."""
        ignored = self.store.ignored()
        every = [one for found in self._found.values() for one in found]
        shown = [one for one in every if (one.run_id, one.node) not in ignored]
        return tuple(sorted(shown, key=lambda one: (one.run_id, one.attempt, one.node)))

    def is_trusted(self, run: RunRecord) -> bool:
        """Return True if the settings of a stored run are this home's, or the user accepted them.

        Earlier versions stored runs of other masters as a node described them.
        """
        attempts = self.store.attempts(run.run_id)
        return (
            not attempts
            or any(attempt.inputs for attempt in attempts)
            or self.store.trusted_key(run.run_id) is not None
        )

    def require_trusted(self, run: RunRecord) -> None:
        """Raise UserError if files that the run names must not be opened on this PC."""
        if not self.is_trusted(run):
            raise UserError(
                f"the settings of run {run.run_id} are what {show_list(run.nodes)} said, and it "
                f"names {show_list(list_files(run.spec))}, which this PC would read",
                f"If these are the run's files: rackless runs adopt {run.run_id}",
            )

    # ------------------------------------------------------------ changing

    def set_found(self, found: Mapping[str, Sequence[FoundRun]]) -> None:
        """Replace the runs that each of these nodes listed."""
        before = self.found()
        self._found.update({node: tuple(runs) for node, runs in found.items()})
        self.publish_found(before)

    def drop_found(self, run_id: str, nodes: Sequence[str], before: tuple[FoundRun, ...]) -> None:
        """Forget that these nodes listed a run, which is stored now."""
        for node in nodes:
            kept = (one for one in self._found.get(node, ()) if one.run_id != run_id)
            self._found[node] = tuple(kept)
        self.publish_found(before)

    def publish_found(self, before: tuple[FoundRun, ...]) -> None:
        """Publish the found runs if they are no longer those of `before`."""
        if (now := self.found()) != before:
            self._events.publish(FoundRunsChanged(now))

    def add(self, run: RunRecord) -> bool:
        """Add a run; return False if it is known already or was deleted."""
        added = self.store.add(run)
        if added:
            self._publish(run.run_id)
        return added

    def change(self, run_id: str, change: Callable[[RunRecord], RunRecord | None]) -> None:
        """Change the stored run, and publish it if it has changed."""
        if self.store.change(run_id, change) is not None:
            self._publish(run_id)

    def move(self, run_id: str, attempt: int, state: RunState, message: str, hint: str) -> bool:
        """Move attempt `attempt` of the run to `state`; return True if its state changed.

        Does nothing if that is not a legal move, or if another process has launched a newer attempt
        meanwhile.
        """
        moved = False

        def step(run: RunRecord) -> RunRecord | None:
            nonlocal moved
            if run.attempt != attempt or not may_move(run.state, state):
                return None
            moved = run.state != state
            # Stored with the state, so that no list shows an ended run with old progress.
            progress = make_progress(self.history(run_id), attempt)
            return replace(_moved(run, state, message, hint), progress=progress)

        self.change(run_id, step)
        return moved

    def refresh(self, run_id: str) -> None:
        """Read the new data of the mirrors, and publish the new entries."""
        history = self.history(run_id)
        news = history.refresh()
        if news.steps:
            self._events.publish(StepsArrived(run_id, news.steps))
        for event in news.events:
            self._events.publish(RunEventArrived(event))
        if news.changed:
            self._publish(run_id)

    def save_progress(self, run_id: str) -> None:
        """Store the run's progress, so that lists need not read journals."""
        history = self.history(run_id)
        self.store.change(
            run_id, lambda run: replace(run, progress=make_progress(history, run.attempt))
        )

    def add_event(self, run_id: str, kind: RunEventKind, text: str) -> None:
        """Store and publish an event that the master caused or noticed."""
        severity = _SEVERITIES.get(kind, "info")
        event = RunEvent(run_id=run_id, time_s=time.time(), kind=kind, severity=severity, text=text)
        self._own_events.add(self.store.add_event(event))
        self._events.publish(RunEventArrived(event))

    def _add_once(self, run_id: str, text: str) -> None:
        """Store and publish a warning unless the run has the same event already."""
        if all(event.text != text for event in self.store.events(run_id)):
            self.add_event(run_id, "warning", text)

    def forget(self, run_id: str) -> None:
        """Remove a run permanently: its id is remembered as deleted."""
        self.store.delete(run_id)
        self._histories.pop(run_id, None)
        self._events.publish(RunDeleted(run_id))

    def discard(self, run_id: str) -> None:
        """Remove a run that never reached a node, as if it had never been started."""
        self.store.discard(run_id)
        self._histories.pop(run_id, None)
        self._events.publish(RunDeleted(run_id))

    def publish(self, run_id: str) -> None:
        """Publish a run that looks different although its record has not changed."""
        if self.store.get(run_id) is not None:
            self._publish(run_id)

    def publish_starters(self) -> None:
        """Publish the runs whose resume has begun or ended, here or in another process."""
        ended = self.store.in_states(RESUMABLE_STATES)
        now = frozenset(run_id for run_id in ended if self.find_starter(run_id) is not None)
        before, self._started = self._started, now
        for run_id in before ^ now:
            self.publish(run_id)

    def publish_changed(self) -> None:
        """Publish changes of the store by another process since the last call."""
        now = {run.run_id: run for run in self.store.all()}
        for run_id in self._seen.keys() - now.keys():
            self._events.publish(RunDeleted(run_id))
        for run_id, run in now.items():
            if self._seen.get(run_id) != run:
                self._publish(run_id)
        self._seen = now
        self._publish_events()

    def follow_events(self) -> None:
        """Publish from now on the events that other processes store; see `publish_changed`."""
        if self._event_number is None:
            self._event_number = self.store.last_event()

    def _publish_events(self) -> None:
        # The numbers of a deleted run are given again.
        self._event_number = min(self._event_number or 0, self.store.last_event())
        for number, event in self.store.events_after(self._event_number):
            if number not in self._own_events:
                self._events.publish(RunEventArrived(event))
            self._event_number = number
        self._own_events.clear()

    def _publish(self, run_id: str) -> None:
        self._events.publish(RunChanged(self.full_snapshot(run_id)))


def list_files(spec: RunSpec) -> tuple[str, ...]:
    """Return the data and model that settings name."""
    return tuple(name for name in (*spec.data.list_names(), spec.model) if name)


def _moved(run: RunRecord, state: RunState, message: str, hint: str) -> RunRecord:
    now_s = time.time()
    ended = state not in ACTIVE_STATES
    return replace(
        run,
        state=state,
        message=message,
        hint=hint,
        started_s=run.started_s or (now_s if state == "running" else None),
        # A repeated move must not shift the end.
        ended_s=(run.ended_s or now_s) if ended else None,
        # A stop request ends with the attempt: a resume must not be stopped by it.
        stop_asked=run.stop_asked and not ended,
    )
