"""Actions on runs: plan, start, follow, stop and resume them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.messages import Progress
from app.core.action import Action, Report, action, as_progress
from app.errors import UserError
from app.events import ACTIVE_STATES
from app.text import show_list

if TYPE_CHECKING:
    from agents.contract.data import DataPreview
    from agents.contract.run import AttemptStatus
    from agents.contract.spec import Parallel, RunSpec
    from app.core.state import CoreState
    from app.events import (
        Certificate,
        CheckpointSnapshot,
        EvaluationRecord,
        FoundRun,
        RunEvent,
        RunSnapshot,
        SaveResult,
        StepRecord,
        TraceResult,
    )
    from app.interruption import Interruption
    from app.planning.accuracy.forecast_accuracy import ForecastComparison
    from app.planning.candidate import Caveats, Plan
    from app.planning.hardware.cluster import Cluster
    from app.runs.journals.history import RunHistory
    from app.runs.journals.logs import LogFile

CERTIFICATE_S = 1800.0
"""Longest wait for the certificate of a resumed run, loading included, in seconds."""


@dataclass(frozen=True, slots=True)
class RunAnnounced:
    """Event: a run has passed all checks and has an id."""

    run_id: str


@action("runs.plan")
class PlanRun(Action["Plan"]):
    """Plan a run: its parallelism, memory per GPU and speed. Starts nothing.

    Raises:
        UserError: the model cannot be trained or its sizes are not known, the data cannot be
            used, there are no nodes, or the file is not valid.
    """

    spec: RunSpec
    cluster: Path | None = None
    """File that describes PCs, such as ones not bought yet; None: the nodes."""
    ask_remote: bool = True
    """Ask nodes for facts, and nodes and the hub for the model's config, where they are not known
    here; False: answer at once, from what is known."""
    check_data: bool = True
    """Refuse data that is missing or unusable; False: the user is still choosing it."""

    async def perform(self, core: CoreState, report: Report) -> Plan:
        if self.check_data:
            await asyncio.to_thread(require_run_data, self.spec)
        found = await find_cluster(core, self.spec, self.cluster, ask_remote=self.ask_remote)
        return await core.planner.plan(
            self.spec,
            found.cluster,
            online=found.online,
            silent=found.silent,
            ask_remote=self.ask_remote,
            is_imagined=self.cluster is not None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCluster:
    """PCs to plan for."""

    cluster: Cluster
    online: tuple[str, ...] = ()
    """Nodes that can be asked for a model's config."""
    silent: tuple[str, ...] = ()
    """Nodes that did not answer, which a plan leaves out."""


async def find_cluster(
    core: CoreState, spec: RunSpec, file: Path | None, *, ask_remote: bool
) -> FoundCluster:
    """Return the PCs of a file, or the nodes that are known, for a run.

    Raises:
        UserError: the file is not valid, there are no nodes, or none of them is known.
    """
    # Imported on use, here and below: other actions start sooner.
    from app.forecasts.planner import describe_nodes
    from app.runs.preflight import choose_nodes

    if file is not None:
        from app.library.cluster_file import read_cluster_file

        described = await asyncio.to_thread(read_cluster_file, file)
        choose_nodes(spec, [node.name for node in described.nodes])
        return FoundCluster(cluster=described)
    names = choose_nodes(spec, core.fleet.names())
    known = {node.name: node for node in core.fleet.snapshots()}
    if ask_remote and any(known[name].facts is None for name in names):
        known = {node.name: node for node in await core.fleet.reach()}
    # Plan with the nodes that are known; the others are named in the plan as silent.
    facts = {name: fact for name in names if (fact := known[name].facts) is not None}
    if not facts:
        raise UserError(
            f"{show_list(list(names))} cannot be reached, so their GPUs are not known",
            "Turn one on, or describe PCs in a file: rackless plan RUN.yaml --cluster FILE",
        )
    return FoundCluster(
        cluster=describe_nodes(core.services.planning, facts, core.samples),
        online=tuple(name for name in names if known[name].state == "online"),
        silent=tuple(name for name in names if name not in facts),
    )


@action("runs.start")
class StartRun(Action["RunSnapshot"]):
    """Start a run, and report `RunAnnounced` once it has passed all checks.

    If cancelled, it leaves nothing behind, or a failed run that can be resumed.

    Raises:
        LeftOutRows: much of the data would be left out.
        UserError: it cannot be started. Once announced, the run stays as a failed one.
    """

    spec: RunSpec
    accept_left_out: bool = False
    """Start also without more than 5 % of the rows, or of their tokens."""

    async def perform(self, core: CoreState, report: Report) -> RunSnapshot:
        from app.runs.lifecycle.launch import start_run

        run_id = await start_run(
            core.services,
            self.spec,
            lambda run_id: report(RunAnnounced(run_id)),
            as_progress(report),
            accept_left_out=self.accept_left_out,
        )
        core.watch(run_id)
        return core.services.runs.full_snapshot(run_id)


@action("runs.stop")
class StopRun(Action["RunSnapshot"]):
    """Stop a run after a checkpoint; a second stop ends it at once. Answers once it has ended.

    Progress says what the stop waits for, whenever that changes.

    Raises:
        UserError: it is not active, or none of its nodes can be reached.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> RunSnapshot:
        from app.runs.lifecycle.stop import stop_run

        run_id = core.full_id(self.run_id)
        await stop_run(core.services, run_id, as_progress(report))
        return core.services.runs.full_snapshot(run_id)


@action("runs.stop_on")
class StopRunOnNode(Action["RunSnapshot | AttemptStatus"]):
    """Stop a run that may be another master's, through `node`, which trains part of it.

    An active run of this master is stopped everywhere, as by `StopRun`, unless the node lists
    an attempt of it that is not this master's: then only that one is stopped.

    Raises:
        UserError: the node cannot be reached, or has nothing of that run to stop.
    """

    run_id: str
    node: str

    async def perform(self, core: CoreState, report: Report) -> RunSnapshot | AttemptStatus:
        from app.runs.foreign import has_foreign_attempt, stop_on_node

        known = core.services.runs.store.get(self.run_id)
        is_active = known is not None and known.state in ACTIVE_STATES
        if is_active and not await has_foreign_attempt(core.services, self.run_id, self.node):
            return await StopRun(run_id=self.run_id).perform(core, report)
        return await stop_on_node(core.services, self.run_id, self.node, only_foreign=is_active)


@action("runs.found")
class FindRuns(Action["tuple[FoundRun, ...]"]):
    """Ask all nodes for runs that are not known to be this home's; nothing is done about them."""

    async def perform(self, core: CoreState, report: Report) -> tuple[FoundRun, ...]:
        from app.runs.lifecycle.adoption import find_runs

        return await find_runs(core.services)


@action("runs.adopt")
class AdoptRun(Action["RunSnapshot"]):
    """Watch a run that a node lists, and let a resume read the files that it names.

    Raises:
        UserError: the node does not list it, or it names other files than `files`.
    """

    run_id: str
    """Whole id of the run."""
    node: str
    """Node whose description of the run counts."""
    files: tuple[str, ...]
    """Files that the user has agreed to, as `FoundRun.files` lists them."""

    async def perform(self, core: CoreState, report: Report) -> RunSnapshot:
        from app.runs.lifecycle.adoption import adopt_run

        await adopt_run(core.services, self.run_id, self.node, self.files)
        core.watch(self.run_id)
        return core.services.runs.full_snapshot(self.run_id)


@action("runs.ignore")
class IgnoreRun(Action[None]):
    """Show a found run of a node no more."""

    run_id: str
    node: str

    async def perform(self, core: CoreState, report: Report) -> None:
        from app.runs.lifecycle.adoption import ignore_run

        ignore_run(core.services, self.run_id, self.node)


@action("runs.take_over")
class TakeOverRun(Action["RunSnapshot"]):
    """Let this master, instead of the one that launched a run, resume it after a loss.

    Raises:
        UserError: it is this master's already, or done, or too few of its nodes answer.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> RunSnapshot:
        from app.runs.lifecycle.takeover import take_over_run

        run_id = core.full_id(self.run_id)
        await take_over_run(core.services, run_id)
        core.watch(run_id)
        return core.services.runs.full_snapshot(run_id)


@action("runs.save")
class SaveCheckpoint(Action["SaveResult"]):
    """Make a run save a checkpoint after its current step and keep training.

    Raises:
        UserError: it is not running, or could not save.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> SaveResult:
        from app.runs.lifecycle import control_requests

        return await control_requests.save_now(core.services, core.full_id(self.run_id))


@action("runs.trace")
class TraceRun(Action["TraceResult"]):
    """Profile the next steps of every rank of a run, and fetch the traces.

    Raises:
        UserError: it is not running, or ended before.
    """

    run_id: str
    num_steps: int = 3

    async def perform(self, core: CoreState, report: Report) -> TraceResult:
        from app.runs.lifecycle import control_requests

        run_id = core.full_id(self.run_id)
        return await control_requests.record_trace(core.services, run_id, self.num_steps)


@action("runs.resume")
class ResumeRun(Action["RunSnapshot"]):
    """Resume a run that has ended from a checkpoint.

    Raises:
        UserError: the run is active or done, or cannot be launched.
    """

    run_id: str
    checkpoint: int | None = None
    """Step of the checkpoint; None: the newest."""
    nodes: tuple[str, ...] | None = None
    """Nodes to train on; None: as before."""
    verify_steps: int | None = None
    """Number of logged steps to replay and compare first; `AwaitCertificate` returns the result.
    None: no verification."""
    learning_rate: float | None = None
    """Learning rate from now on; None: as before."""
    parallel: Parallel | None = None
    """Parallelism from now on; None: as before."""
    asked_s: float | None = None
    """Time at which the user asked for it, in seconds since the epoch; a later stop ends it.
    None: now."""

    async def perform(self, core: CoreState, report: Report) -> RunSnapshot:
        from app.runs.lifecycle.launch_order import take_order
        from app.runs.lifecycle.reconcile import refresh_run
        from app.runs.lifecycle.resume import Changes, Choices, resume_run

        run_id = core.full_id(self.run_id)
        order = take_order(core.services, run_id, self.asked_s)
        with core.services.resuming(run_id):
            core.services.runs.publish_starters()  # so that it can be stopped from here on
            # The stored state may be outdated, and a run that still trains must not be resumed.
            await refresh_run(core.services, run_id)
            choices = Choices(
                checkpoint=self.checkpoint,
                nodes=self.nodes,
                verify_steps=self.verify_steps,
                changes=Changes(learning_rate=self.learning_rate, parallel=self.parallel),
            )
            await resume_run(core.services, run_id, choices, as_progress(report), order=order)
        core.watch(run_id)
        return core.services.runs.full_snapshot(run_id)


@action("runs.certificate")
class AwaitCertificate(Action["Certificate | None"]):
    """Wait for the result of a verified resume; None: no step finished for half an hour.

    Raises:
        UserError: the run ended before.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> Certificate | None:
        from app.runs.lifecycle import waiting

        run = core.services.runs.get(self.run_id)
        return await waiting.wait_for_journal(
            core.services, run, lambda attempt: attempt.certificate, CERTIFICATE_S
        )


@action("runs.delete")
class EraseRun(Action["tuple[str, ...]"]):
    """Delete a run with its checkpoints; return the silent nodes, which delete theirs later.

    Raises:
        UserError: it is active.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> tuple[str, ...]:
        from app.runs.lifecycle.stop import delete_run

        return await delete_run(core.services, core.full_id(self.run_id))


@action("runs.all")
class ListRuns(Action["tuple[RunSnapshot, ...]"]):
    """Return every run as last known, newest first."""

    async def perform(self, core: CoreState, report: Report) -> tuple[RunSnapshot, ...]:
        return core.services.runs.snapshots()


@action("runs.refresh_all")
class RefreshRuns(Action["tuple[RunSnapshot, ...]"]):
    """Ask the nodes of every active run for its state, and return all runs.

    After a lost store, all nodes are asked for the runs that they remember.
    """

    async def perform(self, core: CoreState, report: Report) -> tuple[RunSnapshot, ...]:
        from app.runs.lifecycle.reconcile import reconcile_run, search_nodes

        if core.services.runs.store.must_search_nodes():
            silent = await search_nodes(core.services, core.fleet.names())
            # A silent node may remember more runs: search again next time.
            core.services.runs.store.set_search_nodes(bool(silent))
            if found := core.services.runs.found():
                nodes = show_list(sorted({run.node for run in found}))
                text = f"found runs on {nodes} that are not yours; see: rackless runs found"
                report(Progress(message=text))
        active = core.services.runs.store.in_states(ACTIVE_STATES)
        await asyncio.gather(*(reconcile_run(core.services, run) for run in active))
        return core.services.runs.snapshots()


@action("runs.refresh")
class RefreshRun(Action["RunSnapshot"]):
    """Ask the nodes of a run for its state, and return the run.

    Raises:
        UserError: there is no such run.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> RunSnapshot:
        from app.runs.lifecycle.reconcile import reconcile_run

        if core.services.runs.store.must_search_nodes():
            await RefreshRuns().perform(core, report)
        run_id = core.full_id(self.run_id)
        await reconcile_run(core.services, run_id)
        return core.services.runs.full_snapshot(run_id)


@action("runs.watch")
class WatchRun(Action["RunSnapshot"]):
    """Follow a run until its attempt ends, publishing its events; return the ended run.

    Raises:
        StoreLost: the database was lost meanwhile; the run keeps training.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> RunSnapshot:
        run_id = core.full_id(self.run_id)
        try:
            # Shielded: a cancelled caller must not end the watch that others share.
            await asyncio.shield(core.background.watch(run_id))
        except BaseException:
            if core.background.failure is not None:
                raise core.background.failure from None
            raise
        return core.services.runs.full_snapshot(run_id)


@action("runs.sync")
class SyncRun(Action[None]):
    """Fetch the newest bytes of a run's logs and journals from the nodes that answer.

    All attempts are synced: an earlier one may have run while no master was connected.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> None:
        from app.runs.lifecycle.reconcile import sync_attempts

        run = core.services.runs.get(self.run_id)
        await sync_attempts(core.services, run)
        core.services.runs.refresh(run.run_id)


@action("runs.steps")
class ReadSteps(Action["list[StepRecord]"]):
    """Return the steps of a run mirrored so far, in order, without those a resume replaced."""

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> list[StepRecord]:
        return _history(core, self.run_id).steps()


@action("runs.evaluations")
class ReadEvaluations(Action["list[EvaluationRecord]"]):
    """Return the evaluations of a run, in order, without those a resume replaced."""

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> list[EvaluationRecord]:
        return _history(core, self.run_id).evaluations()


@action("runs.events")
class ReadRunEvents(Action["list[RunEvent]"]):
    """Return the events of a run, oldest first."""

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> list[RunEvent]:
        return core.services.runs.events(core.full_id(self.run_id))


@action("runs.interruptions")
class ListInterruptions(Action["tuple[Interruption, ...]"]):
    """Return the interruptions of a run with their recoveries, oldest first."""

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> tuple[Interruption, ...]:
        from app.runs.interruptions import list_interruptions

        return list_interruptions(core.services, core.full_id(self.run_id))


@action("runs.data_preview")
class ReadDataPreview(Action["DataPreview | None"]):
    """Return the data preview that the run's first rank wrote; None: not written yet."""

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> DataPreview | None:
        return _history(core, self.run_id).data


@action("runs.forecast_comparison")
class CompareForecast(Action["ForecastComparison | None"]):
    """Return forecast and measurements of a run's newest attempt.

    None without a forecast, as for a run that only the nodes remember.
    """

    run_id: str

    async def perform(self, core: CoreState, report: Report) -> ForecastComparison | None:
        from app.forecasts.learning import compare_run

        return compare_run(core.services, core.services.runs.get(self.run_id))


@action("runs.logs")
class FindLogs(Action["tuple[LogFile, ...]"]):
    """Return the mirrored output of a run's ranks (None: all), in the order of attempts."""

    run_id: str
    rank: int | None = None
    attempt: int | None = None

    async def perform(self, core: CoreState, report: Report) -> tuple[LogFile, ...]:
        from app.runs.journals.logs import find_logs

        run_id = core.full_id(self.run_id)
        return find_logs(core.services.paths, run_id, self.rank, self.attempt)


@action("runs.checkpoints")
class FindCheckpoints(Action["tuple[CheckpointSnapshot, ...]"]):
    """List checkpoints (None: of all runs) over the nodes that answer, newest first."""

    run_id: str | None = None
    verify: bool = False
    """Hash every copy on its node, which reads the whole files."""

    async def perform(self, core: CoreState, report: Report) -> tuple[CheckpointSnapshot, ...]:
        from app.runs import checkpoints

        run_id = None if self.run_id is None else core.full_id(self.run_id)
        copies = await checkpoints.find_copies(core.services, run_id, core.fleet.names())
        if self.verify:
            copies = await checkpoints.verify_copies(core.services.pool, copies)
        return checkpoints.add_stalls(core.services, checkpoints.group_by_step(copies))


@action("runs.list_caveats")
class ListCaveats(Action["Caveats"]):
    """Return the parts of a model that a run leaves unadapted, and the known nodes whose layers
    are not compiled.

    Asks no node: parts are None if the model's sizes are not known here, and without nodes
    there are no limits.
    """

    spec: RunSpec

    async def perform(self, core: CoreState, report: Report) -> Caveats:
        from app.planning.candidate import Caveats

        try:
            known = PlanRun(spec=self.spec, ask_remote=False, check_data=False)
            plan = await known.perform(core, report)
            return Caveats(parts=plan.parts, limits=plan.limits)
        except UserError:  # no node is known, or not the model
            pass
        try:
            return Caveats(parts=await core.planner.list_parts(self.spec))
        except UserError as error:
            return Caveats(parts=None, problem=str(error))


def require_run_data(spec: RunSpec) -> None:
    """Check that a run's data can be read.

    Raises:
        UserError: a source is missing or cannot be used.
    """
    from app.library.data import require_data

    for source in spec.data.list_sources():
        require_data(source.path, "data.train", spec.data.for_source(source), source.split)
    if spec.data.eval_path is not None:
        require_data(spec.data.eval_path, "data.eval", spec.data)


def _history(core: CoreState, run_id: str) -> RunHistory:
    return core.services.runs.history(core.full_id(run_id))
