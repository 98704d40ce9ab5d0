"""A stop wins over every launch that was asked for before it, also over a suspended one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.run import AttemptStatus
from agents.contract.spec import RunSpec
from app.errors import RunStopped, UserError
from app.events import ACTIVE_STATES, EventHub
from app.runs.export_claims import claim_deletion, claim_export
from app.runs.lifecycle import launch_order, resume
from app.runs.lifecycle import stop as stop_module
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.launch_order import (
    record_stop,
    require_not_stopped,
    take_order,
    unless_stopped,
)
from app.runs.lifecycle.losses import note_loss
from app.runs.lifecycle.reconcile import reconcile_run
from app.runs.lifecycle.stop import delete_run, stop_run
from app.runs.lifecycle.watch import RunWatch
from app.runs.services import Services
from app.storage.recoveries import Loss
from tests.fakes.cluster import FakeCluster, FakeNode, make_services
from tests.fakes.resuming import resume_run


@pytest.fixture
def other(services: Services, cluster: FakeCluster) -> Services:
    """Another process of the same home."""
    return make_services(services.paths.home, cluster)


@pytest.fixture
def suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A starter that checks for a stop at no interval, as one that Ctrl-Z has suspended."""
    monkeypatch.setattr(launch_order, "POLL_S", 3600.0)
    monkeypatch.setattr(stop_module, "STARTER_S", 0.2)


def active(cluster: FakeCluster) -> list[AttemptStatus]:
    found = [status for node in cluster.nodes.values() for status in node.attempts.values()]
    return [status for status in found if status.state in ("starting", "running", "stopping")]


class Gate:
    """A step of a launch that waits until it is opened."""

    def __init__(self) -> None:
        self.is_reached, self._opened = asyncio.Event(), asyncio.Event()

    async def wait(self, *_: object) -> None:
        self.is_reached.set()
        await self._opened.wait()

    def open(self) -> None:
        self._opened.set()


@contextlib.asynccontextmanager
async def sending(services: Services, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """Hold what sends files at its gate."""
    gate, push = Gate(), services.pool.push

    async def held(*args: object) -> str:
        await gate.wait()
        return await push(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(services.pool, "push", held)
        yield gate


async def test_a_start_that_sends_files_ends_and_its_run_can_be_resumed(
    services: Services,
    other: Services,
    cluster: FakeCluster,
    spec: RunSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sending(services, monkeypatch) as gate:
        starter = asyncio.create_task(start_run(services, spec))
        await gate.is_reached.wait()
        (run,) = other.runs.store.all()
        await stop_run(other, run.run_id)
        with pytest.raises(RunStopped, match=r"was stopped by .* while it sent files") as error:
            await starter
    assert error.value.exit_code == 1
    now = other.runs.get(run.run_id)
    assert (now.state, now.stop_asked) == ("stopped", False)
    assert "while it sent files" in now.message
    assert not any(node.intents for node in cluster.nodes.values())
    assert other.runs.find_starter(run.run_id) is None, "no claim is left"
    await resume_run(services, run.run_id)
    assert services.runs.get(run.run_id).state == "running"


@pytest.mark.usefixtures("suspended")
async def test_a_suspended_start_that_continues_after_the_stop_starts_nothing(
    services: Services,
    other: Services,
    cluster: FakeCluster,
    spec: RunSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    async with sending(services, monkeypatch) as gate:
        starter = asyncio.create_task(start_run(services, spec))
        await gate.is_reached.wait()
        (run,) = other.runs.store.all()
        await stop_run(other, run.run_id, said.append)
        assert other.runs.get(run.run_id).state == "stopped"
        assert "does not answer; it will start nothing" in said[-1]
        assert f"process {os.getpid()}" in said[-1]
        gate.open()
        with pytest.raises(RunStopped):
            await starter
    assert not any(node.intents for node in cluster.nodes.values())
    assert other.runs.get(run.run_id).state == "stopped"


@pytest.mark.usefixtures("suspended")
async def test_a_request_to_launch_that_was_on_its_way_is_refused_by_the_node(
    services: Services, other: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    cluster["beta"].launch_gate = asyncio.Event()
    starter = asyncio.create_task(start_run(services, spec))
    await cluster["beta"].asked_to_launch.wait()
    (run,) = other.runs.store.all()
    await stop_run(other, run.run_id)
    assert (other.runs.get(run.run_id).state, active(cluster)) == ("stopped", [])
    cluster["beta"].launch_gate.set()
    with pytest.raises(RunStopped, match="while it launched its parts"):
        await starter
    assert active(cluster) == []
    assert not cluster["beta"].intents
    assert other.runs.get(run.run_id).state == "stopped"


async def test_a_stop_right_after_a_resume_ends_it(
    services: Services,
    other: Services,
    cluster: FakeCluster,
    interrupted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answered that there was nothing to stop, and the run trained."""
    await stop_run(services, interrupted)
    gate, refreshed = Gate(), resume.resume_run

    async def slow() -> None:
        order = take_order(services, interrupted)
        with services.resuming(interrupted):
            await gate.wait()  # the nodes are asked
            await refreshed(services, interrupted, resume.Choices(), order=order)

    resuming = asyncio.create_task(slow())
    await gate.is_reached.wait()
    assert other.runs.snapshot(interrupted).is_resuming, "so that every window offers Stop"
    monkeypatch.setattr(stop_module, "STARTER_S", 0.2)
    await stop_run(other, interrupted)
    gate.open()
    with pytest.raises(RunStopped):
        await resuming
    assert (other.runs.get(interrupted).state, active(cluster)) == ("stopped", [])
    assert not other.runs.snapshot(interrupted).is_resuming
    cluster["gamma"].reachable = True
    await resume_run(services, interrupted)
    run = services.runs.get(interrupted)
    assert run.state == "running", "an old stop ends no later resume"
    assert run.attempt == 3, "the stop has used up the number of the resume that it ended"


def test_a_resume_whose_process_started_before_the_stop_launches_nothing(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    asked_s = time.time()
    asyncio.run(stop_run(services, interrupted))
    order = take_order(services, interrupted, asked_s)
    with pytest.raises(RunStopped):
        asyncio.run(resume.resume_run(services, interrupted, resume.Choices(), order=order))
    assert len(cluster["alpha"].intents) == 1
    # A clock that was set back since makes the stop lie in the future, which ends nothing.
    services.runs.change(
        interrupted,
        lambda run: replace(run, last_stop=replace(run.last_stop, time_s=time.time() + 3600)),
    )
    order = take_order(services, interrupted, asked_s)
    # Nor does it once the clock, set right again, has passed the time of that stop.
    services.runs.change(
        interrupted, lambda run: replace(run, last_stop=replace(run.last_stop, time_s=time.time()))
    )
    require_not_stopped(services, order)
    asyncio.run(resume.resume_run(services, interrupted, resume.Choices(), order=order))
    assert len(cluster["alpha"].intents) == 2


async def test_a_recovery_in_progress_is_ended_by_a_stop_of_another_process(
    services: Services,
    other: Services,
    cluster: FakeCluster,
    interrupted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sending(services, monkeypatch) as gate:
        recovery = asyncio.create_task(
            resume_run(services, interrupted, automatic=resume.Automatic())
        )
        await gate.is_reached.wait()
        await stop_run(other, interrupted)
        with pytest.raises(RunStopped):
            await recovery
    assert (other.runs.get(interrupted).state, active(cluster)) == ("stopped", [])
    assert not other.recoveries.is_pending(interrupted)


def test_an_end_that_was_judged_before_the_stop_is_not_recovered(
    services: Services, other: Services, run_id: str
) -> None:
    judged = services.runs.get(run_id)
    asyncio.run(stop_run(other, run_id))
    assert not note_loss(services, judged, "lost", 5, "node gamma was lost")
    assert not services.recoveries.is_pending(run_id)
    loss = Loss(run_id=run_id, attempt=1, cause="rejoin", step=5, ended_s=1.0, state="pending")
    services.recoveries.add(loss, judged.last_stop.number)
    assert not services.recoveries.is_pending(run_id), "nor does a rejoin continue it"


def test_a_stop_of_an_active_run_lets_it_save_and_no_number_is_skipped(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    asyncio.run(stop_run(services, run_id))
    grace_s = services.settings.number("stop_grace_s")
    assert [node.stops for node in cluster.nodes.values()] == [[(run_id, 1, grace_s)]] * 3
    asyncio.run(resume_run(services, run_id))
    assert services.runs.get(run_id).attempt == 2


def test_an_attempt_that_the_nodes_started_is_stopped_as_well(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    for name in ("alpha", "beta"):
        status = replace(cluster[name].attempts[run_id, 1], attempt=2)
        cluster[name].attempts[run_id, 2] = status
        cluster[name].set_state(run_id, 1, "failed")
    cluster["gamma"].set_state(run_id, 1, "lost")
    asyncio.run(stop_run(services, run_id))
    assert active(cluster) == []
    assert not services.recoveries.is_pending(run_id)


def test_a_node_whose_files_were_deleted_does_not_make_a_stop_fail(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    del cluster["gamma"].attempts[run_id, 1]
    asyncio.run(stop_run(services, run_id))
    assert (services.runs.get(run_id).state, active(cluster)) == ("stopped", [])


async def test_a_stop_does_not_wait_for_a_node_that_is_off(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(stop_module, "HALT_S", 0.2)
    for name in ("run_halt", "attempt_status", "stop"):
        monkeypatch.setattr(cluster["gamma"], name, hang)
    async with asyncio.timeout(60):
        await stop_run(services, run_id)
    run = services.runs.get(run_id)
    assert run.state == "stopped"
    assert "gamma could not be reached" in run.message


async def test_a_watch_that_sees_a_stopped_launch_does_not_resume_it(
    services: Services, other: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    """Two keepers: one launches, the other judges what the stop leaves."""
    cluster["beta"].launch_gate = asyncio.Event()
    starter = asyncio.create_task(start_run(services, spec))
    await cluster["beta"].asked_to_launch.wait()
    (run,) = other.runs.store.all()
    watch = asyncio.create_task(RunWatch(other, run, EventHub()).run_until_end())
    await stop_run(other, run.run_id)
    with pytest.raises(RunStopped):
        await starter
    await watch
    await reconcile_run(other, run.run_id)
    assert other.runs.get(run.run_id).state == "stopped"
    assert other.recoveries.pending() == ()


# ---------------------------------------------------------------- exports and deletions


async def test_a_stop_ends_an_export_of_the_run(services: Services, run_id: str) -> None:
    began = asyncio.Event()

    async def export() -> None:
        with claim_export(services, run_id):
            async with unless_stopped(services, take_order(services, run_id)):
                began.set()
                await asyncio.Event().wait()

    work = asyncio.create_task(export())
    await began.wait()
    await stop_run(services, run_id)
    with pytest.raises(RunStopped):
        await work


ROOT = Path(__file__).parents[4]
EXPORT = """
import asyncio, sys
from pathlib import Path
from app.runs.export_claims import claim_export
from app.errors import RunStopped
from app.runs.lifecycle.launch_order import take_order, unless_stopped
from tests.fakes.cluster import FakeCluster, make_services

async def export(services, run_id):
    with claim_export(services, run_id):
        async with unless_stopped(services, take_order(services, run_id)):
            print("exporting", flush=True)
            await asyncio.Event().wait()

try:
    asyncio.run(export(make_services(Path(sys.argv[1]), FakeCluster("alpha")), sys.argv[2]))
except RunStopped:
    print("stopped", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process is suspended")
def test_a_stop_ends_an_export_that_was_suspended(services: Services, run_id: str) -> None:
    """Its node went on with the job for as long as the process was suspended."""
    argv = [sys.executable, "-c", EXPORT, str(services.paths.home), run_id]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as exporter:
        try:
            assert exporter.stdout is not None
            assert exporter.stdout.readline() == "exporting\n"
            exporter.send_signal(signal.SIGSTOP)
            os.waitpid(exporter.pid, os.WUNTRACED)
            asyncio.run(stop_run(services, run_id))
            assert exporter.stdout.readline() == "stopped\n"
        finally:
            exporter.kill()


def test_an_export_whose_process_does_not_answer_is_named(
    services: Services, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_module, "EXPORT_S", 0.0)
    said: list[str] = []
    with claim_export(services, run_id):
        asyncio.run(stop_run(services, run_id, said.append))
    assert f"process {os.getpid()}" in said[-1]
    assert "was exporting the run and does not answer" in said[-1]
    assert services.runs.get(run_id).state == "stopped"


def test_a_run_is_not_deleted_from_the_first_moment_of_its_export_on(
    services: Services, other: Services, run_id: str
) -> None:
    asyncio.run(stop_run(services, run_id))
    with claim_export(services, run_id):
        with pytest.raises(UserError, match=r"an export of run .* is under way, by process"):
            asyncio.run(delete_run(other, run_id))
        assert other.runs.get(run_id).state == "stopped"
    with (
        claim_deletion(other, run_id),
        pytest.raises(UserError, match="is being deleted by process"),
        claim_export(services, run_id),
    ):
        pass
    asyncio.run(delete_run(other, run_id))
    with pytest.raises(UserError, match="there is no run"), claim_export(services, run_id):
        pass


def test_a_store_that_is_busy_for_a_moment_is_no_stop(
    services: Services, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = take_order(services, run_id)

    async def work() -> str:
        async with unless_stopped(services, order):
            with monkeypatch.context() as patch:

                def busy(*_: object) -> None:
                    raise UserError("the database is locked")

                patch.setattr(type(services.runs.store), "get", busy)
                await asyncio.sleep(0.05)
            return "done"

    assert asyncio.run(work()) == "done"
    record_stop(services, run_id)
    with pytest.raises(RunStopped):
        asyncio.run(work())


# ---------------------------------------------------------------- at any instant


def press_at(
    cluster: FakeCluster, number: int, press: Callable[[], Coroutine[None, None, None]]
) -> list[asyncio.Task[None]]:
    """Press Stop when the nodes get their request of this number; return its task then."""
    pressed: list[asyncio.Task[None]] = []
    asked = 0

    def count(answer: Callable[[str], None], kind: str) -> None:
        nonlocal asked
        asked += 1
        if asked == number and not pressed:
            pressed.append(asyncio.create_task(press()))
        answer(kind)

    for node in cluster.nodes.values():
        node._answer = functools.partial(count, FakeNode._answer.__get__(node))  # type: ignore[method-assign]
    return pressed


@pytest.mark.parametrize("is_suspended", [False, True])
@pytest.mark.parametrize("how", ["start", "resume", "recovery"])
def test_a_stop_at_any_request_of_a_launch_leaves_nothing(
    services: Services,
    other: Services,
    cluster: FakeCluster,
    spec: RunSpec,
    how: str,
    is_suspended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten draws; a starter that is suspended sees the stop at its own checks alone."""
    monkeypatch.setattr(launch_order, "POLL_S", 3600.0 if is_suspended else 0.001)
    monkeypatch.setattr(stop_module, "STARTER_S", 0.02)
    monkeypatch.setattr(stop_module, "POLL_INTERVAL_S", 0.001)

    async def prepare() -> str:
        run_id = await start_run(services, spec)
        for node in cluster.nodes.values():
            node.add_checkpoint(run_id, 5)
        if how == "recovery":
            cluster["gamma"].set_state(run_id, 1, "lost")
            await reconcile_run(services, run_id)
        else:
            await stop_run(services, run_id)
        return run_id

    async def attempt(run_id: str) -> str:
        if how == "start":
            return await start_run(services, spec)
        automatic = resume.Automatic() if how == "recovery" else None
        await resume_run(services, run_id, automatic=automatic)
        return run_id

    async def case(number: int) -> None:
        run_id = "" if how == "start" else await prepare()

        async def press() -> None:
            known = [run_id] if run_id else [run.run_id for run in other.runs.store.all()][:1]
            for one in known:
                # Before it has an id, or once it is over, there is nothing to stop.
                with contextlib.suppress(UserError):
                    await stop_run(other, one)

        pressed = press_at(cluster, number, press)
        launched = ""
        with contextlib.suppress(UserError):
            launched = await attempt(run_id)
        if not pressed:
            await press()
        for task in pressed:
            await task
        if launched and active(cluster):
            assert how == "start", "only a start has a time before it can be stopped"
            (run,) = [run for run in other.runs.store.all() if run.run_id == launched]
            assert run.last_stop.number == 0
            await stop_run(other, launched)
        assert active(cluster) == [], number
        for run in other.runs.store.all():
            assert run.state not in ACTIVE_STATES
            assert not other.recoveries.is_pending(run.run_id)
            assert other.runs.find_starter(run.run_id) is None
        # Nothing of this case may make the next one busy.
        for node in cluster.nodes.values():
            node.attempts.clear()

    draw = random.Random(f"{how} {is_suspended}")
    for _ in range(10):
        asyncio.run(case(draw.randint(1, 60)))
