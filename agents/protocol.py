"""Every message that crosses between the master and a node, in one file.

One message is one line of JSON. Three kinds of envelope: Request (master to node), Response
(exactly one per request) and Event (node to master, unasked or following a request). Below them
stand the payloads, one dataclass for each thing that is said; those about artifacts are in
`agents/artifacts.py`. `None` means "not known" everywhere.

The kinds of request, with their arguments (dataclass or names) and results:

    ping              {}                              -> {wall_s, monotonic_s}
    facts             {}                              -> NodeFacts
    telemetry.follow  {after_s: float | None}         -> {}; then events `telemetry.sample` (Sample)
    environment.find  EnvironmentQuery                -> EnvironmentReport
    environment.build EnvironmentBuild                -> EnvironmentReport; events `progress`
    packages.build    PackagesBuild                   -> PackagesReport; events `progress`
    port.choose       {address}                       -> {port}
    probe.listen      {address, timeout_s}            -> {port}
    probe.connect     {address, port, num_bytes}      -> {round_trip_s, bytes_per_s}
    probe.allreduce   AllReduceProbe                  -> {seconds, num_values, sum_ok}
    attempt.launch    AttemptIntent                   -> AttemptStatus
    attempt.status    {run_id, attempt}               -> AttemptStatus
    attempt.list      {}                              -> {attempts: [AttemptStatus]}, the newest of
                      each run with its spec; the oldest are left out when they do not fit
    attempt.stop      {run_id, attempt, grace_s}      -> AttemptStatus, when no process is left
    attempt.wish      {run_id, attempt, wish: Wish}   -> {}; to the node of rank 0, whose journal
                      tells by a `wish` record after which step all ranks act on it
    stream.list       {run_id, attempt}               -> {streams: {name: size_bytes}}
    stream.read       {run_id, attempt, stream, offset, max_bytes} -> StreamChunk
    stream.follow     {run_id, attempt, offsets: {name: offset}} -> {follow}; events `stream.data`,
                      then one `stream.end` {follow, state, error: RemoteError | None}
    stream.unfollow   {follow}                        -> {}
    checkpoint.list   {run_id: str | None}            -> {checkpoints: [CheckpointInfo]}
    checkpoint.verify {run_id, step}                  -> CheckpointInfo (verified filled in)
    checkpoint.delete {run_id, step}                  -> {}
    run.fence         {run_id, attempt}               -> {attempt}
    run.delete        {run_id}                        -> {freed_bytes}
    bundle.status     {destination, files: [FileEntry]} -> BundleStatus
    artifact.hash     {path}                          -> {files: [FileEntry]}
    artifact.delete   {path}                          -> {freed_bytes}
    export.merged     MergeJob                        -> {path, files}; events `progress`
    export.made       MakeJob                         -> {path, files}; events `progress`
    chat.open         ChatJob                         -> ChatOpened; events `progress`
    chat.ask          chat, turn: ChatTurn            -> ChatReply; events `progress`: its pieces
    chat.stop         chat                            -> {}; the answer ends where it is
    chat.close        chat                            -> {}
    data.preview      PreviewJob                      -> DataPreview; events `progress`
    gpu.calibrate     CalibrationJob                  -> Calibration; events `progress`
    model.config      {model}                         -> {config: dict | None}
    hub.token         TokenWish                       -> {place: NodeTokenPlace}
    cancel            {request}                       -> {}; ends the programs of that request,
                      whose own response then says so
    shutdown          {}                              -> {}; the agent process ends

Raw bytes do not travel as messages: `receive` and `send` are own commands of the archive, each on a
channel of its own (see agents/files.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from agents.spec import RunSpec
from agents.version import PROTOCOL_VERSION as PROTOCOL_VERSION
from agents.wire import WireError as WireError
from agents.wire import from_wire as from_wire
from agents.wire import to_wire as to_wire

MAX_LINE_BYTES = 1 << 20
"""Longer lines are refused on both sides; stream chunks stay well below."""
STREAM_CHUNK_BYTES = 192 * 1024
"""Most bytes of a log or journal in one message, before base64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteError:
    kind: str
    """`user` (the world's fault), `unknown_request`, `bad_request`, `bug`, `disconnected`."""
    message: str
    """What happened, and where."""
    hint: str = ""
    """What to do next."""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    id: int
    kind: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    id: int
    result: dict[str, Any] | None = None
    error: RemoteError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    request_id: int | None = None
    """The request that asked for it; None for events of the agent itself."""


Message = Request | Response | Event
_TYPES: dict[str, type[Request] | type[Response] | type[Event]] = {
    "request": Request,
    "response": Response,
    "event": Event,
}


def encode(message: Message) -> bytes:
    """Return one line, newline included.

    Raises:
        WireError: the line would be longer than MAX_LINE_BYTES.
    """
    body = to_wire(message)
    body["type"] = type(message).__name__.lower()
    line = json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise WireError(f"a message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    return line


def decode(line: bytes) -> Message:
    """Read one line back.

    Raises:
        WireError: it is too long, not JSON, or not one of the three envelopes.
    """
    if len(line) > MAX_LINE_BYTES:
        raise WireError(f"a line of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}") from error
    if not isinstance(body, dict) or body.get("type") not in _TYPES:
        raise WireError(f"not a message: {line[:80]!r}")
    return from_wire(_TYPES[body["type"]], body)


# ---------------------------------------------------------------- who a node is


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The agent's first event, `hello`, after the line with the nonce."""

    version: int
    archive_sha256: str
    python: str
    """Version of the python3 that runs the agent, such as `3.11.7`."""
    hostname: str
    pid: int
    boot_id: str
    agent_home: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    uuid: str
    index: int
    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA version that the driver supports, such as `13.0`."""
    capability: str | None = None
    """Compute capability, such as `8.9`."""
    power_limit_w: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """What holds a GPU of ours now."""

    uuid: str
    name: str
    """Such as `run r-1` or `the export of run r-1`."""
    run_id: str | None = None
    """None: it is no run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceFacts:
    name: str
    address: str
    mtu: int | None = None
    speed_mbit: int | None = None
    up: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    hostname: str
    os: str
    kernel: str
    python: str
    architecture: str
    cpu: str | None = None
    num_cores: int | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    """What a program can have of it now without anything being swapped out."""
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str | None = None
    """Why no GPU is listed although a driver seems to be there; None: nothing wrong."""
    gpu_uses: tuple[GpuUse, ...] = ()
    """What they are used for now."""
    interfaces: tuple[InterfaceFacts, ...] = ()
    address: str | None = None
    """The node's own address on the connection the master came by; None: local or wsl."""
    wsl: str | None = None
    """Networking mode of WSL2 (`mirrored`, `nat`, ...); None: not WSL."""
    wall_s: float = 0.0
    """The node's clock, seconds since 1970, when this was written."""
    environment: EnvironmentReport | None = None
    compiler: str | None = None
    """Path of the C compiler that training would use; None: none was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    uuid: str
    index: int
    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation: float | None = None
    """Share of time with a kernel running, 0 to 1."""
    temperature_celsius: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    fan: float | None = None
    """Share of the fan's full speed, 0 to 1."""
    throttle: tuple[str, ...] | None = None
    """Reasons why the clock is held down, in words; empty: none; None: not known."""
    process_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reading of everything on a node."""

    time_s: float
    """Wall clock of the node."""
    seq: int
    """Rises by one with each sample of one recorder."""
    gpus: tuple[GpuSample, ...] = ()
    cpu_utilisation: float | None = None
    """0 to 1 over all cores."""
    cpu_temperature_celsius: float | None = None
    cpu_power_w: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_used_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    network_in_bytes_per_s: float | None = None
    network_out_bytes_per_s: float | None = None
    load: float | None = None


# ---------------------------------------------------------------- the training environment


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentQuery:
    lock_sha256: str
    requirements: dict[str, str]
    """Distribution name -> exact version."""
    python: str | None = None
    """An interpreter to look at; None: the one adopted or built before."""
    adopt: bool = False
    """Remember `python` as this node's environment if it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentBuild:
    lock_sha256: str
    lock_text: str
    """A pip requirements file with exact versions."""
    requirements: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentReport:
    python: str | None = None
    """Path of the interpreter; None: there is no environment yet."""
    python_version: str | None = None
    lock_sha256: str | None = None
    fits: bool = False
    """Every requirement is there in its exact version."""
    missing: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    """Such as `torch 2.12.0 instead of 2.13.0`."""
    headers: bool | None = None
    """The interpreter's C headers (Python.h) are there; None: not known."""


# ---------------------------------------------------------------- runs


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
class Wish:
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
class LogTail:
    """The end of a log on a node."""

    run_id: str
    attempt: int
    name: str
    """`rank-R.log` or `supervisor.log`."""
    size_bytes: int
    written_s: float
    """Wall clock of the node when it last grew."""
    text: str
    """Its last lines; bytes that are not UTF-8 are replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLogs:
    """What ranks and supervisors on a node wrote last, the newest log first."""

    tails: tuple[LogTail, ...]


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


# ---------------------------------------------------------------- files


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


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceProbe:
    python: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    interface: str | None = None
    num_values: int = 262144
    """fp32 values summed over all ranks."""
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewJob:
    """Look data over as a run would see it; needs the model's tokenizer, and no GPU."""

    python: str
    spec: RunSpec
    model_path: str
    """Folder on this node (its tokenizer is enough), or the hub id."""
    train_path: str
    held_out_from: str | None = None
    """The run's training data, where `train_path` is what it is evaluated with."""
    whole: bool = True
    """Tokenize all rows, and keep the tokens for the run; False: look at the first rows only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRow:
    """A row of which something has to be said."""

    row: int
    """Line of the file, or place in its list, from 1."""
    reason: str
    file: str = ""
    """Name of its file, where there are several."""
    malformed: bool = False
    """The row is broken; else it has nothing to learn, or is too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPart:
    text: str
    learned: bool
    """The prediction of these tokens is trained; else they are only read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownConversation:
    num_tokens: int
    num_targets: int
    """Tokens that are learned."""
    parts: tuple[ShownPart, ...]
    """The text in order, as the model reads it; of a long one parts are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownRow:
    row: int
    conversations: tuple[ShownConversation, ...]
    """One; of a preference pair the chosen and the rejected one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPreview:
    """What a run will learn. Also a rank's journal record `preview`, written before training."""

    format: str
    """What was recognised: `chat`, `alpaca`, `text` or `preference`."""
    whole: bool
    """All rows were read; False: only the first `num_rows`, and every number is of those."""
    num_rows: int
    """Rows of the data, with those left out."""
    num_examples: int
    """Units of a batch: rows, packs of rows, or pairs."""
    num_tokens: int
    num_targets: int
    """Tokens that are learned."""
    longest_tokens: int
    """Of one example, after the cut."""
    sequence_tokens: int
    """Where rows are cut."""
    fill: float | None = None
    """Mean share of a pack that holds tokens, 0 to 1; None: rows are not packed."""
    num_skipped: int = 0
    """Rows left out, the malformed ones among them."""
    num_malformed: int = 0
    num_truncated: int = 0
    """Rows that lose their end."""
    skipped: tuple[NamedRow, ...] = ()
    """The first rows that are left out."""
    truncated: tuple[NamedRow, ...] = ()
    """The first rows that lose their end."""
    plain_template: bool = False
    """The tokenizer has no chat template, so conversations are written in Alpaca's words."""
    rows: tuple[ShownRow, ...] = ()
    """The first rows of use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationJob:
    """Measure how fast one GPU really is; takes about 20 seconds and the GPU to itself."""

    python: str
    device: str
    """Such as `cuda:0`."""
    device_id: str
    """What is leased meanwhile: the GPU's uuid."""
    seconds: float = 20.0
    """What all measurements together may take, beside the start of torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What a GPU reached in a measurement, sustained and not at its best. None: not measured."""

    card: str
    """Name of the GPU, as its driver gives it."""
    matrix_flops_per_s: float | None = None
    """Products of matrices as wide as a 7B model's, in the type that training takes (bf16, else
    fp16)."""
    memory_bytes_per_s: float | None = None
    """Read and written by a copy within the GPU."""
    to_host_bytes_per_s: float | None = None
    """Into pinned memory."""
    from_host_bytes_per_s: float | None = None
    unpack_values_per_s: float | None = None
    """NF4 weights that become bf16."""
    measured_s: float = 0.0
    """The node's wall clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeJob:
    run_id: str
    step: int
    python: str
    model_path: str
    destination: str
    """Folder relative to the agent's home."""


NodeTokenPlace = Literal["none", "same", "other"]
"""Whether a node has a token of the hub: the one that was asked about, or one of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWish:
    """What to do with the hub's token on a node."""

    deed: Literal["find", "keep", "forget"]
    token: str = field(default="", repr=False)
    """To be kept; empty otherwise."""
    digest: str = ""
    """SHA-256 of the one to find or to forget, in hex."""
