"""Actions on runs: plan, start, follow, stop and resume them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.data import DataPreview
from agents.contract.node import NodeFacts, Sample
from agents.contract.run import AttemptStatus, RankPlacement
from agents.contract.spec import Parallel, RunSpec
from app.errors import UserError
from app.events import (
    ACTIVE_STATES,
    Certificate,
    CheckpointSnapshot,
    EvaluationRecord,
    Event,
    RunEvent,
    RunSnapshot,
    SampleArrived,
    SaveResult,
    StepRecord,
    TraceResult,
)
from app.interruption import Interruption
from app.nodes.fleet import Fleet
from app.runs import checkpoints, foreign
from app.runs.interruptions import list_interruptions
from app.runs.journals.logs import LogFile, find_logs
from app.runs.lifecycle import launch, reconcile, stop
from app.runs.lifecycle.background_tasks import BackgroundTasks
from app.runs.preflight import choose_nodes
from app.runs.services import LaunchForecast, Services
from app.storage.runs import RunRecord
from app.text import show_list

if TYPE_CHECKING:
    from app.core.api import OnMessage
    from app.forecasts.planner import Planner
    from app.planning.accuracy.forecast_accuracy import ForecastComparison
    from app.planning.candidate import Caveats, Plan

CERTIFICATE_S = 1800.0
"""Longest wait for the certificate of a resumed run, loading included, in seconds."""


class CoreRuns:
    """`core.runs`."""

    def __init__(self, services: Services, fleet: Fleet, upkeep: BackgroundTasks) -> None:
        self._services = services
        self._repository = services.runs
        self._fleet = fleet
        self._background = upkeep
        # Planner, created by the first plan: importing it takes a tenth of a second.
        self._planner: Planner | None = None
        services.hooks.forecast = self._forecast
        services.hooks.learn = self._learn
        # Newest sample of each node: a plan reads from it how much of a GPU others hold.
        self._samples: dict[str, Sample] = {}

    async def plan(
        self,
        spec: RunSpec,
        cluster: Path | None = None,
        *,
        ask_remote: bool = True,
        check_data: bool = True,
    ) -> Plan:
        """Plan a run: its parallelism, memory per GPU and speed. Starts nothing.

        Args:
            spec: the run to plan.
            cluster: file that describes PCs, such as ones not bought yet; None: the nodes.
            ask_remote: ask nodes for facts, and nodes and the hub for the model's config, where
                they are not known here; False: answer at once, from what is known.
            check_data: refuse data that is missing or unusable; False: somebody still chooses it.

        Raises:
            UserError: the model cannot be trained or its sizes are not known, the data cannot be
                used, there are no nodes, or the file is not valid.
        """
        # Imported on use, here and below: commands that do not need it start sooner.
        from app.forecasts.planner import describe_nodes

        planner = self._find_planner()
        if check_data:
            await asyncio.to_thread(_require_data, spec)
        if cluster is not None:
            from app.library.cluster_file import read_cluster_file

            described = await asyncio.to_thread(read_cluster_file, cluster)
            choose_nodes(spec, [node.name for node in described.nodes])
            return await planner.plan(spec, described, ask_remote=ask_remote)
        names = choose_nodes(spec, self._fleet.names())
        known = {node.name: node for node in self._fleet.snapshots()}
        if ask_remote and any(known[name].facts is None for name in names):
            known = {node.name: node for node in await self._fleet.reach()}
        # Plan with the nodes that are known; the others are named in the plan as silent.
        facts = {name: fact for name in names if (fact := known[name].facts) is not None}
        if not facts:
            raise UserError(
                f"{show_list(list(names))} cannot be reached, so their GPUs are not known",
                "Turn one on, or describe PCs in a file: rackless plan RUN.yaml --cluster FILE",
            )
        return await planner.plan(
            spec,
            describe_nodes(self._services.planning, facts, self._samples),
            online=tuple(name for name in names if known[name].state == "online"),
            silent=tuple(name for name in names if name not in facts),
            ask_remote=ask_remote,
        )

    async def start(
        self,
        spec: RunSpec,
        announced: OnMessage | None = None,
        progress: OnMessage | None = None,
    ) -> RunSnapshot:
        """Start a run; `announced` is called with its id once nothing refuses it.

        If cancelled, it leaves nothing behind, or a failed run that can be resumed.

        Raises:
            UserError: it cannot be started. Once announced, the run stays as a failed one.
        """
        run_id = await launch.start_run(
            self._services,
            spec,
            announced or (lambda run_id: None),
            progress or (lambda line: None),
        )
        # Off in a command, which leaves after the start; the run does not need it.
        if self._background.is_on:
            self._background.watch(run_id)
        return self._repository.full_snapshot(run_id)

    async def stop(self, run_id: str, progress: OnMessage | None = None) -> RunSnapshot:
        """Stop a run after a checkpoint; a second call stops it at once. Returns once it has ended.

        `progress` is called with what the stop waits for, whenever that changes.

        Raises:
            UserError: it is not active, or none of its nodes can be reached.
        """
        run_id = self._repository.get(run_id).run_id
        # A person may have typed the first characters only; `get` returned the whole id.
        await stop.stop_run(self._services, run_id, progress or (lambda line: None))
        return self._repository.full_snapshot(run_id)

    async def stop_on(self, run_id: str, node: str) -> RunSnapshot | AttemptStatus:
        """Stop a run that may be another master's by what `node` trains of it.

        An active run of this master is stopped everywhere, as by `stop`.

        Raises:
            UserError: the node cannot be reached, or has nothing of that run to stop.
        """
        known = self._repository.store.get(run_id)
        if known is not None and known.state in ACTIVE_STATES:
            return await self.stop(run_id)
        return await foreign.stop_on_node(self._services, run_id, node)

    async def take_over(self, run_id: str) -> RunSnapshot:
        """Make this master the one that resumes a run which another one has launched.

        Raises:
            UserError: it is this master's already, or done, or too few of its nodes answer.
        """
        run_id = self._repository.get(run_id).run_id
        from app.runs.lifecycle.takeover import take_over_run

        await take_over_run(self._services, run_id)
        if self._background.is_on:
            self._background.watch(run_id)
        return self._repository.full_snapshot(run_id)

    async def save(self, run_id: str) -> SaveResult:
        """Make a run save a checkpoint after its current step and keep training.

        Raises:
            UserError: it is not running, or could not save.
        """
        from app.runs.lifecycle import control_requests  # here and below: lists do not need it

        return await control_requests.save_now(self._services, self._repository.get(run_id).run_id)

    async def trace(self, run_id: str, num_steps: int = 3) -> TraceResult:
        """Profile the next steps of every rank of a run, and fetch the traces.

        Raises:
            UserError: it is not running, or ended before.
        """
        run_id = self._repository.get(run_id).run_id
        from app.runs.lifecycle import control_requests

        return await control_requests.record_trace(self._services, run_id, num_steps)

    async def resume(
        self,
        run_id: str,
        checkpoint: int | None = None,
        nodes: tuple[str, ...] | None = None,
        verify_steps: int | None = None,
        progress: OnMessage | None = None,
        learning_rate: float | None = None,
        parallel: Parallel | None = None,
    ) -> RunSnapshot:
        """Resume from step `checkpoint` (None: the newest) on `nodes` (None: as before).

        With `verify_steps`, it starts so far back that as many logged steps are replayed and
        compared; `certificate` returns the result. `learning_rate` and `parallel` are those from
        now on; None: as before.

        Raises:
            UserError: the run is active or done, or cannot be launched.
        """
        run_id = self._repository.get(run_id).run_id
        from app.runs.lifecycle.resume import Changes, resume_run  # lists do not need it

        await reconcile.refresh_run(self._services, run_id)
        await resume_run(
            self._services,
            run_id,
            checkpoint,
            nodes,
            verify_steps,
            progress or (lambda line: None),
            changes=Changes(learning_rate=learning_rate, parallel=parallel),
        )
        if self._background.is_on:
            self._background.watch(run_id)
        return self._repository.full_snapshot(run_id)

    async def certificate(self, run_id: str) -> Certificate | None:
        """Wait for the result of a verified resume; None: no step finished for half an hour.

        Raises:
            UserError: the run ended before.
        """
        run = self._repository.get(run_id)
        from app.runs.lifecycle import waiting

        return await waiting.wait_for_journal(
            self._services, run, lambda attempt: attempt.certificate, CERTIFICATE_S
        )

    async def delete(self, run_id: str) -> tuple[str, ...]:
        """Delete a run with its checkpoints; return the nodes that will do so later.

        Raises:
            UserError: it is active.
        """
        return await stop.delete_run(self._services, self._repository.get(run_id).run_id)

    def all(self) -> tuple[RunSnapshot, ...]:
        """Return every run as last known, newest first."""
        return self._repository.snapshots()

    async def refresh_all(self) -> tuple[RunSnapshot, ...]:
        """Ask the nodes of every active run for its state, and return all runs.

        After a lost store, all nodes are asked for the runs that they remember.
        """
        if self._repository.store.must_search_nodes():
            silent = await reconcile.search_nodes(self._services, self._fleet.names())
            # A silent node may remember more runs: search again next time.
            self._repository.store.set_search_nodes(bool(silent))
        active = self._repository.store.in_states(ACTIVE_STATES)
        await asyncio.gather(*(reconcile.reconcile_run(self._services, run) for run in active))
        return self.all()

    async def refresh(self, run_id: str) -> RunSnapshot:
        """Ask the nodes of a run for its state, and return the run.

        Raises:
            UserError: there is no such run.
        """
        if self._repository.store.must_search_nodes():
            await self.refresh_all()
        run_id = self._repository.get(run_id).run_id
        await reconcile.reconcile_run(self._services, run_id)
        return self._repository.full_snapshot(run_id)

    async def watch(self, run_id: str) -> RunSnapshot:
        """Follow a run until its attempt ends, publishing its events; return the ended run."""
        run_id = self._repository.get(run_id).run_id
        # Shielded: a cancelled caller must not end the watch that others share.
        await asyncio.shield(self._background.watch(run_id))
        return self._repository.full_snapshot(run_id)

    async def sync(self, run_id: str) -> None:
        """Fetch the newest bytes of a run's logs and journals from the nodes that answer.

        Of all its attempts: an earlier one may have run while no master was there.
        """
        run = self._repository.get(run_id)
        await reconcile.sync_attempts(self._services, run)
        self._repository.refresh(run.run_id)

    def steps(self, run_id: str) -> list[StepRecord]:
        """Return the steps of a run mirrored so far, in order, without those a resume replaced."""
        return self._repository.history(self._repository.get(run_id).run_id).steps()

    def evaluations(self, run_id: str) -> list[EvaluationRecord]:
        """Return the evaluations of a run, in order, without those a resume replaced."""
        return self._repository.history(self._repository.get(run_id).run_id).evaluations()

    def events(self, run_id: str) -> list[RunEvent]:
        """Return the events of a run, oldest first."""
        return self._repository.events(self._repository.get(run_id).run_id)

    def interruptions(self, run_id: str) -> tuple[Interruption, ...]:
        """Return the losses of a run and how it went on, oldest first."""
        return list_interruptions(self._services, self._repository.get(run_id).run_id)

    def data_preview(self, run_id: str) -> DataPreview | None:
        """Return the data preview that the run's first rank wrote; None: not written yet."""
        return self._repository.history(self._repository.get(run_id).run_id).data

    def forecast_comparison(self, run_id: str) -> ForecastComparison | None:
        """Return the forecast of a run's newest attempt beside its measurements.

        None: there is no forecast, as for a run that only the nodes remember.
        """
        from app.forecasts.learning import compare_run

        return compare_run(self._services, self._repository.get(run_id))

    def logs(
        self, run_id: str, rank: int | None = None, attempt: int | None = None
    ) -> tuple[LogFile, ...]:
        """Return the mirrored output of a run's ranks (None: all), in the order of attempts."""
        run_id = self._repository.get(run_id).run_id
        return find_logs(self._services.paths, run_id, rank, attempt)

    async def checkpoints(
        self, run_id: str | None = None, verify: bool = False
    ) -> tuple[CheckpointSnapshot, ...]:
        """List checkpoints (None: of all runs) over the nodes that answer, newest first.

        Args:
            verify: hash every copy on its node, which reads the whole files.
        """
        if run_id is not None:
            run_id = self._repository.get(run_id).run_id
        copies = await checkpoints.find_copies(self._services, run_id, self._fleet.names())
        if verify:
            copies = await checkpoints.verify_copies(self._services.pool, copies)
        return checkpoints.add_stalls(self._services, checkpoints.group_by_step(copies))

    def take_sample(self, event: Event) -> None:
        # Replayed samples are up to ten minutes old; what others hold on a GPU has changed since.
        if isinstance(event, SampleArrived) and not event.replayed:
            self._samples[event.node] = event.sample

    async def list_caveats(self, spec: RunSpec) -> Caveats:
        """Return what a run leaves as it is, and on which known nodes its layers are not compiled.

        Asks nobody: parts are None if the model's sizes are not known here, and without nodes
        there are no limits.
        """
        from app.planning.candidate import Caveats

        try:
            plan = await self.plan(spec, ask_remote=False, check_data=False)
            return Caveats(parts=plan.parts, limits=plan.limits)
        except UserError:  # no node is known, or not the model
            pass
        try:
            return Caveats(parts=await self._find_planner().list_parts(spec))
        except UserError as error:
            return Caveats(parts=None, problem=str(error))

    def _find_planner(self) -> Planner:
        from app.forecasts.planner import Planner

        self._planner = self._planner or Planner(self._services)
        return self._planner

    async def _forecast(
        self, spec: RunSpec, facts: Mapping[str, NodeFacts], ranks: Sequence[RankPlacement]
    ) -> LaunchForecast:
        return await self._find_planner().forecast(spec, facts, ranks)

    def _learn(self, run: RunRecord) -> None:
        from app.forecasts.learning import learn_from_run

        learn_from_run(self._services, run)


def _require_data(spec: RunSpec) -> None:
    from app.library.data import require_data

    for name, key in ((spec.data.train, "data.train"), (spec.data.eval, "data.eval")):
        if name is not None:
            require_data(name, key, spec.data)
