"""Events that the core publishes, the snapshots they carry, and the hub that delivers them.

A listener (the window, `--watch`, a test) never has to query, since an event carries the whole
snapshot. Snapshots are complete, immutable values of one moment; None means unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agents.contract.node import NodeFacts, Sample
from agents.contract.run import AttemptState, MasterIdentity
from agents.contract.spec import RunSpec
from app.artifact import Verdict

NodeState = Literal["connecting", "online", "unreachable", "refused"]
RunState = Literal[
    "created", "launching", "running", "stopping", "stopped", "interrupted", "failed", "done"
]
# Nodes are polled for these runs only; in any other state the attempt is over.
ACTIVE_STATES: frozenset[RunState] = frozenset({"created", "launching", "running", "stopping"})
RESUMABLE_STATES: frozenset[RunState] = frozenset({"stopped", "interrupted", "failed"})
TransportKind = Literal["ssh", "local", "wsl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSnapshot:
    name: str
    transport: TransportKind
    address: str
    """Address: `user@host:port`, `this PC` or the WSL distro."""
    state: NodeState
    problem: str = ""
    """Problem as a sentence; empty while online."""
    hint: str = ""
    facts: NodeFacts | None = None
    round_trip_s: float | None = None
    last_seen_s: float | None = None
    """Time of the last answer, in seconds since the epoch by the master's clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSnapshot:
    """Network link from one node to another, measured by the last check."""

    node: str
    peer: str
    round_trip_s: float
    bytes_per_s: float | None
    measured_s: float
    """Time of the check, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    rank: int
    node: str
    device: str
    state: str
    step: int | None = None
    time_s: float | None = None
    """Time at which it finished that step, in seconds since the epoch by its node's clock."""
    silent_since_s: float | None = None
    """Time of its node's last answer while the node is silent, by the master's clock; None while
    the node answers, or if it never did."""
    phase: str | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    input_s: float | None = None
    """Time per step spent on choosing the batch and reading its rows, in seconds."""
    compute_s: float | None = None
    wait_s: float | None = None
    """Time per step spent on waiting for other ranks and the network, in seconds."""
    optimizer_s: float | None = None
    mfu: float | None = None
    """Model FLOPs utilization: model FLOPs over the device's peak FLOPs, 0 to 1."""
    memory_bytes: int | None = None
    """Peak memory that training needs, in bytes."""
    memory_unpacked_bytes: int | None = None
    """Additional spare memory that holds unpacked 4-bit weights, in bytes."""
    memory_reserved_bytes: int | None = None
    """Peak of the memory that the allocator reserved on the device, in bytes."""
    share: float | None = None
    """Share of each batch, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseProgress:
    """Progress of one rank in its current phase, from its journal."""

    phase: str
    done: float | None = None
    """Amount done, such as bytes read; None: unknown."""
    total: float | None = None
    """Amount at the end of the phase; None: unknown."""
    share: float | None = None
    """Share of the phase that is done, 0 to 1; None: unknown."""
    expected_s: float | None = None
    """Expected duration of the rest of the phase at the time of the record, in seconds."""
    time_s: float | None = None
    """Time of the record by the node's clock, in seconds since the epoch; None: unknown."""
    node: str = ""
    """Node of the rank; empty: the run has one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """Comparison of a resumed run's first steps with those logged before the interruption."""

    promise: Literal["A", "B"]
    """Guarantee that applies. A: bit-exact (same devices and versions). B: same samples, losses
    differ only by rounding."""
    first_step: int
    last_step: int
    steps: int
    """Number of compared steps."""
    equal_to_the_bit: bool
    largest_difference: float
    """Largest difference of a loss, relative to the logged one."""
    other_samples: int
    """Number of steps that saw other samples than logged."""
    kept: bool
    """True if the guarantee holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    run_id: str
    name: str
    state: RunState
    spec: RunSpec
    attempt: int
    nodes: tuple[str, ...]
    message: str = ""
    hint: str = ""
    created_s: float
    started_s: float | None = None
    ended_s: float | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    first_loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    """Speed of all ranks together, in tokens/s."""
    mfu: float | None = None
    """Model FLOPs utilization over all devices, 0 to 1."""
    eta: float | None = None
    """Scaling efficiency: the cluster's tokens per second over the sum of its ranks' own."""
    evaluation_loss: float | None = None
    perplexity: float | None = None
    """Exponential of the newest evaluation loss."""
    remaining_s: float | None = None
    ranks: tuple[RankProgress, ...] = ()
    newest_checkpoint_step: int | None = None
    phase: str | None = None
    starting: PhaseProgress | None = None
    """Progress of the slowest rank before the run's first step."""
    silent_nodes: tuple[str, ...] = ()
    """Nodes of an active run whose current state is unknown."""
    certificate: Certificate | None = None
    """Result of the newest attempt's verified resume; None until the replay is over."""
    is_recovering: bool = False
    """True if the run has lost a rank or a node and will be resumed automatically."""
    is_resuming: bool = False
    """True if a process of this home resumes it now, but has not launched it yet."""
    is_foreign: bool = False
    """True if another master resumes it after a loss, and this one only watches it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step of a run, from its journals."""

    attempt: int
    step: int
    time_s: float
    loss: float | None
    learning_rate: float | None
    gradient_norm: float | None
    tokens_per_s: float | None
    step_s: float | None
    wait_s: float | None
    eta: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the objective in addition to the loss, by the name of its row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """Result of one evaluation."""

    attempt: int
    step: int
    """Step after which it ran."""
    loss: float | None
    perplexity: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSnapshot:
    run_id: str
    step: int
    created_s: float
    size_bytes: int
    nodes: tuple[str, ...]
    """Nodes that answered and hold a copy."""
    verified: bool | None
    """True if all listed copies were hashed and are equal; None: not verified."""
    problem: str = ""
    stall_s: float | None = None
    """Time that training paused for it, on the slowest rank, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """Result of a request to save a checkpoint."""

    step: int | None
    """Step after which it is saved; None while no rank has finished its current step."""
    stall_s: float | None = None
    """Time that training paused, in seconds."""
    seconds: float | None = None
    """Time until it was written and hashed, in seconds; None while it is being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """Model folder on this PC that an export made."""

    path: Path
    artifact: str = ""
    """Name and version of its artifact."""
    verdicts: tuple[Verdict, ...] = ()
    """Measured quality; empty for the merged model itself, which is lossless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTransfer:
    """Progress of a node in a transfer of files."""

    node: str
    held_bytes: int
    total_bytes: int
    bytes_per_s: float | None
    """Rate over the last seconds, in bytes per second; None: not known yet."""

    @property
    def remaining_s(self) -> float | None:
        """Time until the node has everything, in seconds; None: not known yet."""
        if not self.bytes_per_s:
            return None
        return (self.total_bytes - self.held_bytes) / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """Operation of a trace, or a kernel if a GPU was recorded."""

    name: str
    count: int
    seconds: float
    """Self time, without the operations that it called, in seconds."""
    share: float
    """Share of the time of all operations, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """Trace that one rank recorded."""

    rank: int
    first_step: int
    last_step: int
    path: str
    """Path of the gzipped Chrome trace on this PC, once it has been fetched."""
    size_bytes: int
    top: tuple[TraceRow, ...] = ()
    """Slowest operations, slowest first."""
    problem: str = ""
    """Reason why there is no trace; empty: there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResult:
    """Result of a request to record a trace."""

    first_step: int | None
    """First recorded step; None while no rank has finished its current step."""
    ranks: tuple[RankTrace, ...] = ()
    """Traces of the ranks that have reported."""
    is_complete: bool = False
    """True if all ranks have reported and every trace is on this PC."""


Severity = Literal["info", "warning", "error"]
RunEventKind = Literal[
    "note",
    "requested",
    "launched",
    "found",
    "taken_over",
    "advice",
    "started",
    "data_read",
    "setting",
    "evaluated",
    "checkpoint",
    "checkpoint_copied",
    "checkpoint_damaged",
    "checkpoint_failed",
    "certificate",
    "trace",
    "trace_failed",
    "warning",
    "finished",
    "interrupted",
    "failed",
    "adopted",
    "stalled",
    "slept",
    "too_hot",
    "cooled",
    "clock_set",
    "disk",
    "rank_exited",
    "exported",
    "recovery",
    "recovery_given_up",
]
CHECKPOINT_KINDS: frozenset[RunEventKind] = frozenset(
    {"checkpoint", "checkpoint_copied", "checkpoint_damaged", "checkpoint_failed"}
)
"""Kinds after which the list of a run's checkpoints may have changed."""
INTERRUPTION_KINDS: frozenset[RunEventKind] = frozenset(
    {
        "interrupted", "failed", "requested", "launched", "recovery", "recovery_given_up",
        "too_hot", "cooled",
    }
)  # fmt: skip
"""Kinds after which the story of a run's interruptions may have changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """One entry of a run's event log."""

    run_id: str
    time_s: float
    severity: Severity
    text: str
    """Sentence for the user, whose wording may change; programs dispatch on `kind`."""
    kind: RunEventKind = "note"
    """Kind of the event; always `note` if read from the database, which has no column for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """Attempt that a node lists and that nothing proves to be this home's; only shown."""

    run_id: str
    attempt: int
    name: str
    node: str
    state: AttemptState
    is_active: bool
    """True if it has processes."""
    started_s: float | None
    master: MasterIdentity | None
    """Master that launched it, as the node says."""
    files: tuple[str, ...]
    """Data and model that it names; a resume would read those that are on this PC."""


# ---------------------------------------------------------------- what is published


@dataclass(frozen=True, slots=True)
class NodeChanged:
    node: NodeSnapshot


@dataclass(frozen=True, slots=True)
class NodeRemoved:
    name: str


@dataclass(frozen=True, slots=True)
class SampleArrived:
    node: str
    sample: Sample
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class RunChanged:
    run: RunSnapshot


@dataclass(frozen=True, slots=True)
class RunDeleted:
    run_id: str


@dataclass(frozen=True, slots=True)
class FoundRunsChanged:
    runs: tuple[FoundRun, ...]


@dataclass(frozen=True, slots=True)
class ArtifactsChanged:
    """The list of artifacts or their copies has changed."""


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The database can no longer be used by this process, which has to be restarted."""

    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class StepsArrived:
    run_id: str
    steps: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True)
class LogArrived:
    run_id: str
    attempt: int
    stream: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RunEventArrived:
    event: RunEvent


Event = (
    NodeChanged
    | NodeRemoved
    | SampleArrived
    | RunChanged
    | RunDeleted
    | FoundRunsChanged
    | ArtifactsChanged
    | StoreFailed
    | StepsArrived
    | LogArrived
    | RunEventArrived
)
Listener = Callable[[Event], None]


class EventHub:
    """Delivers every event to every listener, on the thread of the event loop.

    A listener must return at once: append to a deque, or emit a queued signal. A slow reader of
    `stream` loses the oldest samples, but never any other event.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def publish(self, event: Event) -> None:
        # A copy, since a listener may end its own `listening` block while it is called.
        for listener in tuple(self._listeners):
            listener(event)

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Call `listener` for each event inside the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def stream(self, max_samples: int = 1000) -> AsyncIterator[Event]:
        """Yield events from now on."""
        # Only samples have a bounded queue, so that a slow reader drops nothing else: they come
        # every second from every node, while other events are few.
        queue: deque[Event] = deque()
        samples: deque[Event] = deque(maxlen=max_samples)
        wake = asyncio.Event()

        def take(event: Event) -> None:
            (samples if isinstance(event, SampleArrived) else queue).append(event)
            wake.set()

        with self.listening(take):
            while True:
                # Cleared before the queues are emptied, so that an event that arrives during a
                # `yield` wakes the loop.
                await wake.wait()
                wake.clear()
                while queue or samples:
                    # Samples last: a newer one replaces them anyway.
                    yield (queue if queue else samples).popleft()
