"""An attempt of a run, as master and node describe it: intent, state, ranks, streams and files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

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
"""Size of a log in bytes that no disk of a node holds: a larger one is a lie."""
MAX_PORT = 65535
MAX_LOSSES = 10_000
"""Number of losses of a run that no home cluster reaches: a list of more is a lie."""
MAX_GENERATION = 1000
"""Number of regroupings of an attempt that no cluster reaches: each one loses a node."""
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
    """Record of a step in a journal, as far as a replay can be compared with it."""

    step: int
    loss_hex: str
    """Loss with every bit, as `float.hex` writes it."""
    samples: str
    """Hash of the rows of the batch, in order."""
    shares: tuple[float, ...] = ()
    """Share of each rank in that step, in rank order."""
    saved: bool = False
    """Whether a checkpoint was written after the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Steps of an earlier attempt that this one repeats, to prove that the resume is exact."""

    steps: tuple[LoggedStep, ...]
    devices: tuple[tuple[str, str], ...]
    """Node and device of each rank that logged the steps; empty: they changed in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterIdentity:
    """Master that launched an attempt, for the messages of another one that finds it there."""

    host: str
    """Name of the PC."""
    user: str
    home: str
    """Its `$RACKLESS_HOME`: one user can have several masters on one PC."""


HeatRule = Literal["warn", "wait", "limit"]
"""What follows where heat holds a GPU's clock down for a minute. `warn`: a warning; `wait`: all
ranks pause until it is cooler; `limit`: its power limit is lowered. A GPU that reaches its slowdown
temperature pauses the run in any case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptLoss:
    """An earlier attempt that lost a rank or node, for the limits of automatic recoveries."""

    attempt: int
    step: int
    """Newest step that the run had finished; 0: none."""
    ended_s: float
    """Time of the end, in seconds since the epoch."""
    resumed_s: float | None = None
    """Time at which the run was launched again, in seconds since the epoch; None: it was not."""
    cause: str = ""
    """What ended it, a `FailureCause` of the part where it began; empty: a node was lost."""
    reason: str = ""
    """Sentence on what ended it, with node, rank and phase where they are known."""

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
    """Newest attempt number that the node has promised."""
    launched: int = 0
    """Newest attempt that was launched there."""

    def check_foreign(self) -> None:
        check_number("fence", self.fence, 0, MAX_ATTEMPT)
        check_number("launched", self.launched, 0, MAX_ATTEMPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElectionPlan:
    """How the nodes of an attempt recover it themselves while no master does."""

    ports: dict[str, int]
    """Port at which each node listens for the others, at its address in the intent."""
    patience_s: float
    """Time without a master after which a lost attempt is theirs, in seconds."""
    per_hour: int
    """Maximum number of recoveries within an hour."""
    losses: tuple[AttemptLoss, ...] = ()
    """Losses of the run since a person last started or resumed it, oldest first."""
    started_by: str = ""
    """Node that started this attempt; empty: a master did."""
    reason: str = ""
    """Why it did, as a sentence; empty: a master did."""

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
    """Everything a node needs to run its part of an attempt. Written and fsynced before any
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
    """Private key and certificate of this attempt, in PEM, by which its ranks know each other;
    empty: whoever reaches the ranks' store may use it."""
    model_path: str
    """Folder of the model on this node, or its hub id."""
    train_path: str
    eval_path: str | None = None
    shared: tuple[SharedPlace, ...] = ()
    """Those of these paths that are on a share, which may go away."""
    resume_step: int | None = None
    """Step of the checkpoint to start from, already on this node; None: from the beginning."""
    replay: Replay | None = None
    """Logged steps to compare those after `resume_step` with; None: nothing is compared."""
    cut: ModelCut | None = None
    """Mode and layers of each rank; None: the mode is that of `spec`, and every rank has all
    layers or divides them itself."""
    checkpoint_ranks: tuple[int, ...] = (0,)
    """Ranks that write each checkpoint, one per node that keeps a copy."""
    num_threads: int | None = None
    """CPU threads of a rank; None: the cores divided by the ranks of this node."""
    environ: dict[str, str] = field(default_factory=dict)
    master: MasterIdentity | None = None
    """Who launches it; None: a master of an earlier version."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Address of every node of the attempt, by name; empty: a master of an earlier version."""
    confirm_s: float | None = None
    """Time in seconds without a word of the master after which the part ends by itself, unless the
    master has confirmed that every node has launched its part; None: it confirms nothing."""
    election: ElectionPlan | None = None
    """How its nodes recover the attempt without a master; None: they never do."""

    outage_s: float = 60.0
    """Time in seconds for which ranks wait for a node that cannot be reached."""
    when_hot: HeatRule = "warn"
    """What the ranks of this node do while their GPUs are too hot."""

    @property
    def parallel(self) -> Parallel | ParallelMode:
        """Way that the attempt trains: what the plan chose, else what the run file names."""
        return self.cut.mode if self.cut is not None else self.spec.parallel

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)
        check_name("node", self.node)
        check_number("outage_s", self.outage_s, 0, MAX_WAIT_S)
        check_number("resume_step", self.resume_step or 0, 0, MAX_STEP)
        if self.cut is not None and len(self.cut.stages) not in (0, len(self.ranks)):
            raise ValueError(f"cut has {len(self.cut.stages)} stages for {len(self.ranks)} ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRequest:
    """A request to an attempt while it trains."""

    wish_id: str
    """Id from the master, which the record of the answer repeats."""
    kind: Literal["save", "trace"]
    """`save`: a checkpoint at the end of the present step. `trace`: the steps after the present one
    are recorded with torch's profiler."""
    num_steps: int = 0
    """Number of steps to trace."""

    def check_foreign(self) -> None:
        check_name("wish_id", self.wish_id)


AttemptState = Literal["starting", "running", "stopping", "stopped", "done", "failed", "lost"]
FailureCause = Literal[
    "", "error", "diverged", "killed", "crashed", "stalled", "slept", "peer_lost", "share_lost"
]
"""What ended a part that failed. `error`: a failure that a restart repeats, such as bad data or an
exception; `diverged`: a loss that is not finite; `killed`: a signal from outside, such as the
kernel's when memory runs out; `crashed`: a fault inside a library or a driver; `stalled`: a rank
stood still; `slept`: the PC slept and lost the other nodes; `peer_lost`: another rank was lost;
`share_lost`: the server with its model or data did not answer.
Empty: nothing failed, or nobody knows."""
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
    """State; `lost`: there is no process and no record of an end (power cut, reboot, kill)."""
    message: str = ""
    """Reason of the end, or of a standstill, with node, rank and phase; empty while nothing is
    wrong."""
    hint: str = ""
    supervisor_pid: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    spec: RunSpec | None = None
    all_ranks: tuple[RankPlacement, ...] = ()
    master: MasterIdentity | None = None
    """Whose it is: the master that launched it, or that took it over since; None: a master of an
    earlier version, or its intent cannot be read."""
    owner: MasterIdentity | None = None
    """Who took it over since its launch; None: nobody."""
    is_confirmed: bool = True
    """Whether it goes on without its master. False while that still launches other parts."""
    num_processes: int | None = None
    """Number of processes with the tag of the attempt, including the supervisor."""
    peer_lost: bool = False
    """Whether it failed because a rank lost its connection to another rank. The cause then is most
    likely on another node, whose message names it."""
    lost_nodes: tuple[str, ...] = ()
    """Other nodes that did not answer this one when its ranks lost them, or waited for them."""
    cause: FailureCause = ""
    restarted_s: float | None = None
    """Time at which the PC was started after it had lost the attempt, in seconds since 1970; None:
    it is not known, or it was not restarted."""
    resume_step: int | None = None
    """Step of the checkpoint that it started from; None: from the beginning."""
    election: ElectionPlan | None = None
    """How its nodes recover it without a master; None: they never do."""
    may_regroup: bool = False
    """Whether its ranks go on in their processes where a majority of its nodes is left."""
    generation: int = 0
    """How often its ranks have done so; see `agents.contract.regroup`."""
    members: tuple[str, ...] = ()
    """Nodes that train since the last time, in the order of ranks; empty: all of the attempt."""

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)
        check_number("generation", self.generation, 0, MAX_GENERATION)
        for name in self.members:
            check_name("members", name)
        check_time("restarted_s", self.restarted_s)
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

    `agents.contract.run_layout.is_stream` says which files these are. A trace appears as a whole.
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
            raise ValueError(f"stream is {self.stream[:80]!a}, which is no stream of a run")
        check_number("offset", self.offset, 0, MAX_STREAM_BYTES)
        check_number("size_bytes", self.size_bytes, 0, MAX_STREAM_BYTES)
        check_number("dropped_bytes", self.dropped_bytes, 0, self.offset)

    def data(self) -> bytes:
        """Return the bytes.

        Raises:
            WireError: they are not base64, or lie beyond the end of the stream.
        """
        try:
            data = base64.b64decode(self.data_base64, validate=True)
        # A plain ValueError for text beyond ASCII.
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
    """Hash over its list of files, equal on every node with the same checkpoint."""
    created_s: float
    verified: bool | None = None
    """Whether the hash of every file matches the manifest; None: not verified."""
    problem: str = ""

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        check_number("step", self.step, 0, MAX_STEP)
        # 0: its manifest names no attempt, which is a problem.
        check_number("attempt", self.attempt, 0, MAX_ATTEMPT)
        if self.path != checkpoint_path(self.run_id, self.step):
            raise ValueError(f"path is {self.path[:120]!a}, which is no checkpoint's folder")
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
