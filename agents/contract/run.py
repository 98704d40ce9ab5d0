"""An attempt of a run, as master and node describe it: intent, state, ranks, streams and files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from agents.contract.mandate import AttemptProof
from agents.contract.model_cut import ModelCut
from agents.contract.names import (
    MAX_ATTEMPT,
    MAX_RANK,
    MAX_STEP,
    MAX_WAIT_S,
    check_inside,
    check_name,
    check_number,
    check_text,
    check_time,
)
from agents.contract.parallel import ParallelMode
from agents.contract.run_layout import checkpoint_path, is_stream
from agents.contract.shares import SharedPlace
from agents.contract.spec import Parallel, RunSpec
from agents.contract.wire import WireError

MAX_STREAM_BYTES = 1 << 50
"""Upper bound of a log's size, in bytes, beyond any node's disk."""
MAX_PORT = 65535
MAX_LOSSES = 10_000
"""Upper bound of a run's losses, beyond any home cluster's."""
MAX_GENERATION = 1000
"""Upper bound of an attempt's regroupings, since each one loses a node."""
UNKNOWN_NODE = "?"
"""Name of the node in the status of an attempt whose intent cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlacement:
    rank: int
    local_rank: int
    node: str
    device: str
    """Device in the node's own order, such as `cpu` or `cuda:0`."""
    device_id: str = "cpu"
    """Key of the lease: the GPU's uuid, or `cpu`."""

    def check_foreign(self) -> None:
        check_number("rank", self.rank, 0, MAX_RANK)
        check_number("local_rank", self.local_rank, 0, MAX_RANK)
        check_name("node", self.node)
        check_text("device", self.device)
        check_text("device_id", self.device_id)


def choose_checkpoint_ranks(ranks: Sequence[RankPlacement], copies: int) -> tuple[int, ...]:
    """Return the ranks that write checkpoints: the first rank of each of the first `copies`
    nodes.
    """
    first: dict[str, int] = {}
    for place in ranks:
        # A second copy on the same PC would be lost with it.
        first.setdefault(place.node, place.rank)
    return tuple(list(first.values())[:copies])


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedStep:
    """Record of a step in a journal: the part that a replay can compare."""

    step: int
    loss_hex: str
    """Loss with every bit, as written by `float.hex`."""
    samples: str
    """Hash of the rows of the batch, in order."""
    shares: tuple[float, ...] = ()
    """Share of each rank in that step, in rank order."""
    saved: bool = False
    """True if a checkpoint was written after the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Steps of an earlier attempt that this one repeats, to prove that the resume is exact."""

    steps: tuple[LoggedStep, ...]
    devices: tuple[tuple[str, str], ...]
    """Node and device of each rank that logged the steps; empty: they changed during these
    steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterIdentity:
    """Master that launched an attempt; named in messages to another master that finds the
    attempt.
    """

    host: str
    """Name of the PC."""
    user: str
    home: str
    """Its `$RACKLESS_HOME`, since one user can have several masters on one PC."""


HeatRule = Literal["warn", "wait", "limit"]
"""Reaction to a GPU whose clock heat has held down for a minute. `warn`: a warning; `wait`: all
ranks pause until it is cooler; `limit`: its power limit is lowered. A GPU at its slowdown
temperature always pauses the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptLoss:
    """Earlier attempt that lost a rank or node, for the limits of automatic recoveries."""

    attempt: int
    step: int
    """Newest step that the run had finished; 0: no step."""
    ended_s: float
    """Time of the end, in seconds since the epoch."""
    resumed_s: float | None = None
    """Time of the relaunch, in seconds since the epoch; None: no relaunch."""
    cause: str = ""
    """Cause, the `FailureCause` of the part that failed first; empty: a node was lost."""
    reason: str = ""
    """Sentence on the cause, with node, rank and phase if they are known."""

    def check_foreign(self) -> None:
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)
        check_number("step", self.step, 0, MAX_STEP)
        check_text("cause", self.cause)
        check_text("reason", self.reason)
        check_time("ended_s", self.ended_s)
        check_time("resumed_s", self.resumed_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Answer to a claim of an attempt number, which each node grants once."""

    is_granted: bool
    fence: int
    """Newest attempt number that the node has granted."""
    launched: int = 0
    """Newest attempt that was launched on the node."""

    def check_foreign(self) -> None:
        check_number("fence", self.fence, 0, MAX_ATTEMPT)
        check_number("launched", self.launched, 0, MAX_ATTEMPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElectionPlan:
    """Rules by which the nodes of an attempt recover it while no master does."""

    ports: dict[str, int]
    """Port at which each node listens for the others, at its address in the intent."""
    patience_s: float
    """Time without a master after which the nodes may recover a lost attempt, in seconds."""
    per_hour: int
    """Maximum number of recoveries within an hour."""
    losses: tuple[AttemptLoss, ...] = ()
    """Losses of the run since a user last started or resumed it, oldest first."""
    started_by: str = ""
    """Node that started this attempt; empty: a master did."""
    reason: str = ""
    """Why the node started it, as a sentence; empty: a master did."""

    def check_foreign(self) -> None:
        check_number("losses", len(self.losses), 0, MAX_LOSSES)
        for node, port in self.ports.items():
            check_name("ports", node)
            check_number("ports", port, 1, MAX_PORT)
        check_text("reason", self.reason)
        if self.started_by:
            check_name("started_by", self.started_by)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptIntent:
    """Everything that a node needs to run its part of an attempt; written and synced before any
    fork.
    """

    run_id: str
    attempt: int
    node: str
    spec: RunSpec
    python: str
    """Interpreter of the training environment on this node."""
    ranks: tuple[RankPlacement, ...]
    """Ranks of the whole attempt, in rank order."""
    master_address: str
    master_port: int
    address: str
    interface: str | None = None
    """Network interface of this node for training traffic; None: the one with `address`."""
    credential: str = field(default="", repr=False)
    """Private key and certificate of this attempt, in PEM, by which its ranks identify each other;
    empty: any program that reaches the ranks' store may use it."""
    model_path: str
    """Folder of the model on this node, or its hub id."""
    train_path: str
    more_paths: tuple[str, ...] = ()
    """Paths of the further sources of training data, in the order of the run file."""
    eval_path: str | None = None
    shared: tuple[SharedPlace, ...] = ()
    """Those of these paths that are on a share, which may become unavailable."""
    resume_step: int | None = None
    """Step of the checkpoint to start from, which this node has; None: from the beginning."""
    replay: Replay | None = None
    """Logged steps to compare with those after `resume_step`; None: no comparison."""
    cut: ModelCut | None = None
    """Mode, and layers of each rank; None: the mode is that of `spec`, and every rank has all
    layers or divides them itself."""
    checkpoint_ranks: tuple[int, ...] = (0,)
    """Ranks that write each checkpoint, one per node that keeps a copy."""
    num_threads: int | None = None
    """Number of CPU threads of a rank; None: the cores divided by the ranks of this node."""
    environ: dict[str, str] = field(default_factory=dict)
    master: MasterIdentity | None = None
    """Master that launches it; None: a master of an earlier version."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Address of every node of the attempt, by name; empty: a master of an earlier version."""
    confirm_s: float | None = None
    """Time without contact with the master after which the part ends by itself, in seconds, until
    the master confirms that every node has launched its part; None: no confirmation needed."""
    election: ElectionPlan | None = None
    """How its nodes recover the attempt without a master; None: they do not."""

    proof: AttemptProof | None = None
    """Proof of who started it; None: a master of an earlier version."""
    node_seed: str = field(default="", repr=False)
    """Private key of this node for this attempt, whose public key the mandate has; empty: a master
    of an earlier version."""

    outage_s: float = 60.0
    """Time for which ranks wait for a node that cannot be reached, in seconds."""
    when_hot: HeatRule = "warn"
    """Reaction of this node's ranks to hot GPUs."""

    @property
    def parallel(self) -> Parallel | ParallelMode:
        """Mode of the attempt: the plan's choice, else that of the run file."""
        return self.cut.mode if self.cut is not None else self.spec.parallel

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)
        check_name("node", self.node)
        check_number("outage_s", self.outage_s, 0, MAX_WAIT_S)
        # No stages: the trainer divides the layers, see `ModelCut`.
        check_number("resume_step", self.resume_step or 0, 0, MAX_STEP)
        if self.cut is not None and len(self.cut.stages) not in (0, len(self.ranks)):
            raise ValueError(f"cut has {len(self.cut.stages)} stages for {len(self.ranks)} ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRequest:
    """Request to an attempt while it trains."""

    wish_id: str
    """Id from the master, repeated by the journal record of the outcome."""
    kind: Literal["save", "trace"]
    """`save`: a checkpoint at the end of the current step; `trace`: record the following steps with
    torch's profiler."""
    num_steps: int = 0
    """Number of steps to trace."""

    def check_foreign(self) -> None:
        check_name("wish_id", self.wish_id)


AttemptState = Literal["starting", "running", "stopping", "stopped", "done", "failed", "lost"]
FailureCause = Literal[
    "", "error", "diverged", "killed", "crashed", "stalled", "slept", "peer_lost", "share_lost"
]
"""Cause of a failed part's end. `error`: a failure that a restart repeats, such as bad data or an
exception; `diverged`: a loss that is not finite; `killed`: a signal from outside, such as the
kernel's when memory runs out; `crashed`: a fault inside a library or a driver; `stalled`: a rank
made no progress; `slept`: the PC slept and lost the other nodes; `peer_lost`: another rank was
lost; `share_lost`: the server with its model or data did not answer; empty: nothing failed, or the
cause is unknown."""
LOST_CAUSES: frozenset[FailureCause] = frozenset(
    {"killed", "crashed", "stalled", "slept", "peer_lost", "share_lost"}
)
"""Causes of an end that a restart does not repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    rank: int
    pid: int | None = None
    step: int | None = None
    phase: str | None = None
    heartbeat_age_s: float | None = None
    exit_code: int | None = None
    """Exit code; negative: the number of the signal that ended the rank."""

    def check_foreign(self) -> None:
        check_number("rank", self.rank, 0, MAX_RANK)
        check_number("step", self.step or 0, 0, MAX_STEP)
        check_text("phase", self.phase or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStatus:
    run_id: str
    attempt: int
    node: str
    state: AttemptState
    """State; `lost`: neither a process nor a record of an end exists (power cut, reboot, kill)."""
    message: str = ""
    """Reason of the end or of a standstill, with node, rank and phase; empty while all is well."""
    hint: str = ""
    supervisor_pid: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    spec: RunSpec | None = None
    all_ranks: tuple[RankPlacement, ...] = ()
    master: MasterIdentity | None = None
    """Master that launched it, or took it over since; None: a master of an earlier version, or its
    intent cannot be read."""
    owner: MasterIdentity | None = None
    """Master that took it over since its launch; None: no master did."""
    is_confirmed: bool = True
    """True if it continues without its master; False while the master is launching other parts."""
    num_processes: int | None = None
    """Number of processes with the tag of the attempt, including the supervisor."""
    peer_lost: bool = False
    """True if it failed because a rank lost its connection to another rank; the cause is then most
    likely on another node, whose message names it."""
    lost_nodes: tuple[str, ...] = ()
    """Other nodes that did not answer this one when its ranks lost them, or waited for them."""
    cause: FailureCause = ""
    restarted_s: float | None = None
    """Time at which the PC started after it had lost the attempt, in seconds since 1970; None: not
    known, or no restart."""
    resume_step: int | None = None
    """Step of the checkpoint that it started from; None: from the beginning."""
    election: ElectionPlan | None = None
    """How its nodes recover it without a master; None: they do not."""
    may_regroup: bool = False
    """True if its ranks continue in their processes as long as a majority of its nodes is left."""
    generation: int = 0
    """Number of regroupings of its ranks; see `agents.contract.regroup`."""
    members: tuple[str, ...] = ()
    """Nodes that train since the last regrouping, in rank order; empty: all nodes of the
    attempt."""
    proof: AttemptProof | None = None
    """Proof of who started it; None: a master of an earlier version, or its intent cannot be
    read."""

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)
        check_number("generation", self.generation, 0, MAX_GENERATION)
        for name in self.members:
            check_name("members", name)
        check_time("restarted_s", self.restarted_s)
        # The placeholder is not a valid name.
        if self.node != UNKNOWN_NODE:
            check_name("node", self.node)
        for name in self.lost_nodes:
            check_name("lost_nodes", name)
        check_number("resume_step", self.resume_step or 0, 0, MAX_STEP)
        check_time("started_s", self.started_s)
        check_time("ended_s", self.ended_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamChunk:
    """Bytes of an append-only file of an attempt: a journal, the output of a rank, or a trace.

    `agents.contract.run_layout.is_stream` defines these files. A trace appears as a whole.
    """

    run_id: str
    attempt: int
    stream: str
    offset: int
    data_base64: str
    size_bytes: int
    """Size of the whole stream on the node at the time of reading, in bytes."""
    dropped_bytes: int = 0
    """Number of bytes before `offset` that the node discarded: the middle of a huge log."""

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)
        if not is_stream(self.stream):
            raise ValueError(f"stream is {self.stream[:80]!a}, which is not a stream of a run")
        check_number("offset", self.offset, 0, MAX_STREAM_BYTES)
        check_number("size_bytes", self.size_bytes, 0, MAX_STREAM_BYTES)
        check_number("dropped_bytes", self.dropped_bytes, 0, self.offset)

    def data(self) -> bytes:
        """Return the decoded bytes.

        Raises:
            WireError: they are not base64, or extend beyond the end of the stream.
        """
        try:
            data = base64.b64decode(self.data_base64, validate=True)
        # binascii.Error is a ValueError, and text beyond ASCII raises a plain one.
        except ValueError as error:
            raise WireError(f"a chunk of {self.stream} is not base64: {error}") from error
        if self.offset + len(data) > self.size_bytes:
            raise WireError(f"a chunk of {self.stream} ends behind its {self.size_bytes} bytes")
        return data


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    run_id: str
    step: int
    attempt: int
    path: str
    """Folder relative to the agent's home."""
    size_bytes: int
    manifest_sha256: str
    """Hash of its list of files, equal on every node with the same checkpoint."""
    created_s: float
    verified: bool | None = None
    """True if the hash of every file matches the manifest; None: not verified."""
    problem: str = ""
    signer: str = ""
    """Node whose ranks wrote it; empty: an earlier version wrote it."""
    signature: str = ""
    """That node's signature of `checkpoint_bytes`; copies keep it."""

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("step", self.step, 0, MAX_STEP)
        # 0: its manifest names no attempt, which `problem` reports.
        check_number("attempt", self.attempt, 0, MAX_ATTEMPT)
        # The master deletes and copies by this path, so it must not lead elsewhere.
        if self.path != checkpoint_path(self.run_id, self.step):
            raise ValueError(f"path is {self.path[:120]!a}, which is not a checkpoint's folder")
        check_time("created_s", self.created_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    path: str
    """Relative path, with `/` between parts and without `..`."""
    size_bytes: int
    sha256: str

    def check_foreign(self) -> None:
        check_inside(self.path)
        if self.size_bytes < 0:
            raise ValueError(f"The file {self.path!a} has a size of {self.size_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleStatus:
    path: str
    """Absolute path of the folder on the node."""
    complete: bool
    missing: tuple[str, ...] = ()
