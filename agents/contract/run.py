"""An attempt of a run as master and node describe it: intent, state, ranks, streams, files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agents.contract.spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlacement:
    rank: int
    local_rank: int
    node: str
    device: str
    """`cpu` or `cuda:0`, as the node counts them."""
    device_id: str = "cpu"
    """What is leased: the GPU's uuid, or `cpu`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStep:
    """What a journal tells of a step, as far as a replay can be held against it."""

    step: int
    loss_hex: str
    """Every bit of the loss, as `float.hex` writes it."""
    samples: str
    """Hash of the rows, in order."""
    shares: tuple[float, ...] = ()
    """Weight of each rank in that step."""
    saved: bool = False
    """A checkpoint was written after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Steps that an earlier attempt logged and this one does again, to show that it is exact."""

    steps: tuple[LoggedStep, ...]
    devices: tuple[tuple[str, str], ...]
    """Node and device of each rank that logged them; empty: not the same ones for all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptIntent:
    """All that a node needs to run its part of one attempt. Written and fsynced before any fork."""

    run_id: str
    attempt: int
    node: str
    spec: RunSpec
    python: str
    """Interpreter of the training environment on this node."""
    ranks: tuple[RankPlacement, ...]
    """All ranks of the attempt, in rank order."""
    master_address: str
    master_port: int
    address: str
    interface: str | None = None
    """Network device that carries training traffic on this node; None: left to torch."""
    model_path: str
    """Folder on this node, or the hub id."""
    train_path: str
    eval_path: str | None = None
    resume_step: int | None = None
    """Checkpoint to start from, already on this node; None: from the beginning."""
    replay: Replay | None = None
    """What the steps after `resume_step` are compared with; None: nothing."""
    checkpoint_ranks: tuple[int, ...] = (0,)
    """The ranks that write each checkpoint, one per node that keeps a copy."""
    num_threads: int | None = None
    """CPU threads per rank; None: the cores divided by the ranks of this node."""
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRequest:
    """Something that is asked of an attempt while it trains."""

    wish_id: str
    """Made up by whoever asks, to know the answer by."""
    kind: Literal["save", "trace"]
    """`save`: a checkpoint at the end of the present step. `trace`: the steps after the present one
    are recorded with torch's profiler."""
    num_steps: int = 0
    """Steps to record."""


AttemptState = Literal["starting", "running", "stopping", "stopped", "done", "failed", "lost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    rank: int
    pid: int | None = None
    step: int | None = None
    phase: str | None = None
    heartbeat_age_s: float | None = None
    exit_code: int | None = None
    """Negative: the signal that ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStatus:
    run_id: str
    attempt: int
    node: str
    state: AttemptState
    """`lost`: no supervisor and no record of an end (power cut, reboot, kill)."""
    message: str = ""
    """Why it ended, in a sentence with node, rank and phase; empty while all is well."""
    hint: str = ""
    supervisor_pid: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    spec: RunSpec | None = None
    all_ranks: tuple[RankPlacement, ...] = ()
    num_processes: int | None = None
    """Processes that carry the run's tag now, the supervisor among them."""
    peer_lost: bool = False
    """It failed because a rank lost its connection to another rank: most likely a consequence of
    something on another node, whose message then names the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamChunk:
    """Bytes of a file of an attempt that only grows.

    Streams: `supervisor.jsonl`, `rank-R.jsonl` (journals), `rank-R.log` (output of a rank), and
    `trace-STEP-rank-R.json.gz`, a trace that was asked for, which appears whole.
    """

    run_id: str
    attempt: int
    stream: str
    offset: int
    data_base64: str
    size_bytes: int
    """Size of the whole stream on the node when read."""
    dropped_bytes: int = 0
    """How many bytes just before `offset` the node has no more: the middle of an endless log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    run_id: str
    step: int
    attempt: int
    path: str
    """Relative to the agent's home."""
    size_bytes: int
    manifest_sha256: str
    """Equal on every node that holds the same checkpoint."""
    created_s: float
    verified: bool | None = None
    """Every file hashed and compared; None: not looked at."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    path: str
    """Relative, `/` between parts, no `..`."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleStatus:
    path: str
    """Absolute folder on the node."""
    complete: bool
    missing: tuple[str, ...] = ()
