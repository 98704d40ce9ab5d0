"""What the core tells its listeners: immutable snapshots, and the hub that hands them out.

A listener (the window, `--watch`, a test) never asks twice: it takes the snapshot in the event.
Snapshots are complete values of one thing at one moment; None means not known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agents.contract.node import NodeFacts, Sample
from agents.contract.spec import RunSpec
from app.artifact import Verdict

NodeState = Literal["connecting", "online", "unreachable", "refused"]
RunState = Literal[
    "created", "launching", "running", "stopping", "stopped", "interrupted", "failed", "done"
]
ACTIVE_STATES: frozenset[RunState] = frozenset({"created", "launching", "running", "stopping"})
RESUMABLE_STATES: frozenset[RunState] = frozenset({"stopped", "interrupted", "failed"})
TransportKind = Literal["ssh", "local", "wsl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSnapshot:
    name: str
    transport: TransportKind
    address: str
    """`user@host:port`, `this PC` or the WSL distro."""
    state: NodeState
    problem: str = ""
    """What is wrong, in a sentence; empty while online."""
    hint: str = ""
    facts: NodeFacts | None = None
    round_trip_s: float | None = None
    last_seen_s: float | None = None
    """Wall clock of the last answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSnapshot:
    """What the last check measured from one node to another."""

    node: str
    peer: str
    round_trip_s: float
    bytes_per_s: float | None
    measured_s: float
    """Wall clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    rank: int
    node: str
    device: str
    state: str
    step: int | None = None
    phase: str | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    input_s: float | None = None
    """Part of the step spent choosing the batch and getting its rows."""
    compute_s: float | None = None
    wait_s: float | None = None
    """Part of the step spent waiting for other ranks and the network."""
    optimizer_s: float | None = None
    mfu: float | None = None
    """Model FLOPs over what the device could have done in the step, 0 to 1."""
    memory_bytes: int | None = None
    """Peak that training needed."""
    memory_unpacked_bytes: int | None = None
    """Beside it, of memory to spare: 4-bit weights that are kept unpacked."""
    memory_reserved_bytes: int | None = None
    """Peak that was taken from the device, held or kept for later."""
    share: float | None = None
    """Part of each batch, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """How the first steps of a resumed run compare with what was logged for them before."""

    promise: Literal["A", "B"]
    """A: equal to the last bit (same devices and versions). B: same samples, losses differ by
    rounding only."""
    first_step: int
    last_step: int
    steps: int
    """How many were compared."""
    equal_to_the_bit: bool
    largest_difference: float
    """Of a loss, relative to the logged one."""
    other_samples: int
    """Steps that saw other samples than logged."""
    kept: bool
    """What was promised holds."""


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
    """Over all ranks."""
    mfu: float | None = None
    """Model FLOPs over what all devices together could have done in the step, 0 to 1."""
    eta: float | None = None
    """Tokens per second of the cluster over the sum of what its ranks do alone."""
    evaluation_loss: float | None = None
    perplexity: float | None = None
    """exp of the newest evaluation's loss."""
    remaining_s: float | None = None
    ranks: tuple[RankProgress, ...] = ()
    newest_checkpoint_step: int | None = None
    phase: str | None = None
    certificate: Certificate | None = None
    """Of the newest attempt, when its resume was verified and the replay is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step of a run, as its journals tell it."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """What an evaluation found."""

    attempt: int
    step: int
    """After which it was made."""
    loss: float | None
    perplexity: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSnapshot:
    run_id: str
    step: int
    created_s: float
    size_bytes: int
    nodes: tuple[str, ...]
    """Nodes that hold a copy and answered."""
    verified: bool | None
    """All listed copies were hashed and are equal; None: not looked at."""
    problem: str = ""
    stall_s: float | None = None
    """For how long training stood still for it, on the rank that waited longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """What became of the wish for a checkpoint."""

    step: int | None
    """After which step; None: no rank has come to the end of its step yet."""
    stall_s: float | None = None
    """For how long training stood still."""
    seconds: float | None = None
    """Until it was written and hashed; None: it is still being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedModel:
    """A model folder on this PC."""

    path: Path
    artifact: str = ""
    """Its name and version among the artifacts."""
    verdicts: tuple[Verdict, ...] = ()
    """Empty: it is the merged model itself, which loses nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """An operation, or a kernel where a GPU was recorded."""

    name: str
    count: int
    seconds: float
    """Its own, without what it called."""
    share: float
    """Of all operations, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """What one rank recorded."""

    rank: int
    first_step: int
    last_step: int
    path: str
    """Of the gzipped Chrome trace on this PC, once it has been fetched."""
    size_bytes: int
    top: tuple[TraceRow, ...] = ()
    """What took longest."""
    problem: str = ""
    """Why there is no trace; empty: there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResult:
    """What became of the wish for a trace."""

    first_step: int | None
    """None: no rank has come to the end of its step yet."""
    ranks: tuple[RankTrace, ...] = ()
    """Those that have told."""
    is_complete: bool = False
    """All ranks have told, and every trace lies on this PC."""


Severity = Literal["info", "warning", "error"]
RunEventKind = Literal[
    "note",
    "requested",
    "launched",
    "found",
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
    "stalled",
    "rank_exited",
    "exported",
]
CHECKPOINT_KINDS: frozenset[RunEventKind] = frozenset(
    {"checkpoint", "checkpoint_copied", "checkpoint_damaged", "checkpoint_failed"}
)
"""Kinds after which a run's list of checkpoints may have changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """One entry of a run's event log."""

    run_id: str
    time_s: float
    severity: Severity
    text: str
    """Sentence for people. Programs decide by `kind`: the wording changes between versions."""
    kind: RunEventKind = "note"
    """What happened. `note` for events read back from the database, which has no column for it."""


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
class ArtifactsChanged:
    """The list of artifacts, or where they lie, is another one."""


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
    | ArtifactsChanged
    | StepsArrived
    | LogArrived
    | RunEventArrived
)
Listener = Callable[[Event], None]


class EventHub:
    """Hands every event to every listener, on the thread of the event loop.

    A listener must return at once (put it in a deque, emit a queued signal). Streams made by
    `stream` are bounded: when a reader falls behind, the oldest telemetry goes, nothing else.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def publish(self, event: Event) -> None:
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
        queue: deque[Event] = deque()
        samples: deque[Event] = deque(maxlen=max_samples)
        wake = asyncio.Event()

        def take(event: Event) -> None:
            (samples if isinstance(event, SampleArrived) else queue).append(event)
            wake.set()

        with self.listening(take):
            while True:
                await wake.wait()
                wake.clear()
                while queue or samples:
                    yield (queue if queue else samples).popleft()
