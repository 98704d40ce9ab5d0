"""Every action of a person is one method of `Core`: the button, the command and the test call it.

The one place where the parts are put together; the class is long because every action is here, and
short in each, because the work is done elsewhere. It belongs to one event loop; nothing here blocks
that loop for longer than a local disk takes. A run never depends on it: closing the core, or
killing its process, changes nothing on any node.

Two ways of life: a command opens it, asks a few things and leaves; the window calls `connect` once,
and from then on the core keeps nodes connected, watches every active run, finds runs that nodes
remember, and notices what another process has stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agents.contract.artifacts import ChatAnswer, ChatTurn
from agents.contract.data import DataPreview
from agents.contract.formats import Engine
from agents.contract.node import Calibration, EnvironmentReport, LogTail, Sample
from agents.contract.spec import RunSpec
from app.artifact import ArtifactSnapshot
from app.conversation import AnswerComparison, Loaded, Project, Subject
from app.errors import UserError
from app.events import (
    ACTIVE_STATES,
    ArtifactsChanged,
    Certificate,
    CheckpointSnapshot,
    EvaluationRecord,
    Event,
    EventHub,
    Exported,
    LinkSnapshot,
    NodeSnapshot,
    RunEvent,
    RunSnapshot,
    SampleArrived,
    SavedNow,
    StepRecord,
    TraceMade,
)
from app.library.calibration import check_calibration
from app.library.configs import ConfigLibrary
from app.nodes.client import NodeClient
from app.nodes.fleet import Fleet
from app.nodes.node import Node, NodeAddress, address_from_json, address_to_json
from app.paths import Paths, private_folder
from app.runs import checkpoints
from app.runs.fleet_pool import FleetCluster
from app.runs.journals.logs import LogFile, find_logs
from app.runs.lifecycle import control_requests, launch, reconcile, resume, stop, waiting
from app.runs.lifecycle.background_tasks import Upkeep
from app.runs.preflight import choose_nodes
from app.runs.run_repository import RunRepository
from app.runs.services import Services
from app.settings import Settings
from app.storage.artifacts import ArtifactStore
from app.storage.database import Database, open_database
from app.storage.hashes import HashStore
from app.storage.nodes import NodeStore
from app.storage.planning import PlanningStore
from app.storage.prompts import PromptStore
from app.storage.runs import RunStore
from app.text import show_list

if TYPE_CHECKING:
    from app.artifacts.deletion import DeletedArtifact
    from app.artifacts.estimates.plan import ExportPlan
    from app.artifacts.serving import ServeCommand
    from app.chats.chat import Chats
    from app.forecasts.planner import Planner
    from app.hub.hub_token import TokenPlace
    from app.hub.node_tokens import NodeToken
    from app.library.recipes import Recipe
    from app.planning.candidate import Plan
    from app.planning.forecast_accuracy import ForecastComparison
    from app.provisioning.check_rules import CheckRow

Progress = Callable[[str], None]
CERTIFICATE_S = 1800.0
"""How long a resumed run may load before its first step."""


class Core:
    """Made by `Core.open`."""

    def __init__(
        self, services: Services, fleet: Fleet, nodes: NodeStore, database: Database, hub: EventHub
    ) -> None:
        self.events = hub
        self.settings = services.settings
        self.notice = database.notice
        """What a person should know about the store, such as a damaged file moved aside."""
        self.at_end: list[Callable[[], Awaitable[None]]] = []
        """Called on the core's loop when it is closed and all nodes are let go of."""
        self._services = services
        self._book = services.book
        self._fleet = fleet
        self._node_store = nodes
        self._upkeep = Upkeep(services, fleet, nodes, database, hub)
        self._planner: Planner | None = None
        """Made at the first plan: it costs each other command a tenth of a second."""
        self._chats_made: Chats | None = None
        self._samples: dict[str, Sample] = {}
        """The newest of each node; they tell a plan what others hold of a GPU."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, home: Path) -> AsyncIterator[Core]:
        """Open the store and the fleet below `home`; connect to nothing yet.

        Raises:
            UserError: the folder cannot be used, or a newer version wrote it.
        """
        paths = Paths(home)
        database = await asyncio.to_thread(
            open_database, paths.database, functools.partial(_refill, paths)
        )
        stack = contextlib.AsyncExitStack()
        stack.callback(database.close)
        at_end: list[Callable[[], Awaitable[None]]] = []
        stack.push_async_callback(_call_all, at_end)
        try:
            fleet = await stack.enter_async_context(Fleet(home, hub := EventHub()))
            core = _assemble(paths, database, fleet, hub)
            core.at_end = at_end
            stack.push_async_callback(core._upkeep.end)
            stack.enter_context(hub.listening(core._take_sample))
            yield core
        finally:
            # Without the error of the block, which the fleet's task group would wrap in a group.
            await stack.aclose()

    # ------------------------------------------------------------ nodes

    async def wsl_distros(self) -> tuple[str, ...]:
        """Return the names of the WSL distros of this PC; none where there is no WSL."""
        from app.nodes.transport.local import list_distros

        return await list_distros()

    async def add_node(
        self, name: str, address: NodeAddress, accept_host_key: str | None = None
    ) -> NodeSnapshot:
        """Reach a node, start the agent there, and remember it.

        Raises:
            HostKeyUnknown: first contact; ask, and call again with its fingerprint.
            UserError: it cannot be added; nothing is remembered.
        """
        await self._fleet.join(Node(name=name, address=address), accept_host_key)
        self._node_store.save(name, address_to_json(address))
        if self._upkeep.is_on:
            await self._fleet.connect((name,))
        await reconcile.search_nodes(self._services, (name,))
        return await self._fleet.refresh(name)

    def nodes(self) -> tuple[NodeSnapshot, ...]:
        return self._fleet.snapshots()

    async def node(self, name: str) -> NodeSnapshot:
        """Return the node with fresh facts.

        Raises:
            UserError: it cannot be asked.
        """
        return await self._fleet.refresh(name)

    async def reach_nodes(self) -> tuple[NodeSnapshot, ...]:
        """Try to reach every node and return how each stands; a dead one is no error."""
        return await self._fleet.reach()

    async def node_logs(self, name: str) -> tuple[LogTail, ...]:
        """Return what ranks and supervisors on a node wrote last, the newest log first.

        Raises:
            UserError: it cannot be asked.
        """
        return (await self._fleet.client(name).log_tails()).tails

    async def remove_node(self, name: str) -> None:
        """Forget a node. Nothing is deleted on it.

        Raises:
            UserError: there is no such node, or an active run needs it.
        """
        self._fleet.node(name)
        stop.expect_unused(self._services, name)
        await self._fleet.remove(name)
        self._node_store.remove(name)
        self._services.planning.forget_node(name)

    async def connect(self, names: tuple[str, ...] = ()) -> None:
        """Keep nodes (empty: all) connected from now on, and everything shown up to date."""
        await self._fleet.connect(names)
        self._upkeep.begin()

    async def setup_node(
        self, name: str, python: str | None = None, progress: Progress | None = None
    ) -> EnvironmentReport:
        """Build the training environment on a node from the lock file, or adopt `python`.

        Raises:
            UserError: it cannot be built there, or `python` does not fit.
        """
        from app.provisioning.environment import setup_environment

        report = await setup_environment(self._fleet.client(name), python, progress)
        await self._fleet.refresh(name)
        return report

    async def check(self, names: tuple[str, ...] = ()) -> tuple[CheckRow, ...]:
        """Look nodes (empty: all) over before a run; return the rows of the check.

        What it measures of the ways between nodes is kept for plans.
        """
        from app.forecasts.learning import keep_links
        from app.provisioning.check import check_nodes

        rows = await check_nodes(self._fleet, names or self._fleet.names())
        keep_links(self._services.planning, rows)
        return rows

    def links(self) -> tuple[LinkSnapshot, ...]:
        """Return what the last checks measured of the ways between nodes, each direction apart."""
        return tuple(
            LinkSnapshot(
                node=link.node,
                peer=link.peer,
                round_trip_s=link.round_trip_s,
                bytes_per_s=link.bytes_per_s,
                measured_s=link.measured_s,
            )
            for link in self._services.planning.links()
        )

    async def calibrate_node(
        self, name: str, progress: Progress | None = None
    ) -> tuple[Calibration, ...]:
        """Measure the GPUs of a node (else its CPU), 20 seconds each; plans use it from then on.

        Raises:
            UserError: it has no training environment, or a run uses a GPU.
        """
        from app.provisioning.calibrate import calibrate_node

        found = await calibrate_node(self._fleet.client(name), progress)
        for device_id, calibration in found.items():
            self._services.planning.save_calibration(name, device_id, calibration)
        return tuple(found.values())

    def calibrations(self, name: str) -> dict[str, Calibration]:
        """Return what was measured of a node's GPUs, by their uuids."""
        known = self._services.planning.calibrations()
        return {device_id: found for (node, device_id), found in known.items() if node == name}

    async def monitor(self) -> AsyncIterator[SampleArrived]:
        """Yield the samples of all nodes as they come."""
        stream = self.events.stream()
        await self.connect()
        async for event in stream:
            if isinstance(event, SampleArrived) and not event.replayed:
                yield event

    # ------------------------------------------------------------ runs

    async def preview(
        self,
        spec: RunSpec,
        *,
        part: Literal["train", "eval"] = "train",
        node: str | None = None,
        whole: bool = True,
        progress: Progress | None = None,
    ) -> DataPreview:
        """Look a run's training data over before it is started; needs no GPU.

        Returns what format was recognised, how many rows, examples and tokens there are, which
        rows are left out or cut and why, how full packs are, and three rendered rows with what is
        learned of them; `app.presentation.data_text` says it in words.

        Args:
            spec: `data`, `model`, `objective`, `sequence_tokens` and `packing` count.
            part: `eval`: look at the evaluation data instead, which has to be given.
            node: do it there; None: on this PC where the model's folder and the packages are, else
                on the first of the run's nodes that can train.
            whole: read all rows, and keep their tokens for the run; False: the first rows only,
                which takes seconds however big the data is.
            progress: hears how far it is, in a sentence.

        Raises:
            UserError: the data is of no use (naming file, row and reason), or nothing here can
                look at it: no node that can train, and no training packages on this PC.
        """
        from app.forecasts.learning import keep_counted
        from app.runs.preview import preview_data

        found = await preview_data(
            self._services, spec, part=part, node=node, whole=whole, progress=progress
        )
        if part == "train":
            keep_counted(self._services.planning, spec, found)
        return found

    async def plan(
        self, spec: RunSpec, cluster: Path | None = None, *, look_far: bool = True
    ) -> Plan:
        """Say what a run needs and how fast it would be, on which GPU what; start nothing.

        Args:
            spec: what is asked for.
            cluster: a file that describes PCs, such as ones not bought yet; None: the nodes.
            look_far: ask nodes for facts, and nodes and the hub for the model's config, where they
                are not known here; False: answer at once, from what is.

        Raises:
            UserError: the model's sizes cannot be found out, there are no nodes, or the file is
                of no use.
        """
        from app.forecasts.planner import Planner, know_nodes

        self._planner = self._planner or Planner(self._services)
        if cluster is not None:
            from app.library.cluster_file import read_cluster_file

            described = await asyncio.to_thread(read_cluster_file, cluster)
            choose_nodes(spec, [node.name for node in described.nodes])
            return await self._planner.plan(spec, described, look_far=look_far)
        names = choose_nodes(spec, self._fleet.names())
        known = {node.name: node for node in self._fleet.snapshots()}
        if look_far and any(known[name].facts is None for name in names):
            known = {node.name: node for node in await self._fleet.reach()}
        facts = {name: fact for name in names if (fact := known[name].facts) is not None}
        if not facts:
            raise UserError(
                f"{show_list(list(names))} cannot be reached, so their GPUs are not known",
                "Turn one on, or describe PCs in a file: rackless plan RUN.yaml --cluster FILE",
            )
        return await self._planner.plan(
            spec,
            know_nodes(self._services.planning, facts, self._samples),
            online=tuple(name for name in names if known[name].state == "online"),
            silent=tuple(name for name in names if name not in facts),
            look_far=look_far,
        )

    def _take_sample(self, event: Event) -> None:
        if isinstance(event, SampleArrived) and not event.replayed:
            self._samples[event.node] = event.sample

    async def start_run(
        self,
        spec: RunSpec,
        announced: Callable[[str], None] = lambda run_id: None,
        progress: Progress = lambda line: None,
    ) -> RunSnapshot:
        """Start a run; `announced` is called with its id before any node is asked.

        Cancelled, it leaves nothing behind, or a run that has failed and can be resumed.

        Raises:
            UserError: it cannot be started; nothing is left behind.
        """
        run_id = await launch.start_run(self._services, spec, announced, progress)
        if self._upkeep.is_on:
            self._upkeep.watch(run_id)
        return self._book.full_snapshot(run_id)

    async def stop_run(self, run_id: str) -> RunSnapshot:
        """Stop a run with a checkpoint; called again, at once. Returns when nothing is left.

        Raises:
            UserError: it is not active, or no node of it can be reached.
        """
        run_id = self._book.get(run_id).run_id
        await stop.stop_run(self._services, run_id)
        return self._book.full_snapshot(run_id)

    async def save_run(self, run_id: str) -> SavedNow:
        """Have a run save a checkpoint at the end of its present step, and go on training.

        Raises:
            UserError: it is not running, or could not save.
        """
        return await control_requests.save_now(self._services, self._book.get(run_id).run_id)

    async def trace_run(self, run_id: str, num_steps: int = 3) -> TraceMade:
        """Have every rank of a run record its next steps, and fetch the traces.

        Raises:
            UserError: it is not running, or ended before.
        """
        run_id = self._book.get(run_id).run_id
        return await control_requests.record_trace(self._services, run_id, num_steps)

    async def resume_run(
        self,
        run_id: str,
        checkpoint: int | None = None,
        nodes: tuple[str, ...] | None = None,
        verify_steps: int | None = None,
        progress: Progress = lambda line: None,
    ) -> RunSnapshot:
        """Go on from step `checkpoint` (None: the newest whole one) on `nodes` (None: as before).

        With `verify_steps` it begins so far back that as many logged steps are done again and
        compared; `certificate` tells the result.

        Raises:
            UserError: the run is active or done, or cannot be launched.
        """
        run_id = self._book.get(run_id).run_id
        await resume.resume_run(self._services, run_id, checkpoint, nodes, verify_steps, progress)
        if self._upkeep.is_on:
            self._upkeep.watch(run_id)
        return self._book.full_snapshot(run_id)

    async def certificate(self, run_id: str) -> Certificate | None:
        """Wait for the result of a verified resume; None: no step came for half an hour.

        Raises:
            UserError: the run ended before.
        """
        run = self._book.get(run_id)
        return await waiting.wait_for(
            self._services, run, lambda attempt: attempt.certificate, CERTIFICATE_S
        )

    async def delete_run(self, run_id: str) -> tuple[str, ...]:
        """Delete a run with its checkpoints; return the nodes that will do so later.

        Raises:
            UserError: it is active.
        """
        return await stop.delete_run(self._services, self._book.get(run_id).run_id)

    def runs(self) -> tuple[RunSnapshot, ...]:
        """Return every run as last known, newest first."""
        return self._book.snapshots()

    async def refresh_runs(self) -> tuple[RunSnapshot, ...]:
        """Ask the nodes of every active run how it stands, and return all runs.

        With a store that was lost, all nodes are asked for the runs that they remember.
        """
        if self._book.store.must_search_nodes():
            silent = await reconcile.search_nodes(self._services, self._fleet.names())
            self._book.store.set_search_nodes(bool(silent))
        active = self._book.store.in_states(ACTIVE_STATES)
        await asyncio.gather(*(reconcile.reconcile_run(self._services, run) for run in active))
        return self.runs()

    async def run(self, run_id: str) -> RunSnapshot:
        """Ask the nodes of a run how it stands, and return it.

        Raises:
            UserError: there is no such run.
        """
        if self._book.store.must_search_nodes():
            await self.refresh_runs()
        run_id = self._book.get(run_id).run_id
        await reconcile.reconcile_run(self._services, run_id)
        return self._book.full_snapshot(run_id)

    async def watch_run(self, run_id: str) -> RunSnapshot:
        """Follow a run until its attempt ends, publishing what happens; return how it ended."""
        run_id = self._book.get(run_id).run_id
        await asyncio.shield(self._upkeep.watch(run_id))
        return self._book.full_snapshot(run_id)

    async def sync_run(self, run_id: str) -> None:
        """Fetch the newest bytes of a run's logs and journals from the nodes that answer."""
        run = self._book.get(run_id)
        await reconcile.sync_run(self._services, run, run.nodes)
        self._book.refresh(run.run_id)

    def steps(self, run_id: str) -> list[StepRecord]:
        """Return the steps of a run that count, as mirrored so far, in order."""
        return self._book.history(self._book.get(run_id).run_id).steps()

    def evaluations(self, run_id: str) -> list[EvaluationRecord]:
        """Return the evaluations of a run that count, in order."""
        return self._book.history(self._book.get(run_id).run_id).evaluations()

    def run_events(self, run_id: str) -> list[RunEvent]:
        """Return what happened to a run, oldest first."""
        return self._book.events(self._book.get(run_id).run_id)

    def run_preview(self, run_id: str) -> DataPreview | None:
        """Return what a run learns, as its first rank wrote it down; None: not told yet."""
        return self._book.history(self._book.get(run_id).run_id).data

    def comparison(self, run_id: str) -> ForecastComparison | None:
        """Return what was foretold of a run's newest attempt beside what was measured.

        None: nothing was foretold, such as of a run that only the nodes remember.
        """
        from app.forecasts.learning import compare_run

        return compare_run(self._services, self._book.get(run_id))

    def logs(
        self, run_id: str, rank: int | None = None, attempt: int | None = None
    ) -> tuple[LogFile, ...]:
        """Return the mirrored output of a run's ranks (None: all), in the order of attempts."""
        run_id = self._book.get(run_id).run_id
        return find_logs(self._services.paths, run_id, rank, attempt)

    # ------------------------------------------------------------ checkpoints, artifacts, files

    async def checkpoints(
        self, run_id: str | None = None, verify: bool = False
    ) -> tuple[CheckpointSnapshot, ...]:
        """List checkpoints (None: of all runs) over the nodes that answer, newest first.

        Args:
            verify: have every copy hashed on its node, which reads it whole.
        """
        if run_id is not None:
            run_id = self._book.get(run_id).run_id
        copies = await checkpoints.find_copies(self._services, run_id, self._fleet.names())
        if verify:
            copies = await checkpoints.verify(self._services.cluster, copies)
        return checkpoints.with_stalls(self._services, checkpoints.group(copies))

    async def export_run(
        self,
        run_id: str,
        to: str = "merged",
        *,
        out: Path,
        types: Sequence[str] = (),
        checkpoint: int | None = None,
        node: str | None = None,
        calibration: Path | None = None,
        engine: Engine = "gptqmodel",
        progress: Progress | None = None,
    ) -> Exported:
        """Write a run's model to the new folder `out`.

        Args:
            to: merged, nf4, awq, gptq or gguf.
            types: of gptq (4-bit, 8-bit) and gguf (Q8_0, Q4_K_M, ...); none: the usual one.
            node: does the work; None: the first with the checkpoint and the room.
            calibration: data file that awq and gptq are fitted to; None: the run's own data.
            engine: what makes awq.

        Raises:
            UserError: `out` is in use, no whole checkpoint is there, or it could not be made.
        """
        from app.artifacts.exports import export

        run_id = self._book.get(run_id).run_id
        made = await export.export_run(
            self._services,
            run_id,
            to,
            out,
            checkpoint,
            progress,
            types=types,
            node=node,
            calibration=calibration,
            engine=engine,
        )
        self.events.publish(ArtifactsChanged())
        return made

    async def plan_export(
        self,
        run_id: str,
        to: str = "merged",
        *,
        types: Sequence[str] = (),
        checkpoint: int | None = None,
        node: str | None = None,
        calibration: Path | None = None,
        engine: Engine = "gptqmodel",
    ) -> ExportPlan:
        """Foretell an export: what it makes, what it takes on each node, where it cannot be made.

        Args:
            run_id: of the run.
            to: one of `agents.contract.formats.FORMATS`.
            types: of the format; none: the usual one.
            checkpoint: its step; None: the newest.
            node: alone is looked at; None: all.
            calibration: data file that has to be one; None: the run's own data.
            engine: what makes AWQ.

        Raises:
            UserError: there is no such run, format, type, node or data file.
        """
        from app.artifacts.exports.export import foretell_export

        return await foretell_export(
            self._services,
            run_id,
            to,
            checkpoint,
            types=types,
            node=node,
            calibration=calibration,
            engine=engine,
        )

    async def artifacts(self, run_id: str | None = None) -> tuple[ArtifactSnapshot, ...]:
        """Return what exports made (of a run, if one is given), newest first.

        Copies on this PC are looked at by names and sizes; `check_artifact` reads them.

        Raises:
            UserError: there is no such run, and no artifact of one that is deleted.
        """
        from app.artifacts import record

        found = record.list_artifacts(self._services, run_id)
        nodes = self._services.cluster.names()
        return await asyncio.to_thread(
            lambda: tuple(record.look_at_folders(one, nodes) for one in found)
        )

    async def artifact(self, name: str) -> ArtifactSnapshot:
        """Return the artifact NAME (its newest version) or NAME:VERSION.

        Raises:
            UserError: there is none.
        """
        from app.artifacts import record

        found = record.find_artifact(self._services, name)
        return await asyncio.to_thread(
            record.look_at_folders, found, self._services.cluster.names()
        )

    async def add_artifact(self, folder: Path, name: str | None = None) -> ArtifactSnapshot:
        """Enter a folder that was made elsewhere; of one that was moved, its new place.

        Raises:
            UserError: it is no artifact.
        """
        from app.artifacts import record

        found = await asyncio.to_thread(record.add_folder, self._services, folder, name)
        self.events.publish(ArtifactsChanged())
        return found

    async def copy_artifact(
        self, name: str, to: str, progress: Progress | None = None
    ) -> ArtifactSnapshot:
        """Copy an artifact to a node, by its name, or to a new folder on this PC.

        Raises:
            UserError: there is none, no whole copy can be read, or the place cannot take it.
        """
        from app.artifacts import copies

        found = await self.artifact(name)
        await copies.copy_artifact(self._services, found, to, progress or (lambda text: None))
        return await self._changed_artifact(found)

    async def push_artifact(
        self, name: str, hub_id: str, *, private: bool = True, progress: Progress | None = None
    ) -> ArtifactSnapshot:
        """Push an artifact to the model `hub_id` of the Hugging Face hub, with the user's token.

        Raises:
            UserError: no copy is on this PC, there is no token, it may not write there, or the
                hub cannot be reached.
        """
        from app.artifacts import copies

        found = await self.artifact(name)
        tell = progress or (lambda text: None)
        await copies.push_artifact(self._services, found, hub_id, private, tell)
        return await self._changed_artifact(found)

    async def find_hub_token(self) -> TokenPlace:
        """Tell whether this PC has a token of the hub; the hub is not asked."""
        from app.hub.hub_token import find_token

        return await asyncio.to_thread(find_token)

    async def keep_hub_token(self, token: str) -> str:
        """Have the hub check a token, keep it where the hub's tools do; return whose it is.

        Raises:
            UserError: the hub does not know it, or cannot be reached.
        """
        from app.hub.hub_token import keep_token

        return await asyncio.to_thread(keep_token, token)

    async def forget_hub_token(self) -> tuple[NodeToken, ...]:
        """Delete the token that is kept on this PC, and before it from nodes that were given it.

        Returns:
            How the nodes stand; those that could not be asked may still have it.

        Raises:
            UserError: none is kept.
        """
        from app.hub.hub_token import find_token, forget_token

        found = await asyncio.to_thread(find_token)
        asked = await self.take_hub_token() if found == "kept" else ()
        await asyncio.to_thread(forget_token)
        return asked

    async def node_tokens(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Return which nodes (none named: all) have this PC's token of the hub.

        Raises:
            UserError: this PC has none, or a node is not known.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.find_tokens(self._others(names), token)

    async def give_hub_token(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Keep this PC's token on nodes (none named: all) that have none; return how they stand.

        Raises:
            UserError: this PC has none, or a node is not known.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.give_token(self._others(names), token)

    async def take_hub_token(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Delete this PC's token from nodes (none named: all); return how they stand.

        Raises:
            UserError: this PC has none, or a node is not known.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.take_token(self._others(names), token)

    def _others(self, names: Sequence[str]) -> dict[str, NodeClient]:
        from app.hub.node_tokens import choose_others

        return {name: self._fleet.client(name) for name in choose_others(self.nodes(), names)}

    async def check_artifact(self, name: str, progress: Progress | None = None) -> ArtifactSnapshot:
        """Read every copy of an artifact and hold it against its hashes; return how each stands.

        Raises:
            UserError: there is no such artifact.
        """
        from app.artifacts import verification

        found = await self.artifact(name)
        await verification.check_artifact(self._services, found, progress or (lambda text: None))
        return await self._changed_artifact(found)

    async def delete_artifact(
        self, name: str, place: str | None = None, *, even_last: bool = False
    ) -> DeletedArtifact:
        """Delete one copy of an artifact, or (None) all of them and the artifact itself.

        Raises:
            UserError: there is no such copy, or none would be left and `even_last` is not said.
        """
        from app.artifacts import deletion

        found = await self.artifact(name)
        done = await deletion.delete_artifact(self._services, found, place, even_last)
        self.events.publish(ArtifactsChanged())
        return done

    async def serve_commands(self, name: str) -> tuple[ServeCommand, ...]:
        """Return the commands that serve an artifact from this PC, for programs that load it.

        Raises:
            UserError: there is no such artifact, or no copy of it on this PC.
        """
        from app.artifacts.serving_files import hand_off

        return await asyncio.to_thread(hand_off, await self.artifact(name))

    async def artifact_card(self, name: str) -> str:
        """Return the README.md of an artifact's copy on this PC; empty: there is none.

        Raises:
            UserError: there is no such artifact.
        """
        from app.artifacts import record

        return await asyncio.to_thread(record.read_card, await self.artifact(name))

    async def write_modelfile(self, name: str, command: ServeCommand) -> Path | None:
        """Write the file that a command for Ollama names, beside the weights; return it.

        Raises:
            UserError: the folder is gone, or cannot be written.
        """
        from app.artifacts.serving_files import write_modelfile

        return await asyncio.to_thread(write_modelfile, await self.artifact(name), command)

    async def _changed_artifact(self, artifact: ArtifactSnapshot) -> ArtifactSnapshot:
        self.events.publish(ArtifactsChanged())
        return await self.artifact(artifact.label)

    @property
    def _chats(self) -> Chats:
        """What talks with models; made when it is first wanted, since most commands never do."""
        if self._chats_made is None:
            from app.chats.chat import Chats

            self._chats_made = Chats(self._services)
        return self._chats_made

    async def open_chat(self, subject: Subject, *, progress: Progress | None = None) -> Loaded:
        """Load a run's model, the one before it, or an artifact, to talk with it.

        It stays loaded until `close_chat`; a model that its node let go of meanwhile is loaded
        anew at the next question.

        Raises:
            UserError: there is no such run, artifact or node, or it cannot be loaded.
        """
        return await self._chats.open(subject, progress or (lambda text: None))

    async def ask_chat(
        self,
        key: int,
        turn: ChatTurn,
        *,
        progress: Progress | None = None,
        piece: Progress | None = None,
    ) -> ChatAnswer:
        """Return a loaded model's next message.

        Args:
            key: of `open_chat`.
            turn: the whole conversation so far, and how the answer is made.
            progress: hears what happens before the answer.
            piece: hears the answer as it is made.

        Raises:
            UserError: the conversation is closed or too long, or the node cannot be asked.
        """
        tell, say = (told or (lambda text: None) for told in (progress, piece))
        return await self._chats.ask(key, turn, tell, say)

    async def stop_chat(self, key: int) -> None:
        """End the answer that a loaded model gives, where it is."""
        await self._chats.stop(key)

    async def close_chat(self, key: int) -> None:
        """Let a loaded model go."""
        await self._chats.close(key)

    def project_of(self, what: str) -> Project:
        """Return the base and data that a run or an artifact belongs to.

        Raises:
            UserError: there is no such run or artifact.
        """
        from app.chats.chat import find_project

        return find_project(self._services, what)

    def prompts(self, project: Project) -> tuple[str, ...]:
        """Return the prompts that a project's models are compared by."""
        return self._services.prompts.prompts(project)

    def save_prompts(self, project: Project, prompts: tuple[str, ...]) -> None:
        """Keep them."""
        self._services.prompts.save_prompts(project, prompts)

    def read_prompt_file(self, path: Path) -> tuple[str, ...]:
        """Return the prompts in a file, one per line.

        Raises:
            UserError: it cannot be read.
        """
        from app.chats.chat import read_prompt_file

        return read_prompt_file(path)

    async def compare(
        self,
        project: Project,
        subjects: Sequence[Subject],
        *,
        max_tokens: int = 256,
        progress: Progress | None = None,
    ) -> AnswerComparison:
        """Ask models the prompts that are kept for their project, and keep what they answer.

        Raises:
            UserError: there are no prompts, or no model can be loaded.
        """
        from app.chats.comparison import compare_models

        found = await compare_models(
            self._chats,
            subjects,
            self.prompts(project),
            progress or (lambda text: None),
            max_tokens=max_tokens,
        )
        self.save_compared(project, found)
        return found

    def compared_answers(self, project: Project) -> tuple[AnswerComparison, ...]:
        """Return what models answered to the project's prompts, newest first."""
        return self._services.prompts.comparisons(project)

    def save_compared(self, project: Project, found: AnswerComparison) -> None:
        """Keep what models answered."""
        self._services.prompts.add_comparison(project, found)

    def write_compared(self, project: Project, found: AnswerComparison, path: Path) -> None:
        """Write it as Markdown.

        Raises:
            UserError: the place cannot be written.
        """
        from app.chats.chat import write_comparison

        write_comparison(project, found, path)

    async def find_missing(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return which of `model`, `train` and `eval` cannot be what it names, and why."""
        from app.library.data import tell_missing_data
        from app.library.models import tell_missing_model

        def look() -> dict[str, str]:
            ways = {"model": tell_missing_model}
            told = {key: ways.get(key, tell_missing_data)(name) for key, name in names.items()}
            return {key: text for key, text in told.items() if text}

        return await asyncio.to_thread(look)

    async def check_export_folders(self, folders: Sequence[Path]) -> None:
        """Expect each folder to be free for an export. Makes nothing.

        Raises:
            UserError: one is in use, or cannot be written.
        """
        from app.artifacts.exports.place import expect_free

        for folder in folders:
            await asyncio.to_thread(expect_free, folder)

    async def check_calibration(self, path: Path) -> int:
        """Return how many words a data file has to calibrate with; 0: they were not counted.

        Raises:
            UserError: it is not there, no data, or too short.
        """
        return await asyncio.to_thread(check_calibration, path, self._services.hashes)

    def recipes(self) -> tuple[Recipe, ...]:
        """Return the run files to start from: those that ship with Rackless, then one's own."""
        from app.library.recipes import list_recipes

        return list_recipes(self._services.paths.recipes)

    def recipe(self, name: str) -> Recipe:
        """Return one of them.

        Raises:
            UsageError: there is none of that name.
        """
        from app.library.recipes import find_recipe

        return find_recipe(name, self._services.paths.recipes)

    def save_recipe(self, title: str, spec: RunSpec) -> Recipe:
        """Keep the settings of a run to start others from.

        Raises:
            UserError: another recipe has that title, or the disk is full.
        """
        from app.library.recipes import save_recipe

        return save_recipe(self._services.paths.recipes, title, spec)

    def delete_recipe(self, name: str) -> Recipe:
        """Delete a recipe of one's own.

        Raises:
            UserError: there is none, or it ships with Rackless.
        """
        from app.library.recipes import delete_recipe

        return delete_recipe(self._services.paths.recipes, name)

    def run_file_text(self, spec: RunSpec) -> str:
        """Return the run file that reads back as `spec`."""
        from app.runfile.run_file import format_run

        return format_run(spec)

    def read_run_file(self, path: Path) -> RunSpec:
        """Read a run file.

        Raises:
            UsageError: with every problem in it, each with its line.
        """
        from app.runfile.run_file import read_run_file

        return read_run_file(path)

    def write_run_file(self, spec: RunSpec, path: Path) -> None:
        """Write a run file that reads back as `spec`.

        Raises:
            UserError: the place cannot be written.
        """
        from app.runfile.run_file import write_run_file

        write_run_file(spec, path)


async def _call_all(calls: list[Callable[[], Awaitable[None]]]) -> None:
    for call in calls:
        await call()


def _refill(paths: Paths, database: Database) -> None:
    """Put into a new store what outlives a lost one: the nodes, which remember their runs."""
    nodes = NodeStore(database, paths.nodes_file)
    nodes.take_from_copy()
    if nodes.all():
        RunStore(database).set_search_nodes(True)


def _assemble(paths: Paths, database: Database, fleet: Fleet, hub: EventHub) -> Core:
    private_folder(paths.runs)
    node_store = NodeStore(database, paths.nodes_file)
    for known in node_store.all():
        fleet.add(Node(name=known.name, address=address_from_json(known.address)))
    services = Services(
        paths=paths,
        book=RunRepository(paths, RunStore(database), hub),
        hashes=HashStore(database),
        cluster=FleetCluster(fleet),
        settings=Settings(paths.settings_file),
        planning=PlanningStore(database),
        configs=ConfigLibrary(paths.configs),
        artifacts=ArtifactStore(database),
        prompts=PromptStore(database),
    )
    return Core(services, fleet, node_store, database, hub)
