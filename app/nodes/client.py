"""Typed methods for every request to a node, one for each kind.

A client is a permanent handle: it names a node, and each call uses the link that exists at that
moment, opened on demand. So callers do not notice a reconnect between two calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from agents.contract.artifacts import (
    ChatJob,
    ChatOpened,
    ChatReply,
    ChatTurn,
    MakeJob,
    MergeJob,
    PackagesBuild,
    PackagesReport,
)
from agents.contract.data import DataPreview, PreviewJob
from agents.contract.environments import (
    EnvironmentTools,
    KeptItems,
    WheelQuery,
    WheelReport,
)
from agents.contract.hub import HubSnapshot, SnapshotPlace
from agents.contract.in_place import PlaceAnswer, PlaceAnswers, PlaceQueries, PlaceQuery
from agents.contract.messages import Progress, WireError, from_wire, to_wire
from agents.contract.names import check_inside, check_time
from agents.contract.node import (
    AllReduceProbe,
    AllReduceResult,
    Calibration,
    CalibrationJob,
    EnvironmentBuild,
    EnvironmentQuery,
    EnvironmentReport,
    LinkProbe,
    ModelRefusal,
    NodeFacts,
    NodeLogs,
    NodeTokenPlace,
    TokenWish,
)
from agents.contract.run import (
    AttemptIntent,
    AttemptStatus,
    BundleStatus,
    CheckpointInfo,
    Claim,
    ControlRequest,
    FileEntry,
    MasterIdentity,
    StreamChunk,
)
from agents.contract.run_layout import is_stream
from agents.contract.spec import RunSpec
from agents.contract.wake import WakeTarget
from agents.contract.wire import shorten
from app.errors import BadAnswer, RacklessError
from app.nodes.channel import read_lines
from app.nodes.link import Link
from app.nodes.transport.process import Process
from app.text import one_line

if TYPE_CHECKING:
    from agents.contract.examination import Examination, Route
    from agents.contract.repair import ChangeList, RepairPreview, RepairStep
    from agents.contract.storage import StorageReport

OnMessage = Callable[[str], None]
"""Callback with each sentence on the progress of a slow request."""
OnProgress = Callable[[Progress], None]
"""Called with each sentence and the phase of the work."""
QUICK_TIMEOUT_S = 30.0
"""Maximum duration of a request that starts no work, in seconds."""
HASH_TIMEOUT_S = 4 * 3600.0
"""Maximum duration of hashing the files of a model or checkpoint, in seconds: a terabyte from a
slow disk."""
PREVIEW_TIMEOUT_S = 120.0
"""Maximum duration of asking sudo and a few programs what they would do, in seconds."""
LOOK_TIMEOUT_S = 120.0
"""Maximum duration of looking at what is installed on a node, in seconds."""
TRIAL_TIMEOUT_S = 600.0
"""Maximum duration of trying an environment: importing torch from a cold, slow disk, in seconds."""
LAUNCH_TIMEOUT_S = 120.0
"""Maximum duration of starting an attempt, in seconds."""
STOP_MARGIN_S = 60.0
"""Time to kill and sweep processes after the grace period of a stop, in seconds."""
TORCH_START_S = 90.0
"""Time to import torch on a busy node, on top of a probe's own deadline, in seconds."""
CALIBRATION_MARGIN_S = 120.0
"""Time to start torch and compile kernels, on top of a measurement, in seconds."""
MAX_BACKLOG_BYTES = 32 << 20
"""Maximum followed log data that waits for its reader, in bytes; beyond it the subscription is
dropped and requested again."""
# Answers with texts of several lines: logs, answers of models, data, files of models.
_VERBATIM = frozenset(
    (
        "stream.read",
        "stream.data",
        "logs.tail",
        "chat.ask",
        "data.preview",
        "model.config",
        "repair.preview",
        "change.list",
    )
)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    wall_s: float
    monotonic_s: float

    def check_foreign(self) -> None:
        check_time("wall_s", self.wall_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeDoor:
    """Where a node waits for one probe, and what the caller has to say first."""

    port: int
    greeting: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    path: str
    """Folder on the node, relative to the agent's home."""
    files: tuple[FileEntry, ...] = ()

    def check_foreign(self) -> None:
        check_inside(self.path)


@dataclass(frozen=True, slots=True)
class _Attempts:
    attempts: tuple[AttemptStatus, ...]


@dataclass(frozen=True, slots=True)
class _Checkpoints:
    checkpoints: tuple[CheckpointInfo, ...]


@dataclass(frozen=True, slots=True)
class _Streams:
    streams: dict[str, int]

    def check_foreign(self) -> None:
        for name in self.streams:
            if not is_stream(name):
                raise ValueError(f"{name[:80]!a} is no stream of a run")


@dataclass(frozen=True, slots=True)
class _Files:
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class _Number:
    """Any result that is a single integer."""

    value: int


@dataclass(frozen=True, slots=True)
class _Config:
    config: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    snapshot: HubSnapshot | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusals:
    refusals: tuple[ModelRefusal, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Token:
    place: NodeTokenPlace


class NodeClient:
    """Client of one node. Every method raises UserError (which names the node), NodeUnreachable
    when no answer can arrive any more, or AgentBug.
    """

    def __init__(self, name: str, link: Callable[[], Awaitable[Link]]) -> None:
        self.name = name
        self._link = link

    # ------------------------------------------------------------ the node

    async def ping(self) -> Clock:
        return await self._ask(Clock, "ping")

    async def facts(self) -> NodeFacts:
        return await self._ask(NodeFacts, "facts")

    async def examine(self) -> Examination:
        # Imported on use, here and below: lists of runs need none of it, and start sooner.
        from agents.contract.examination import Examination

        return await self._ask(Examination, "node.examine")

    async def find_routes(self, addresses: Sequence[str]) -> tuple[Route, ...]:
        """Return the way by which packets leave the node to each address."""
        from agents.contract.examination import RouteQuery, Routes

        query = RouteQuery(addresses=tuple(addresses))
        return (await self._ask(Routes, "node.routes", to_wire(query))).routes

    async def send_magic_packet(self, target: WakeTarget) -> int:
        """Have the node wake another PC of its network; return how many packets it sent."""
        return await self._ask_number("value", "node.wake", to_wire(target))

    async def log_tails(self) -> NodeLogs:
        return await self._ask(NodeLogs, "logs.tail")

    async def environment_find(self, query: EnvironmentQuery) -> EnvironmentReport:
        return await self._ask(
            EnvironmentReport, "environment.find", to_wire(query), LOOK_TIMEOUT_S
        )

    async def environment_build(
        self, build: EnvironmentBuild, progress: OnMessage | None = None
    ) -> EnvironmentReport:
        """Build the environment from wheels that are on the node."""
        args = to_wire(build)
        return await self._ask(
            EnvironmentReport, "environment.build", args, None, _messages(progress)
        )

    async def environment_tools(self) -> EnvironmentTools:
        return await self._ask(EnvironmentTools, "environment.tools", {}, LOOK_TIMEOUT_S)

    async def unpack_uv(self, query: WheelQuery) -> EnvironmentTools:
        """Unpack uv from its wheel, which is on the node."""
        args = to_wire(query)
        return await self._ask(EnvironmentTools, "environment.uv", args, LOOK_TIMEOUT_S)

    async def bring_python(self, progress: OnMessage | None = None) -> EnvironmentTools:
        """Have uv download a Python of its own on the node."""
        return await self._ask(
            EnvironmentTools, "environment.python", {}, None, _messages(progress)
        )

    async def try_environment(self, progress: OnMessage | None = None) -> EnvironmentReport:
        """Import what training needs, and do one tiny step on each device of the node."""
        return await self._ask(
            EnvironmentReport, "environment.try", {}, TRIAL_TIMEOUT_S, _messages(progress)
        )

    async def look_for_wheels(self, query: WheelQuery) -> WheelReport:
        return await self._ask(WheelReport, "wheels.look", to_wire(query), LOOK_TIMEOUT_S)

    async def fetch_wheels(
        self, query: WheelQuery, progress: OnMessage | None = None
    ) -> WheelReport:
        """Fetch wheels. Downloads gigabytes, so only the loss of the link ends it."""
        args = to_wire(query)
        return await self._ask(WheelReport, "wheels.fetch", args, None, _messages(progress))

    async def kept_environments(self) -> KeptItems:
        return await self._ask(KeptItems, "environment.kept", {}, LOOK_TIMEOUT_S)

    async def prune_environments(self, names: Sequence[str]) -> int:
        """Delete what building has left on the node; return the bytes that were freed."""
        args = {"names": list(names)}
        return await self._ask_number("freed_bytes", "environment.prune", args, 300.0)

    async def storage(self) -> StorageReport:
        """Return what lies below the agent's home, the largest first."""
        from agents.contract.storage import StorageReport

        return await self._ask(StorageReport, "storage.list", {}, LOOK_TIMEOUT_S)

    async def delete_storage(self, names: Sequence[str]) -> int:
        """Delete items of that by name; return the bytes that were freed."""
        args = {"names": list(names)}
        return await self._ask_number("freed_bytes", "storage.delete", args, 300.0)

    # ------------------------------------------------------------ probes

    async def port_choose(self, address: str) -> int:
        return await self._ask_number("port", "port.choose", {"address": address})

    async def probe_listen(self, address: str, listen_s: float) -> ProbeDoor:
        """Have the node listen on a port of its choice for `listen_s` seconds."""
        args = {"address": address, "timeout_s": listen_s}
        return await self._ask(ProbeDoor, "probe.listen", args)

    async def probe_connect(
        self, address: str, door: ProbeDoor, num_bytes: int, segment_bytes: int | None = None
    ) -> LinkProbe:
        """Measure the link to a node that listens; `segment_bytes` limits its packets' payload."""
        args: dict[str, Any] = {"address": address, "port": door.port, "greeting": door.greeting}
        args.update(num_bytes=num_bytes, segment_bytes=segment_bytes)
        return await self._ask(LinkProbe, "probe.connect", args)

    async def probe_allreduce(self, probe: AllReduceProbe) -> AllReduceResult:
        limit_s = probe.timeout_s + TORCH_START_S
        return await self._ask(AllReduceResult, "probe.allreduce", to_wire(probe), limit_s)

    # ------------------------------------------------------------ attempts

    async def launch(self, intent: AttemptIntent) -> AttemptStatus:
        args = to_wire(intent)
        status = await self._ask(AttemptStatus, "attempt.launch", args, LAUNCH_TIMEOUT_S)
        place = {"run_id": intent.run_id, "attempt": intent.attempt}
        await self._expect("attempt.launch", status, place)
        return status

    async def confirm(self, run_id: str, attempt: int, *, is_final: bool) -> None:
        """Say that all parts of an attempt run (`is_final`), or that it is still being launched."""
        args = {"run_id": run_id, "attempt": attempt, "is_final": is_final}
        await self._request("attempt.confirm", args, QUICK_TIMEOUT_S)

    async def attempt_own(self, run_id: str, attempt: int, master: MasterIdentity) -> None:
        """Record on the node that `master` takes the attempt over."""
        args = {"run_id": run_id, "attempt": attempt, "master": to_wire(master)}
        await self._request("attempt.own", args, QUICK_TIMEOUT_S)

    async def keep(self, run_id: str, attempt: int, *, is_closed: bool) -> None:
        """Leave the recovery of an attempt to this master for a while, or (`is_closed`) to nobody
        for good.
        """
        args = {"run_id": run_id, "attempt": attempt, "is_closed": is_closed}
        await self._request("attempt.keep", args, QUICK_TIMEOUT_S)

    async def attempt_status(self, run_id: str, attempt: int) -> AttemptStatus:
        args = {"run_id": run_id, "attempt": attempt}
        status = await self._ask(AttemptStatus, "attempt.status", args)
        await self._expect("attempt.status", status, args)
        return status

    async def attempt_list(self) -> tuple[AttemptStatus, ...]:
        return (await self._ask(_Attempts, "attempt.list")).attempts

    async def stop(
        self, run_id: str, attempt: int, grace_s: float, *, at_loss: bool = False
    ) -> AttemptStatus:
        """Stop this node's part of an attempt; return once none of its processes is left."""
        args = {"run_id": run_id, "attempt": attempt, "grace_s": grace_s, "at_loss": at_loss}
        status = await self._ask(AttemptStatus, "attempt.stop", args, grace_s + STOP_MARGIN_S)
        await self._expect("attempt.stop", status, {"run_id": run_id, "attempt": attempt})
        return status

    async def leave_wish(self, run_id: str, attempt: int, wish: ControlRequest) -> None:
        """Leave a control request for the trainer, which reports the outcome in its journal."""
        args = {"run_id": run_id, "attempt": attempt, "wish": to_wire(wish)}
        await self._request("attempt.wish", args, QUICK_TIMEOUT_S)

    # ------------------------------------------------------------ logs and journals

    async def stream_list(self, run_id: str, attempt: int) -> dict[str, int]:
        args = {"run_id": run_id, "attempt": attempt}
        return (await self._ask(_Streams, "stream.list", args)).streams

    async def stream_read(
        self, run_id: str, attempt: int, stream: str, offset: int, max_bytes: int
    ) -> StreamChunk:
        place = {"run_id": run_id, "attempt": attempt, "stream": stream}
        args = {**place, "offset": offset, "max_bytes": max_bytes}
        chunk = await self._ask(StreamChunk, "stream.read", args)
        await self._expect("stream.read", chunk, place)
        return chunk

    async def follow_streams(
        self, run_id: str, attempt: int, offsets: Mapping[str, int]
    ) -> AsyncGenerator[StreamChunk]:
        """Yield what is appended to the streams of an attempt from `offsets` on, indefinitely.

        A stream that is not in `offsets` begins at 0 when it appears. Nothing is lost or repeated:
        if the reader falls far behind, the subscription is renewed at the offset it has reached.

        Raises:
            NodeUnreachable: the link was lost; follow again from the offsets reached.
        """
        reached = dict(offsets)
        while True:
            async with contextlib.aclosing(self._follow_once(run_id, attempt, reached)) as once:
                async for chunk in once:
                    yield chunk
                    # After the yield: a chunk is read once its reader asks for the next one.
                    reached[chunk.stream] = chunk.offset + decoded_size(chunk.data_base64)

    async def _follow_once(
        self, run_id: str, attempt: int, offsets: dict[str, int]
    ) -> AsyncGenerator[StreamChunk]:
        channel = (await self._link()).channel
        backlog = _Backlog()
        place = {"run_id": run_id, "attempt": attempt}
        args = {**place, "offsets": offsets}
        follow_id, result = await channel.follow(
            "stream.follow", args, backlog.take, timeout_s=QUICK_TIMEOUT_S
        )
        lost = asyncio.create_task(channel.wait_lost())
        # The reader waits for this event alone, so the loss of the channel must set it, too.
        lost.add_done_callback(lambda _: backlog.wake.set())
        try:
            while True:
                while backlog.chunks:
                    chunk = await self._read_as(StreamChunk, backlog.next(), "stream.data")
                    await self._expect("stream.data", chunk, place)
                    yield chunk
                # Checked after the chunks: what arrived before the loss is still delivered.
                if lost.done():
                    raise lost.result()
                # Ends this subscription only; `follow_streams` renews it at the offset reached.
                if backlog.is_full:
                    return
                # Nothing is awaited since the checks above, so no chunk slips in before the clear.
                backlog.wake.clear()
                await backlog.wake.wait()
        finally:
            lost.cancel()
            # Posted without an answer: the generator may be closing, or the link gone.
            channel.unfollow(follow_id)
            channel.post("stream.unfollow", {"follow": result.get("follow", follow_id)})

    # ------------------------------------------------------------ checkpoints, files, exports

    async def checkpoint_list(self, run_id: str | None = None) -> tuple[CheckpointInfo, ...]:
        answer = await self._ask(_Checkpoints, "checkpoint.list", {"run_id": run_id})
        for info in answer.checkpoints if run_id is not None else ():
            await self._expect("checkpoint.list", info, {"run_id": run_id})
        return answer.checkpoints

    async def checkpoint_verify(self, run_id: str, step: int) -> CheckpointInfo:
        args = {"run_id": run_id, "step": step}
        info = await self._ask(CheckpointInfo, "checkpoint.verify", args, HASH_TIMEOUT_S)
        await self._expect("checkpoint.verify", info, args)
        return info

    async def checkpoint_delete(self, run_id: str, step: int) -> None:
        await self._request("checkpoint.delete", {"run_id": run_id, "step": step}, QUICK_TIMEOUT_S)

    async def run_fence(self, run_id: str, attempt: int) -> int:
        """Refuse checkpoints of attempts older than `attempt`; return the newest one known
        there.
        """
        args = {"run_id": run_id, "attempt": attempt}
        return await self._ask_number("attempt", "run.fence", args)

    async def run_claim(self, run_id: str, attempt: int, replaces: int) -> Claim:
        """Ask for an attempt number that nobody else gets, and raise the fence to it."""
        args = {"run_id": run_id, "attempt": attempt, "replaces": replaces}
        return await self._ask(Claim, "run.claim", args)

    async def run_delete(self, run_id: str) -> int:
        """Delete all files of a run on the node; return the bytes freed."""
        return await self._ask_number("freed_bytes", "run.delete", {"run_id": run_id}, 300.0)

    async def bundle_status(self, destination: str, files: Sequence[FileEntry]) -> BundleStatus:
        """Return which of `files` the node lacks; it hashes what it has, so this may take long."""
        args = {"destination": destination, "files": to_wire(list(files))}
        return await self._ask(BundleStatus, "bundle.status", args, HASH_TIMEOUT_S)

    async def find_places(
        self, queries: Sequence[PlaceQuery], progress: OnMessage | None = None
    ) -> tuple[PlaceAnswer, ...]:
        """Return where the node can read files of this PC on a share, one answer for each query.

        It reads them once to compare their content, which may take as long as copying them.
        """
        args = to_wire(PlaceQueries(queries=tuple(queries)))
        found = await self._ask(PlaceAnswers, "files.places", args, None, _messages(progress))
        if len(found.answers) != len(queries):
            raise await self._distrust("files.places", "it has another number of places")
        return found.answers

    async def hash_artifact(self, path: str) -> tuple[FileEntry, ...]:
        """Hash the files of an artifact on the node, which reads all of it; empty: it is gone."""
        return (await self._ask(_Files, "artifact.hash", {"path": path}, HASH_TIMEOUT_S)).files

    async def delete_artifact(self, path: str) -> int:
        """Delete an artifact's copy or an export on the node; return the bytes freed."""
        return await self._ask_number("freed_bytes", "artifact.delete", {"path": path}, 300.0)

    async def export_merged(
        self, job: MergeJob, progress: OnProgress | None = None
    ) -> ExportResult:
        return await self._ask(ExportResult, "export.merged", to_wire(job), None, progress)

    async def export_made(self, job: MakeJob, progress: OnProgress | None = None) -> ExportResult:
        """Quantize a merged model and verify the result; without a time limit."""
        return await self._ask(ExportResult, "export.made", to_wire(job), None, progress)

    async def chat_open(self, job: ChatJob, progress: OnMessage | None = None) -> ChatOpened:
        """Load a model of the node; it stays loaded until closed or until this link ends."""
        return await self._ask(ChatOpened, "chat.open", to_wire(job), None, _messages(progress))

    async def chat_ask(
        self, chat: str, turn: ChatTurn, piece: OnMessage | None = None
    ) -> ChatReply:
        """Ask a loaded model; `piece` is called with the answer as it is generated."""
        args = {"chat": chat, "turn": to_wire(turn)}
        return await self._ask(ChatReply, "chat.ask", args, None, _messages(piece))

    async def chat_stop(self, chat: str) -> None:
        """Interrupt the current answer."""
        await self._request("chat.stop", {"chat": chat}, QUICK_TIMEOUT_S)

    async def chat_close(self, chat: str) -> None:
        """Unload a model."""
        await self._request("chat.close", {"chat": chat}, QUICK_TIMEOUT_S)

    async def build_packages(
        self, job: PackagesBuild, progress: OnMessage | None = None
    ) -> PackagesReport:
        """Install packages beside the training environment; downloads tens of megabytes."""
        return await self._ask(
            PackagesReport, "packages.build", to_wire(job), None, _messages(progress)
        )

    async def preview_data(self, job: PreviewJob, progress: OnMessage | None = None) -> DataPreview:
        """Preview data on the node; large data takes as long as tokenizing it."""
        return await self._ask(DataPreview, "data.preview", to_wire(job), None, _messages(progress))

    async def calibrate(
        self, job: CalibrationJob, progress: OnMessage | None = None
    ) -> Calibration:
        """Measure a GPU; no run may use it at the same time."""
        timeout_s = job.seconds + CALIBRATION_MARGIN_S
        return await self._ask(
            Calibration, "gpu.calibrate", to_wire(job), timeout_s, _messages(progress)
        )

    async def model_config(self, model: str) -> dict[str, Any] | None:
        """Return the config.json of a model on the node; None: it is not there."""
        answer = await self._ask(_Config, "model.config", {"model": model})
        return answer.config

    async def inspect_model(self, model: str, spec: RunSpec) -> tuple[ModelRefusal, ...]:
        """Return why the node's copy of a model cannot be trained; empty: it can, or is absent."""
        args = {"model": model, "spec": to_wire(spec)}
        return (await self._ask(_Refusals, "model.inspect", args)).refusals

    async def hub_snapshot(self, model: str) -> HubSnapshot | None:
        """Return what the hub's cache there has of a model; None: not the whole of it."""
        return (await self._ask(_Snapshot, "hub.snapshot", {"model": model})).snapshot

    async def hub_fetch(self, model: str, progress: OnMessage | None = None) -> HubSnapshot | None:
        """Download a model of the hub there; return what can be copied of it, or None.

        It takes hours for a large model, so only the loss of the link ends it.
        """
        args = {"model": model}
        return (await self._ask(_Snapshot, "hub.fetch", args, None, _messages(progress))).snapshot

    async def hub_offer(self, place: SnapshotPlace) -> None:
        """Make a folder of a snapshot in the hub's cache there, for other nodes."""
        await self._request("hub.offer", to_wire(place), HASH_TIMEOUT_S)

    async def hub_show(self, place: SnapshotPlace) -> None:
        """Show a folder there as a snapshot in the hub's cache."""
        await self._request("hub.show", to_wire(place), HASH_TIMEOUT_S)

    async def hub_token(self, wish: TokenWish) -> NodeTokenPlace:
        """Find, store or delete the hub's token on the node; return the state afterwards."""
        answer = await self._ask(_Token, "hub.token", to_wire(wish))
        return answer.place

    async def preview_repair(self, steps: Sequence[RepairStep]) -> RepairPreview:
        """Return what the steps would do on the node now, with the texts of files."""
        # Imported on use, here and below: lists of runs need none of it, and start sooner.
        from agents.contract.repair import RepairPreview, RepairQuery

        args = to_wire(RepairQuery(steps=tuple(steps)))
        return await self._ask(RepairPreview, "repair.preview", args, PREVIEW_TIMEOUT_S)

    async def list_changes(self) -> ChangeList:
        """Return what repairs have changed on the node, with the texts of files."""
        from agents.contract.repair import ChangeList

        return await self._ask(ChangeList, "change.list", {}, PREVIEW_TIMEOUT_S)

    async def open_command(self, *arguments: str) -> Process:
        """Start another command of the agent's archive, for a transfer of raw bytes."""
        return await (await self._link()).open_command(*arguments)

    # ------------------------------------------------------------ sending

    async def _ask(
        self,
        answer: type[T],
        kind: str,
        args: dict[str, Any] | None = None,
        timeout_s: float | None = QUICK_TIMEOUT_S,
        progress: OnProgress | None = None,
    ) -> T:
        result = await self._request(kind, args, timeout_s, progress)
        return await self._read_as(answer, result, kind)

    async def _ask_number(
        self,
        name: str,
        kind: str,
        args: dict[str, Any],
        timeout_s: float | None = QUICK_TIMEOUT_S,
    ) -> int:
        result = await self._request(kind, args, timeout_s)
        return (await self._read_as(_Number, {"value": result.get(name)}, kind)).value

    async def _request(
        self,
        kind: str,
        args: dict[str, Any] | None,
        timeout_s: float | None,
        progress: OnProgress | None = None,
    ) -> dict[str, Any]:
        def report(event: str, data: dict[str, Any]) -> None:
            if progress is not None and event == "progress":
                message, phase = str(data.get("message", "")), str(data.get("phase", ""))
                message = message if kind in _VERBATIM else one_line(message)
                progress(Progress(message=message, phase=phase))

        channel = (await self._link()).channel
        return await channel.request(kind, args, timeout_s=timeout_s, on_event=report)

    async def _read_as(self, answer: type[T], result: dict[str, Any], kind: str) -> T:
        try:
            return from_wire(answer, result if kind in _VERBATIM else read_lines(result))
        except WireError as error:
            raise await self._distrust(kind, str(error)) from error

    async def _distrust(self, kind: str, reason: str) -> BadAnswer:
        """Return the error for an answer that nothing of ours gives, and show it at the node."""
        with contextlib.suppress(RacklessError):
            (await self._link()).channel.complain(f"it answered {kind} in a wrong form: {reason}")
        return BadAnswer(
            f"{self.name} answered {kind} in a wrong form: {reason}",
            "Nothing of the answer was used. Check that PC, or remove it: "
            f"rackless nodes remove {self.name}",
            where=self.name,
        )

    async def _expect(self, kind: str, said: Any, asked: dict[str, Any]) -> None:
        """Check that an answer is about what was asked.

        Raises:
            BadAnswer: it is about something else.
        """
        for name, value in asked.items():
            found = getattr(said, name)
            if found != value:
                reason = f"{name} is {shorten(found)}, not {shorten(value)}"
                raise await self._distrust(kind, reason)


class _Backlog:
    """Bounded queue of followed data that the reader has not taken yet."""

    def __init__(self) -> None:
        self.chunks: deque[dict[str, Any]] = deque()
        self.wake = asyncio.Event()
        self.is_full = False
        self._size_bytes = 0

    def take(self, kind: str, data: dict[str, Any]) -> None:
        # Once full, all later chunks are dropped as well: a gap in a stream would be lost data.
        if kind != "stream.data" or self.is_full:
            return
        self._size_bytes += len(str(data.get("data_base64", "")))
        self.is_full = self._size_bytes > MAX_BACKLOG_BYTES
        self.chunks.append(data)
        self.wake.set()

    def next(self) -> dict[str, Any]:
        data = self.chunks.popleft()
        self._size_bytes -= len(str(data.get("data_base64", "")))
        return data


def decoded_size(data_base64: str) -> int:
    """Return the number of bytes that base64 text decodes to.

    >>> decoded_size("YWJj"), decoded_size("YWI="), decoded_size("YQ=="), decoded_size("")
    (3, 2, 1, 0)
    """
    return len(data_base64) * 3 // 4 - data_base64[-2:].count("=")


def _messages(progress: OnMessage | None) -> OnProgress | None:
    """Return what passes on the sentences alone."""
    return None if progress is None else lambda said: progress(said.message)
