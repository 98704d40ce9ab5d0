"""Every message that crosses between the master and a node, in one file.

One message is one line of JSON. Three kinds of envelope: Request (master to node), Response
(exactly one per request) and Event (node to master, unasked or following a request). Payloads
are dataclasses of the other modules of this package. `None` means "not known" everywhere.

The kinds of request, with their arguments (dataclass or names) and results:

    ping              {}                              -> {wall_s, monotonic_s}
    facts             {}                              -> NodeFacts
    node.examine      {}                              -> Examination
    node.routes       RouteQuery                      -> Routes
    node.wake         WakeTarget                      -> {value}: number of packets that it sent
    telemetry.follow  {after_s: float | None}         -> {}; then events `telemetry.sample` (Sample)
    environment.find  EnvironmentQuery                -> EnvironmentReport
    environment.build EnvironmentBuild                -> EnvironmentReport; events `progress`
    environment.tools {}                              -> EnvironmentTools
    environment.uv    WheelQuery                      -> EnvironmentTools; unpacks uv from its wheel
    environment.python {}                             -> EnvironmentTools; brings a Python by uv
    environment.try   {}                              -> EnvironmentReport; events `progress`
    environment.kept  {}                              -> KeptItems
    environment.prune {names}                         -> {freed_bytes}
    storage.list      {}                              -> StorageReport
    storage.delete    {names}                         -> {freed_bytes}
    wheels.look       WheelQuery                      -> WheelReport
    wheels.fetch      WheelQuery                      -> WheelReport; events `progress`
    packages.build    PackagesBuild                   -> PackagesReport; events `progress`
    port.choose       {address}                       -> {port}
    probe.listen      {address, timeout_s}            -> {port}
    probe.connect     {address, port, num_bytes, segment_bytes} -> LinkProbe
    probe.allreduce   AllReduceProbe                  -> AllReduceResult
    attempt.launch    AttemptIntent                   -> AttemptStatus
    attempt.status    {run_id, attempt}               -> AttemptStatus
    attempt.list      {}                              -> {attempts: [AttemptStatus]}, the newest of
                      each run with its spec; the oldest are left out when they do not fit
    attempt.stop      {run_id, attempt, grace_s, at_loss: bool} -> AttemptStatus, when no process is
                      left; `at_loss`: another node was lost, so the ranks save by themselves
    attempt.keep      {run_id, attempt, is_closed}    -> {}; this master recovers it if it is
                      lost, or (`is_closed`) nobody does: its nodes leave it alone
    attempt.wish      {run_id, attempt, wish: ControlRequest} -> {}; to the node of rank 0, whose
                      journal records as `wish` after which step all ranks act on it
    stream.list       {run_id, attempt}               -> {streams: {name: size_bytes}}
    stream.read       {run_id, attempt, stream, offset, max_bytes} -> StreamChunk
    stream.follow     {run_id, attempt, offsets: {name: offset}} -> {follow}; events `stream.data`,
                      then one `stream.end` {follow, state, error: RemoteError | None}
    stream.unfollow   {follow}                        -> {}
    checkpoint.list   {run_id: str | None}            -> {checkpoints: [CheckpointInfo]}
    checkpoint.verify {run_id, step}                  -> CheckpointInfo (verified filled in)
    checkpoint.delete {run_id, step}                  -> {}
    run.fence         {run_id, attempt}               -> {attempt}
    run.claim         {run_id, attempt, replaces}     -> Claim; grants each number once
    run.delete        {run_id}                        -> {freed_bytes}
    bundle.status     {destination, files: [FileEntry]} -> BundleStatus
    files.places      PlaceQueries                    -> PlaceAnswers: where files of the master
                      lie on shares; events `progress` while their content is compared
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
    hub.snapshot      HubModel                        -> {snapshot: HubSnapshot | None}
    hub.fetch         HubModel                        -> {snapshot: HubSnapshot | None}: None where
                      what the node has now cannot be copied; events `progress`
    hub.offer         SnapshotPlace                   -> {}; a folder of what the cache has
    hub.show          SnapshotPlace                   -> {}; the cache has what is in that folder
    cancel            {request}                       -> {}; ends the programs of that request,
                      whose own response then says so
    shutdown          {}                              -> {}; the agent process ends

Raw bytes do not travel as messages: `receive` and `send` are own commands of the archive, each on a
channel of its own (see agents/node/files.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from agents.contract.json_text import parse_json
from agents.contract.version import PROTOCOL_VERSION as PROTOCOL_VERSION
from agents.contract.wire import WireError as WireError
from agents.contract.wire import from_wire as from_wire
from agents.contract.wire import replace_surrogates, shorten
from agents.contract.wire import to_wire as to_wire

MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line, which both sides enforce; stream chunks stay well below."""
STREAM_CHUNK_BYTES = 192 * 1024
"""Maximum size of a piece of a log or journal in one message, before base64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteError:
    kind: str
    """Kind: `user` (not our fault), `unknown_request`, `bad_request`, `bug`, `disconnected`."""
    message: str
    """Sentence about what failed, and where."""
    hint: str = ""
    """Advice what to do next."""
    traceback: str = ""
    topic: str = ""
    """Section of the master's troubleshooting page; empty: none, or the agent is older."""


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
    """Id of the request that the event belongs to; None: it belongs to none."""


Message = Request | Response | Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Data of an event of kind `progress`: how far a slow request is."""

    message: str
    """Sentence for a person."""
    phase: str = ""
    """Part of the work, such as `merge` or `proof`; empty: the agent names none, or is older."""


_TYPES: dict[str, type[Request] | type[Response] | type[Event]] = {
    "request": Request,
    "response": Response,
    "event": Event,
}


def encode(message: Message) -> bytes:
    """Return one line, newline included.

    Raises:
        WireError: the line would be longer than MAX_LINE_BYTES, or has a number that JSON has not.
    """
    body = to_wire(message)
    body["type"] = type(message).__name__.lower()
    text = _write(body)
    # Names of files may hold bytes that are no text; the rest of the message still counts.
    if "\\ud" in text:
        text = _write(replace_surrogates(body))
    line = text.encode("ascii") + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise WireError(f"a message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    return line


def _write(body: Any) -> str:
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise WireError(f"a message cannot be written: {error}") from error


def decode(line: bytes) -> Message:
    """Read one line back.

    Raises:
        WireError: it is too long, not JSON, or not one of the three envelopes.
    """
    if len(line) > MAX_LINE_BYTES:
        raise WireError(f"a line of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    body = parse_json(line)
    kind = body.get("type") if isinstance(body, dict) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        raise WireError(f"not a message: {shorten(line)}")
    return from_wire(_TYPES[kind], body)


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
