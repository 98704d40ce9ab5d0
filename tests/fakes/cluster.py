"""Nodes in memory for tests of runs: they launch, fail, hang and lose state on demand."""

from __future__ import annotations

import asyncio
import base64
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.contract.data import DataPreview, NamedRow, ShownConversation, ShownPart, ShownRow
from agents.contract.hub import HubSnapshot
from agents.contract.in_place import PlaceAnswer
from agents.contract.messages import Progress
from agents.contract.node import Calibration, EnvironmentReport, ModelRefusal, NodeFacts
from agents.contract.requests.attempts import (
    Attempts,
    ConfirmAttempt,
    ControlAttempt,
    KeepAttempt,
    LaunchAttempt,
    ListAttempts,
    OwnAttempt,
    ReadAttempt,
    StopAttempt,
)
from agents.contract.requests.chats import (
    AskChat,
    ChatAnswer,
    ChatJob,
    ChatOpened,
    ChatReply,
    ChatTurn,
    CloseChat,
    StopChat,
)
from agents.contract.requests.environment import PackagesBuild, PackagesReport
from agents.contract.requests.exports import ExportedFiles, MakeJob, MergeJob
from agents.contract.requests.hub import (
    FetchSnapshot,
    FindSnapshot,
    FoundSnapshot,
    KeepSnapshot,
    OfferSnapshot,
)
from agents.contract.requests.jobs import CalibrationJob, PreviewJob
from agents.contract.requests.models import FoundConfig, InspectModel, ModelRefusals, ReadConfig
from agents.contract.requests.node import ReadFacts
from agents.contract.requests.probes import ChoosePort, ChosenPort
from agents.contract.requests.runs import (
    Checkpoints,
    ClaimAttempt,
    CompareBundle,
    DeleteArtifact,
    DeleteCheckpoint,
    DeleteRun,
    Fence,
    Halted,
    HaltRun,
    HashArtifact,
    HashedFiles,
    ListCheckpoints,
    RaiseFence,
    VerifyCheckpoint,
)
from agents.contract.requests.shared import PlaceAnswers, PlaceQueries
from agents.contract.requests.storage import FindMarks, FoundMarks, Freed, MarkHome
from agents.contract.requests.streams import ListStreams, ReadStream, StreamSizes
from agents.contract.run import (
    AttemptIntent,
    AttemptState,
    AttemptStatus,
    BundleStatus,
    CheckpointInfo,
    Claim,
    ControlRequest,
    FileEntry,
    RankStatus,
    StreamChunk,
)
from app.errors import NodeUnreachable, RacklessError, UserError
from app.events import EventHub
from app.forecasts.learning import learn_from_run
from app.forecasts.planner import Planner
from app.library.bundles import Source
from app.library.configs import ConfigLibrary
from app.paths import Paths
from app.runs.mandates import MasterKey
from app.runs.nodes.attempt_status import active_attempts
from app.runs.nodes.node_pool import BytesProgress, OnTransfers
from app.runs.run_repository import RunRepository
from app.runs.services import Services
from app.settings import Settings
from app.storage.artifacts import ArtifactStore
from app.storage.database import open_database
from app.storage.hashes import HashStore
from app.storage.planning import PlanningStore
from app.storage.recoveries import RecoveryStore
from app.storage.runs import RunStore
from tests.fakes.requests import FakeAgent, Report, answers

ENVIRONMENT = EnvironmentReport(python="/env/bin/python", python_version="3.11.7", fits=True)


def make_facts(**changes: Any) -> NodeFacts:
    facts = NodeFacts(
        hostname="pc",
        os="Debian",
        kernel="6.1",
        python="3.11.7",
        architecture="x86_64",
        address="127.0.0.1",
        environment=ENVIRONMENT,
    )
    return replace(facts, **changes)


def make_preview(**changes: Any) -> DataPreview:
    """Return a preview of three rows, of which one is left out."""
    shown = ShownConversation(
        num_tokens=5,
        num_targets=2,
        parts=(ShownPart(text="Hi\n", learned=False), ShownPart(text="Ho", learned=True)),
    )
    found = DataPreview(
        format="alpaca",
        whole=True,
        num_rows=3,
        num_examples=2,
        num_tokens=10,
        num_targets=4,
        longest_tokens=5,
        sequence_tokens=64,
        num_skipped=1,
        num_malformed=1,
        skipped=(NamedRow(row=2, reason="not valid JSON", malformed=True),),
        rows=(ShownRow(row=1, conversations=(shown,)),),
    )
    return replace(found, **changes)


@dataclass
class FakeNode(FakeAgent):
    """One node; a test turns its switches."""

    name: str
    facts_now: NodeFacts = field(default_factory=make_facts)
    reachable: bool = True
    launch_error: Exception | None = None
    launch_gate: asyncio.Event | None = None
    """A launch waits for it."""
    asked_to_launch: asyncio.Event = field(default_factory=asyncio.Event)
    stop_error: Exception | None = None
    stop_delay_s: float = 0.0
    delete_error: Exception | None = None
    attempts: dict[tuple[str, int], AttemptStatus] = field(default_factory=dict)
    streams: dict[tuple[str, int], dict[str, bytes]] = field(default_factory=dict)
    checkpoints: dict[tuple[str, int], CheckpointInfo] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    """Steps whose files do not match their hashes."""
    fences: dict[str, int] = field(default_factory=dict)
    halts: dict[str, int] = field(default_factory=dict)
    places: dict[str, PlaceAnswer] = field(default_factory=dict)
    """Where it can read what the master has at a path."""
    intents: list[AttemptIntent] = field(default_factory=list)
    stops: list[tuple[str, int, float]] = field(default_factory=list)
    closings: list[str] = field(default_factory=list)
    """Signatures by which nodes are told never to recover an attempt; empty: they may."""
    wishes: list[ControlRequest] = field(default_factory=list)
    grant: Callable[[str, int, ControlRequest], None] | None = None
    """Answer a control request as the trainer does."""
    deleted: list[str] = field(default_factory=list)
    pushed: list[str] = field(default_factory=list)
    merges: list[MergeJob] = field(default_factory=list)
    made: list[MakeJob] = field(default_factory=list)
    loaded: list[ChatJob] = field(default_factory=list)
    """Models that were loaded for a conversation."""
    asked: list[tuple[str, ChatTurn]] = field(default_factory=list)
    chats: set[str] = field(default_factory=set)
    """Running ones; a test removes one to let it end."""
    stopped: list[str] = field(default_factory=list)
    previews: list[PreviewJob] = field(default_factory=list)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the model's path or id."""
    snapshots: dict[str, HubSnapshot] = field(default_factory=dict)
    """Models in the hub's cache or copied from another PC, by their id."""
    copied: dict[str, str] = field(default_factory=dict)
    """Folders of the copied ones, by their id."""
    hub: dict[str, HubSnapshot | RacklessError] = field(default_factory=dict)
    """What a download gives, by the model's id; one without a name gives nothing to copy."""
    refusals: dict[str, tuple[ModelRefusal, ...]] = field(default_factory=dict)
    """Why a model on this node cannot be trained, by its path or id."""
    artifacts: dict[str, tuple[FileEntry, ...]] = field(default_factory=dict)
    """By their folder."""
    home_marks: set[str] = field(default_factory=set)
    """Marks in its folder; nodes with one folder have one set."""
    calls: list[str] = field(default_factory=list)

    # ------------------------------------------------------------ switches

    def set_state(
        self, run_id: str, attempt: int, state: AttemptState, message: str = "", **changes: Any
    ) -> None:
        status = self.attempts[run_id, attempt]
        self.attempts[run_id, attempt] = replace(status, state=state, message=message, **changes)

    def set_rank(self, run_id: str, attempt: int, **rank: Any) -> None:
        ranks = (RankStatus(rank=0, **rank),)
        self.attempts[run_id, attempt] = replace(self.attempts[run_id, attempt], ranks=ranks)

    def write(self, run_id: str, attempt: int, stream: str, data: bytes) -> None:
        streams = self.streams.setdefault((run_id, attempt), {})
        streams[stream] = streams.get(stream, b"") + data

    def add_checkpoint(self, run_id: str, step: int, attempt: int = 1, content: str = "") -> None:
        self.checkpoints[run_id, step] = CheckpointInfo(
            run_id=run_id,
            step=step,
            attempt=attempt,
            path=f"runs/{run_id}/checkpoints/step-{step:08d}",
            size_bytes=1000,
            manifest_sha256=f"{content}{step}",
            created_s=float(step),
        )

    def _answer(self, kind: str) -> None:
        self.calls.append(kind)
        if not self.reachable:
            raise NodeUnreachable(f"{self.name} cannot be reached")

    # ------------------------------------------------------------ what the master asks

    @answers(ReadFacts)
    async def facts(self, request: ReadFacts, progress: Report = None) -> NodeFacts:
        self._answer("facts")
        return self.facts_now

    @answers(MarkHome)
    async def mark_home(self, request: MarkHome, progress: Report = None) -> None:
        self._answer("mark_home")
        (self.home_marks.discard if request.removes else self.home_marks.add)(request.mark)

    @answers(FindMarks)
    async def find_marks(self, request: FindMarks, progress: Report = None) -> FoundMarks:
        self._answer("find_marks")
        return FoundMarks(marks=tuple(mark for mark in request.marks if mark in self.home_marks))

    @answers(ChoosePort)
    async def port_choose(self, request: ChoosePort, progress: Report = None) -> ChosenPort:
        self._answer("port_choose")
        # All nodes have one address, where each port can be used once.
        port = 29500 + 100 * ord(self.name[0]) + self.calls.count("port_choose")
        return ChosenPort(port=port)

    @answers(LaunchAttempt)
    async def launch(self, request: LaunchAttempt, progress: Report = None) -> AttemptStatus:
        intent = request.intent
        self._answer("launch")
        self.asked_to_launch.set()
        if self.launch_gate is not None:
            await self.launch_gate.wait()
        if self.launch_error is not None:
            raise self.launch_error
        if intent.attempt <= self.halts.get(intent.run_id, 0):
            raise UserError(f"Run {intent.run_id} was stopped")
        self.intents.append(intent)
        status = AttemptStatus(
            run_id=intent.run_id,
            attempt=intent.attempt,
            node=self.name,
            state="running",
            started_s=1000.0,
            spec=intent.spec,
            all_ranks=intent.ranks,
            master=intent.master,
            is_confirmed=intent.confirm_s is None,
            election=intent.election,
            proof=intent.proof,
        )
        self.attempts[intent.run_id, intent.attempt] = status
        return status

    @answers(ConfirmAttempt)
    async def confirm(self, request: ConfirmAttempt, progress: Report = None) -> None:
        self._answer("confirm")
        if request.is_final:
            status = await self._status(request.run_id, request.attempt)
            self.attempts[request.run_id, request.attempt] = replace(status, is_confirmed=True)

    @answers(OwnAttempt)
    async def attempt_own(self, request: OwnAttempt, progress: Report = None) -> None:
        self._answer("attempt_own")
        status = await self._status(request.run_id, request.attempt)
        self.attempts[request.run_id, request.attempt] = replace(
            status, master=request.master, owner=request.master
        )

    @answers(KeepAttempt)
    async def keep(self, request: KeepAttempt, progress: Report = None) -> None:
        self._answer("keep_closed" if request.is_closed else "keep")
        self.closings.append(request.closing)

    @answers(ReadAttempt)
    async def attempt_status(self, request: ReadAttempt, progress: Report = None) -> AttemptStatus:
        self._answer("attempt_status")
        try:
            return self.attempts[request.run_id, request.attempt]
        except KeyError:
            raise UserError(
                f"{self.name} has no attempt {request.attempt} of {request.run_id}"
            ) from None

    async def _status(self, run_id: str, attempt: int) -> AttemptStatus:
        return await self.ask(ReadAttempt(run_id=run_id, attempt=attempt))

    @answers(ListAttempts)
    async def attempt_list(self, request: ListAttempts, progress: Report = None) -> Attempts:
        self._answer("attempt_list")
        return Attempts(attempts=tuple(self.attempts.values()))

    @answers(StopAttempt)
    async def stop(self, request: StopAttempt, progress: Report = None) -> AttemptStatus:
        run_id, attempt = request.run_id, request.attempt
        self._answer("stop")
        self.stops.append((run_id, attempt, request.grace_s))
        self.closings.append(request.closing)
        await asyncio.sleep(self.stop_delay_s)
        if self.stop_error is not None:
            raise self.stop_error
        status = await self._status(run_id, attempt)
        if status.state in ("starting", "running", "stopping"):
            self.set_state(run_id, attempt, "stopped")
        return self.attempts[run_id, attempt]

    @answers(ControlAttempt)
    async def leave_wish(self, request: ControlAttempt, progress: Report = None) -> None:
        self._answer("leave_wish")
        self.wishes.append(request.wish)
        if self.grant is not None:
            self.grant(request.run_id, request.attempt, request.wish)

    @answers(ListStreams)
    async def stream_list(self, request: ListStreams, progress: Report = None) -> StreamSizes:
        self._answer("stream_list")
        streams = self.streams.get((request.run_id, request.attempt), {})
        return StreamSizes(streams={name: len(data) for name, data in streams.items()})

    @answers(ReadStream)
    async def stream_read(self, request: ReadStream, progress: Report = None) -> StreamChunk:
        self._answer("stream_read")
        return self._chunk(
            request.run_id, request.attempt, request.stream, request.offset, request.max_bytes
        )

    async def follow_streams(
        self, run_id: str, attempt: int, offsets: Mapping[str, int]
    ) -> AsyncIterator[StreamChunk]:
        reached = dict(offsets)
        while True:
            self._answer("follow_streams")
            for stream, data in self.streams.get((run_id, attempt), {}).items():
                while reached.get(stream, 0) < len(data):
                    chunk = self._chunk(run_id, attempt, stream, reached.get(stream, 0), 7)
                    yield chunk
                    reached[stream] = chunk.offset + len(base64.b64decode(chunk.data_base64))
            await asyncio.sleep(0.01)

    def _chunk(
        self, run_id: str, attempt: int, stream: str, offset: int, max_bytes: int
    ) -> StreamChunk:
        data = self.streams[run_id, attempt][stream]
        return StreamChunk(
            run_id=run_id,
            attempt=attempt,
            stream=stream,
            offset=offset,
            data_base64=base64.b64encode(data[offset : offset + max_bytes]).decode(),
            size_bytes=len(data),
        )

    @answers(CalibrationJob)
    async def calibrate(self, request: CalibrationJob, progress: Report = None) -> Calibration:
        self._answer("calibrate")
        return Calibration(
            card=self.facts_now.gpus[0].name, matrix_flops_per_s=4e13, measured_s=5.0
        )

    @answers(FindSnapshot)
    async def hub_snapshot(self, request: FindSnapshot, progress: Report = None) -> FoundSnapshot:
        self._answer("hub_snapshot")
        return FoundSnapshot(
            snapshot=self.snapshots.get(request.model), folder=self.copied.get(request.model, "")
        )

    @answers(FetchSnapshot)
    async def hub_fetch(self, request: FetchSnapshot, progress: Report = None) -> FoundSnapshot:
        self._answer("hub_fetch")
        found = self.hub.get(request.model)
        if isinstance(found, RacklessError):
            raise found
        if found is not None:
            self.snapshots[request.model] = found
        if progress is not None:
            progress(Progress(message=f"downloading {request.model}: 50 % of 1.0 GiB"))
        return FoundSnapshot(snapshot=found)

    @answers(OfferSnapshot)
    async def hub_offer(self, request: OfferSnapshot, progress: Report = None) -> None:
        self._answer("hub_offer")

    @answers(KeepSnapshot)
    async def hub_keep(self, request: KeepSnapshot, progress: Report = None) -> FoundSnapshot:
        self._answer("hub_keep")
        place = request.place
        self.snapshots[place.model] = place.snapshot
        self.copied[place.model] = f"/home/anna/.rackless/{place.folder}"
        return FoundSnapshot(snapshot=place.snapshot, folder=self.copied[place.model])

    @answers(ReadConfig)
    async def model_config(self, request: ReadConfig, progress: Report = None) -> FoundConfig:
        self._answer("model_config")
        return FoundConfig(config=self.configs.get(request.model))

    @answers(InspectModel)
    async def inspect_model(self, request: InspectModel, progress: Report = None) -> ModelRefusals:
        self._answer("inspect_model")
        return ModelRefusals(refusals=self.refusals.get(request.model, ()))

    @answers(ListCheckpoints)
    async def checkpoint_list(
        self, request: ListCheckpoints, progress: Report = None
    ) -> Checkpoints:
        self._answer("checkpoint_list")
        found = (c for c in self.checkpoints.values() if request.run_id in (None, c.run_id))
        return Checkpoints(checkpoints=tuple(found))

    @answers(VerifyCheckpoint)
    async def checkpoint_verify(
        self, request: VerifyCheckpoint, progress: Report = None
    ) -> CheckpointInfo:
        self._answer("checkpoint_verify")
        info = self.checkpoints[request.run_id, request.step]
        whole = request.step not in self.damaged
        return replace(info, verified=whole, problem="" if whole else "state.json was changed")

    @answers(DeleteCheckpoint)
    async def checkpoint_delete(self, request: DeleteCheckpoint, progress: Report = None) -> None:
        self._answer("checkpoint_delete")
        del self.checkpoints[request.run_id, request.step]
        self.damaged.discard(request.step)

    @answers(CompareBundle)
    async def bundle_status(self, request: CompareBundle, progress: Report = None) -> BundleStatus:
        self._answer("bundle_status")
        is_here = request.destination in self.pushed
        missing = () if is_here else tuple(entry.path for entry in request.files)
        return BundleStatus(path=f"/agent/{request.destination}", complete=is_here, missing=missing)

    @answers(PlaceQueries)
    async def find_places(self, request: PlaceQueries, progress: Report = None) -> PlaceAnswers:
        self._answer("find_places")
        found = []
        for query in request.queries:
            path = query.paths[0] if query.member is None else f"{query.paths[0]}/{query.member}"
            found.append(self.places.get(path, PlaceAnswer()))
        return PlaceAnswers(answers=tuple(found))

    @answers(RaiseFence)
    async def run_fence(self, request: RaiseFence, progress: Report = None) -> Fence:
        self._answer("run_fence")
        fence = max(request.attempt, self.fences.get(request.run_id, 0))
        self.fences[request.run_id] = fence
        return Fence(attempt=fence, halted=self.halts.get(request.run_id, 0))

    @answers(HaltRun)
    async def run_halt(self, request: HaltRun, progress: Report = None) -> Halted:
        run_id = request.run_id
        self._answer("run_halt")
        own = {number: status for (run, number), status in self.attempts.items() if run == run_id}
        newest = max(request.attempt, self.fences.get(run_id, 0), *own, self.halts.get(run_id, 0))
        self.halts[run_id] = newest
        active = active_attempts(own.values())
        return Halted(attempt=newest, active=tuple(status.attempt for status in active))

    @answers(ClaimAttempt)
    async def run_claim(self, request: ClaimAttempt, progress: Report = None) -> Claim:
        run_id, attempt = request.run_id, request.attempt
        self._answer("run_claim")
        launched = max((number for run, number in self.attempts if run == run_id), default=0)
        fence = self.fences.get(run_id, 0)
        if launched > request.replaces or attempt <= fence:
            return Claim(is_granted=False, fence=fence, launched=launched)
        self.fences[run_id] = attempt
        return Claim(is_granted=True, fence=attempt, launched=launched)

    @answers(DeleteRun)
    async def run_delete(self, request: DeleteRun, progress: Report = None) -> Freed:
        self._answer("run_delete")
        if self.delete_error is not None:
            raise self.delete_error
        self.deleted.append(request.run_id)
        self.attempts = {k: v for k, v in self.attempts.items() if k[0] != request.run_id}
        return Freed(freed_bytes=0)

    @answers(HashArtifact)
    async def hash_artifact(self, request: HashArtifact, progress: Report = None) -> HashedFiles:
        self._answer("hash_artifact")
        return HashedFiles(files=self.artifacts.get(request.path, ()))

    @answers(DeleteArtifact)
    async def delete_artifact(self, request: DeleteArtifact, progress: Report = None) -> Freed:
        self._answer("delete_artifact")
        files = self.artifacts.pop(request.path, ())
        return Freed(freed_bytes=sum(entry.size_bytes for entry in files))

    @answers(MergeJob)
    async def export_merged(self, request: MergeJob, progress: Report = None) -> ExportedFiles:
        self._answer("export_merged")
        self.merges.append(request)
        return ExportedFiles(path=request.destination)

    @answers(MakeJob)
    async def export_made(self, request: MakeJob, progress: Report = None) -> ExportedFiles:
        self._answer("export_made")
        self.made.append(request)
        self.artifacts[request.destination] = ()
        return ExportedFiles(path=request.destination)

    @answers(ChatJob)
    async def chat_open(self, request: ChatJob, progress: Report = None) -> ChatOpened:
        self._answer("chat_open")
        self.loaded.append(request)
        self.chats.add(request.chat)
        device = request.devices[0].device if request.devices else "cpu"
        return ChatOpened(load_s=1.0, runtime="fake", device=device)

    @answers(AskChat)
    async def chat_ask(self, request: AskChat, progress: Report = None) -> ChatReply:
        self._answer("chat_ask")
        if request.chat not in self.chats:
            return ChatReply(answer=None, ended="nothing was asked for 15 minutes")
        self.asked.append((request.chat, request.turn))
        if progress is not None:
            progress(Progress(message="Forty-"))
            progress(Progress(message="two."))
        answer = ChatAnswer(
            text="Forty-two.",
            num_tokens=2,
            first_token_s=0.1,
            tokens_per_s=10.0,
            runtime="fake",
            cut=False,
        )
        return ChatReply(answer=answer)

    @answers(StopChat)
    async def chat_stop(self, request: StopChat, progress: Report = None) -> None:
        self._answer("chat_stop")
        self.stopped.append(request.chat)

    @answers(CloseChat)
    async def chat_close(self, request: CloseChat, progress: Report = None) -> None:
        self._answer("chat_close")
        self.chats.discard(request.chat)

    @answers(PackagesBuild)
    async def build_packages(
        self, request: PackagesBuild, progress: Report = None
    ) -> PackagesReport:
        self._answer("build_packages")
        return PackagesReport(path=f"environments/packages-{request.lock_sha256[:16]}")

    @answers(PreviewJob)
    async def preview_data(self, request: PreviewJob, progress: Report = None) -> DataPreview:
        self._answer("preview_data")
        self.previews.append(request)
        return make_preview(whole=request.whole)


class FakeCluster:
    def __init__(self, *names: str) -> None:
        self.nodes = {name: FakeNode(name) for name in names}
        self.copies: list[tuple[str, str, str]] = []
        self.shared: list[dict[str, tuple[Source, ...]]] = []

    def __getitem__(self, name: str) -> FakeNode:
        return self.nodes[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    def agent(self, name: str) -> FakeNode:
        if name not in self.nodes:
            raise UserError(f"there is no node {name}")
        return self.nodes[name]

    def is_unreachable(self, name: str) -> bool:
        return not self.nodes[name].reachable

    async def push(self, name: str, source: Source, progress: BytesProgress | None = None) -> str:
        self.nodes[name]._answer("push")
        assert source.destination is not None
        if source.destination.startswith("artifacts/"):
            self._store(name, source.destination, source.files)
        if progress is not None:
            progress(1, 2)
        self.nodes[name].pushed.append(source.destination)
        return f"/agent/{source.destination}"

    async def fetch(
        self, name: str, path: str, target: Path, expected: Sequence[FileEntry] | None = None
    ) -> None:
        self.nodes[name]._answer("fetch")
        await asyncio.to_thread(target.mkdir)

    async def share(
        self, wanted: Mapping[str, Sequence[Source]], progress: OnTransfers | None = None
    ) -> tuple[str, ...]:
        self.shared.append({name: tuple(sources) for name, sources in wanted.items()})
        return ()

    async def copy(
        self,
        source: str,
        targets: Sequence[str],
        path: str,
        progress: OnTransfers | None = None,
        expected: Mapping[str, int] | None = None,
    ) -> tuple[str, ...]:
        for target in targets:
            self.copies.append((source, target, path))
            if path in self.nodes[source].artifacts:
                self._store(target, path, self.nodes[source].artifacts[path])
            for key, info in self.nodes[source].checkpoints.items():
                if info.path == path:
                    self.nodes[target].checkpoints[key] = info
        return ()

    def _store(self, name: str, path: str, files: Sequence[FileEntry]) -> None:
        """Copy the files that are missing by name and size, as a node does."""
        artifacts = self.nodes[name].artifacts
        here = {(entry.path, entry.size_bytes): entry for entry in artifacts.get(path, ())}
        artifacts[path] = tuple(here.get((one.path, one.size_bytes), one) for one in files)


def make_services(home: Path, cluster: FakeCluster) -> Services:
    """Return services with a real store below `home` and the fake nodes."""
    paths = Paths(home)
    database = open_database(paths.database)
    recoveries = RecoveryStore(database)
    services = Services(
        paths=paths,
        runs=RunRepository(paths, RunStore(database), recoveries, EventHub()),
        hashes=HashStore(database),
        pool=cluster,
        settings=Settings(paths.settings_file),
        planning=PlanningStore(database),
        configs=ConfigLibrary(paths.configs, {"HF_HUB_OFFLINE": "1", "HOME": str(home)}),
        artifacts=ArtifactStore(database),
        recoveries=recoveries,
        key=MasterKey(paths.master_key),
    )
    services.hooks.forecast = Planner(services).forecast
    services.hooks.learn = functools.partial(learn_from_run, services)
    return services
