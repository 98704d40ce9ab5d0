"""The newest snapshot of every node, run and device, with a signal for each kind of change.

Pages read from here, and ask the core only for data outside the snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from app.events import (
    ACTIVE_STATES,
    ArtifactsChanged,
    Event,
    FoundRun,
    FoundRunsChanged,
    LogArrived,
    NodeChanged,
    NodeRemoved,
    NodeSnapshot,
    RunChanged,
    RunDeleted,
    RunEventArrived,
    RunSnapshot,
    SampleArrived,
    StepsArrived,
)
from app.gui.session.bridge import Bridge
from app.telemetry.state import current_run, is_silent
from app.telemetry.stream import Telemetry


class LiveState(QObject):
    """Nodes, runs and live figures; belongs to the Qt thread."""

    node_changed = Signal(str)
    node_removed = Signal(str)
    structure_changed = Signal()
    """The set of devices changed."""
    run_changed = Signal(str)
    run_deleted = Signal(str)
    found_changed = Signal()
    """Runs that are on nodes and not this home's appeared or went."""
    artifacts_changed = Signal()
    devices_changed = Signal(list)
    """DeviceKeys with new figures, at most once per frame."""
    steps_arrived = Signal(str, tuple)
    log_arrived = Signal(object)
    run_event_arrived = Signal(object)
    is_open_changed = Signal()

    def __init__(self, bridge: Bridge, clock: Callable[[], float] = time.time) -> None:
        super().__init__(bridge)
        self.nodes: dict[str, NodeSnapshot] = {}
        self.runs: dict[str, RunSnapshot] = {}
        self.found: tuple[FoundRun, ...] = ()
        self.telemetry = Telemetry()
        self.is_open = False
        self.now_s = clock
        bridge.opened.connect(self._fill)
        bridge.event_arrived.connect(self._apply)
        bridge.sampled.connect(self._add_samples)

    def node_list(self) -> tuple[NodeSnapshot, ...]:
        """Return all nodes by name."""
        return tuple(self.nodes[name] for name in sorted(self.nodes))

    def run_list(self) -> tuple[RunSnapshot, ...]:
        """Return all runs, the newest first."""
        return tuple(sorted(self.runs.values(), key=lambda run: -run.created_s))

    def active_runs(self) -> tuple[RunSnapshot, ...]:
        """Return the runs that occupy devices now."""
        return tuple(run for run in self.run_list() if run.state in ACTIVE_STATES)

    def current_run(self, run_id: str) -> RunSnapshot | None:
        """Return a run for display: without the figures of silent nodes."""
        run = self.runs.get(run_id)
        return None if run is None else current_run(run, self.nodes, self.now_s())

    def has_silent_nodes(self, run: RunSnapshot) -> bool:
        """Return whether an active run has silent nodes, whose ages need updates."""
        return run.state in ACTIVE_STATES and any(
            is_silent(self.nodes.get(name), self.now_s()) for name in run.nodes
        )

    def take_run(self, run: RunSnapshot) -> None:
        """Take a whole snapshot that was asked for; lists of ended runs lack the ranks' figures."""
        known = self.runs.get(run.run_id)
        # An answer may come after the run has been resumed, or deleted.
        if known is not None and (known.attempt, known.state) == (run.attempt, run.state):
            self._apply(RunChanged(run))

    def _fill(self, nodes: tuple[NodeSnapshot, ...], runs: tuple[RunSnapshot, ...]) -> None:
        # As events, so that pages take the first snapshots in the same way as later ones.
        self.is_open = True
        for node in nodes:
            self._apply(NodeChanged(node))
        for run in runs:
            self._apply(RunChanged(run))
        self.is_open_changed.emit()

    def _apply(self, event: Event) -> None:
        match event:
            case NodeChanged(node):
                self._take_node(node)
            case NodeRemoved(name):
                self.nodes.pop(name, None)
                self.telemetry.forget(name)
                self.structure_changed.emit()
                self.node_removed.emit(name)
                self._signal_runs_of(name)
            case RunChanged(run):
                # State before signal, here as everywhere: receivers read from this object.
                self.runs[run.run_id] = run
                self._follow_runs()
                self.run_changed.emit(run.run_id)
            case RunDeleted(run_id):
                self.runs.pop(run_id, None)
                self._follow_runs()
                self.run_deleted.emit(run_id)
            case FoundRunsChanged(found):
                self.found = found
                self.found_changed.emit()
            case ArtifactsChanged():
                self.artifacts_changed.emit()
            case StepsArrived(run_id, steps):
                self.steps_arrived.emit(run_id, steps)
            case LogArrived():
                self.log_arrived.emit(event)
            case RunEventArrived(run_event):
                self.run_event_arrived.emit(run_event)

    def _take_node(self, node: NodeSnapshot) -> None:
        before = self.nodes.get(node.name)
        self.nodes[node.name] = node
        # `expect` comes first: it has to run for a known node, too
        if self.telemetry.expect(node) or before is None:
            self.structure_changed.emit()
        self.node_changed.emit(node.name)
        if before is None or before.state != node.state:
            self._signal_runs_of(node.name)

    def _add_samples(self, events: list[SampleArrived]) -> None:
        changed = set()
        before = sum(1 for _ in self.telemetry)
        for event in events:
            # Samples wait for the next frame, by when their node may have been removed.
            if event.node in self.nodes:
                # Replayed samples are history: they say nothing about when the node last answered.
                arrived_s = None if event.replayed else self.now_s()
                took = self.telemetry.take(
                    event.node, event.sample, arrived_s, replayed=event.replayed
                )
                changed.update(took)
        if sum(1 for _ in self.telemetry) != before:
            self.structure_changed.emit()
        if changed:
            self.devices_changed.emit(sorted(changed))

    def _signal_runs_of(self, node: str) -> None:
        """Signal the active runs of a node: their displayed figures depend on its state."""
        for run in self.active_runs():
            if node in run.nodes:
                self.run_changed.emit(run.run_id)

    def _follow_runs(self) -> None:
        changed = self.telemetry.follow_runs(self.active_runs())
        if changed:
            self.devices_changed.emit(changed)
