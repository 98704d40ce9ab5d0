"""Nodes that come back join their run at a checkpoint, and cannot do it harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import pytest

from agents.contract.requests.attempts import StopAttempt
from agents.contract.spec import RunSpec
from app.forecasts.learning import measure_run
from app.presentation.interruption_text import summarize_story, tell_story
from app.runs import rejoin as limits
from app.runs.interruptions import list_interruptions
from app.runs.lifecycle import recovery, rejoin
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.resume_verification import read_replay
from app.runs.lifecycle.stop import stop_run
from app.runs.services import LaunchForecast, Services
from tests.app.runs.lifecycle.test_recovery import (
    attempt_of,
    finish,
    texts,
    until,
    watched,
    write_step,
)
from tests.fakes.cluster import FakeCluster

Scenario = Callable[[asyncio.Task[None], str], Awaitable[None]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("agents.contract.election.BACK_OFF_S", (0.0,))
    monkeypatch.setattr(rejoin, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(rejoin, "STEADY_S", 0.05)
    monkeypatch.setattr("app.runs.lifecycle.watch.JUDGE_INTERVAL_S", 0.02)
    monkeypatch.setattr("app.runs.lifecycle.watch.RETRY_S", 0.02)


async def lose_gamma(services: Services, cluster: FakeCluster, run_id: str) -> None:
    """Lose a node at step 13 and train step 11 again on the others."""
    await lose_gamma_while_loading(services, cluster, run_id)
    write_step(cluster, "alpha", run_id, 2, 11)
    await until(lambda: any("training again" in text for text in texts(services, run_id)))


async def lose_gamma_while_loading(services: Services, cluster: FakeCluster, run_id: str) -> None:
    """Lose a node at step 13, and launch the run on the others."""
    cluster["alpha"].add_checkpoint(run_id, 10)
    for step in (11, 12, 13):
        write_step(cluster, "alpha", run_id, 1, step)
    await until(lambda: 13 in services.runs.history(run_id).attempt(1).steps)
    cluster["gamma"].set_state(run_id, 1, "lost")
    cluster["gamma"].reachable = False
    cluster["beta"].set_state(run_id, 1, "failed", peer_lost=True, lost_nodes=("gamma",))
    await until(lambda: attempt_of(services, run_id) == (2, "running"))


def save_at_stop(cluster: FakeCluster, run_id: str, attempt: int, step: int) -> None:
    """Let the nodes save a checkpoint of `step` when they are stopped."""
    stop = cluster["alpha"].stop

    async def save_and_stop(request: StopAttempt, progress: object) -> object:
        if (request.run_id, request.attempt) == (run_id, attempt) and not request.at_loss:
            write_step(cluster, "alpha", run_id, attempt, step)
            cluster["alpha"].add_checkpoint(run_id, step, attempt)
        return await stop(request)

    cluster["alpha"].stop = save_and_stop  # type: ignore[method-assign, assignment]


def test_a_node_that_comes_back_joins_at_a_checkpoint_and_no_step_is_repeated(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    planned: list[tuple[tuple[str, ...], bool]] = []

    async def forecast(spec: RunSpec, facts: Mapping[str, object], ranks: object) -> LaunchForecast:
        planned.append((tuple(facts), cluster["alpha"].attempts[run_id, 2].state == "running"))
        return LaunchForecast()

    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        await lose_gamma(services, cluster, run_id)
        assert services.runs.get(run_id).nodes == ("alpha", "beta")
        save_at_stop(cluster, run_id, 2, 12)
        services.hooks.forecast = forecast
        cluster["gamma"].reachable = True
        await until(lambda: attempt_of(services, run_id) == (3, "running"))
        write_step(cluster, "alpha", run_id, 3, 13)
        await until(lambda: any("return of gamma cost" in one for one in texts(services, run_id)))
        finish(cluster, run_id, 3)
        await task

    watched(services, scenario, run_id)
    run = services.runs.get(run_id)
    assert (run.state, run.nodes) == ("done", ("alpha", "beta", "gamma"))
    assert cluster["gamma"].intents[-1].resume_step == 12
    # What it lacked was sent before the run stopped, by a plan for all of its nodes: of a divided
    # model each needs other files then.
    assert cluster["gamma"].pushed
    assert planned[0] == (("alpha", "beta", "gamma"), True)
    _, back = list_interruptions(services, run_id)
    assert (back.joined, back.step, back.repeated_steps) == (("gamma",), 12, 0)
    assert [moment.title for moment in tell_story(back)] == [
        "Node back", "Saved and stopped", "Resumed", "Rejoined",
    ]  # fmt: skip
    assert "gamma rejoined" in summarize_story(list_interruptions(services, run_id))
    # The steps that the recovery repeated are compared with what was logged.
    replay = cluster["alpha"].intents[1].replay
    assert replay is not None
    assert [one.step for one in replay.steps] == [11, 12, 13]


def test_a_run_that_another_process_is_resuming_after_a_loss_is_not_stopped(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume, is_noted = recovery.resume_run, asyncio.Event()

    async def resume_slowly(*args: object, **options: object) -> None:
        await resume(*args, **options)  # type: ignore[arg-type]
        await is_noted.wait()

    monkeypatch.setattr(recovery, "resume_run", resume_slowly)

    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        await lose_gamma_while_loading(services, cluster, run_id)
        assert services.recoveries.is_pending(run_id), "launched, and not yet noted as resumed"
        # The other process, which watches the new attempt already.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(rejoin.rejoin_nodes(services, run_id, 2), 0.3)
        assert attempt_of(services, run_id) == (2, "running")
        assert not [stop for stop in cluster["alpha"].stops if stop[1] == 2]
        is_noted.set()
        finish(cluster, run_id, 2)
        await task

    watched(services, scenario, run_id)
    assert services.runs.get(run_id).state == "done"


def test_a_node_that_comes_back_while_the_others_load_waits_for_their_first_step(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        await lose_gamma_while_loading(services, cluster, run_id)
        save_at_stop(cluster, run_id, 2, 12)
        cluster["gamma"].reachable = True
        await asyncio.sleep(10 * rejoin.STEADY_S)
        assert attempt_of(services, run_id) == (2, "running"), "nothing is loaded twice"
        write_step(cluster, "alpha", run_id, 2, 11)
        await until(lambda: attempt_of(services, run_id) == (3, "running"))
        finish(cluster, run_id, 3)
        await task

    watched(services, scenario, run_id)
    assert services.runs.get(run_id).nodes == ("alpha", "beta", "gamma")


def test_a_node_that_the_others_went_on_without_joins_as_any_other(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        cluster["alpha"].add_checkpoint(run_id, 10)
        write_step(cluster, "alpha", run_id, 1, 13)
        left = {"generation": 1, "members": ("alpha", "beta"), "may_regroup": True}
        for node in ("alpha", "beta"):
            cluster[node].set_state(run_id, 1, "running", **left)
        cluster["gamma"].set_state(run_id, 1, "lost")
        end = {"kind": "rank_exited", "rank": 2, "exit_code": -9, "time_s": 113.0,
               "how": "was ended by SIGKILL in phase training"}  # fmt: skip
        cluster["gamma"].write(run_id, 1, "supervisor.jsonl", json.dumps(end).encode() + b"\n")
        await until(lambda: services.runs.history(run_id).attempt(1).kills)
        line = {"kind": "regrouped", "time_s": 115.0, "step": 13, "generation": 1, "seconds": 1.5,
                "nodes": ["alpha", "beta"], "lost_nodes": ["gamma"], "lost_ranks": [2]}  # fmt: skip
        for node, rank in (("alpha", 0), ("beta", 1)):
            text = json.dumps({**line, "seconds": 1.5 - rank}) + "\n"
            cluster[node].write(run_id, 1, f"rank-{rank}.jsonl", text.encode())
        await until(lambda: services.runs.history(run_id).attempt(1).members)
        write_step(cluster, "alpha", run_id, 1, 14)
        save_at_stop(cluster, run_id, 1, 15)
        await until(lambda: attempt_of(services, run_id) == (2, "running"))
        write_step(cluster, "alpha", run_id, 2, 16)
        await until(lambda: any("return of gamma cost" in one for one in texts(services, run_id)))
        finish(cluster, run_id, 2)
        await task

    watched(services, scenario, run_id)
    run = services.runs.get(run_id)
    assert (run.state, run.nodes) == ("done", ("alpha", "beta", "gamma"))
    loss, back = list_interruptions(services, run_id)
    assert (loss.state, loss.without) == ("recovered", ("gamma",))
    assert loss.reason == "rank 2 on node gamma was ended by SIGKILL in phase training"
    assert (loss.noticed_s, loss.repeated_steps) == (113.5, 0)
    assert [moment.title for moment in tell_story(loss)] == [
        "Last step", "Loss noticed", "Regrouped", "Training again",
    ]  # fmt: skip
    assert (back.joined, back.step, back.repeated_steps) == (("gamma",), 15, 0)
    (told,) = [text for text in texts(services, run_id) if "in their processes" in text]
    assert told.startswith(
        f"{loss.reason}; alpha and beta continued in their processes, back after"
    )
    # Steps that fewer ranks have done cannot be repeated to the bit, and teach no forecast.
    assert read_replay(services, run_id, 13, 1).devices == ()
    assert measure_run(services, replace(run, attempt=1)) is None


@pytest.mark.parametrize("key", ["recovery", "rejoin"])
def test_a_run_that_says_no_goes_on_without_it(
    services: Services, cluster: FakeCluster, spec: RunSpec, key: str
) -> None:
    run_id = asyncio.run(start_run(services, replace(spec, **{key: "off"})))  # type: ignore[arg-type]
    run = replace(services.runs.get(run_id), nodes=("alpha", "beta"))
    services.runs.change(run_id, lambda old: run)
    assert limits.find_absent(run.spec, run.nodes, cluster.names()) == ()


def test_a_node_that_fails_as_it_joins_is_left_out_again(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        await lose_gamma(services, cluster, run_id)
        save_at_stop(cluster, run_id, 2, 12)
        cluster["gamma"].reachable = True
        await until(lambda: attempt_of(services, run_id) == (3, "running"))
        cluster["gamma"].set_state(run_id, 3, "failed", "No kernel fits.", cause="error")
        await until(lambda: attempt_of(services, run_id) == (4, "running"))
        write_step(cluster, "alpha", run_id, 4, 13)
        await asyncio.sleep(0.2)  # a back-off of minutes: it does not join again at once
        finish(cluster, run_id, 4)
        await task

    watched(services, scenario, run_id)
    run = services.runs.get(run_id)
    assert (run.state, run.attempt, run.nodes) == ("done", 4, ("alpha", "beta"))


def test_a_person_stops_a_run_that_stops_for_a_node(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        await lose_gamma(services, cluster, run_id)
        cluster["alpha"].stop_delay_s = 0.2
        cluster["gamma"].reachable = True
        await until(lambda: services.runs.get(run_id).state == "stopping")
        await stop_run(services, run_id)
        await task

    watched(services, scenario, run_id)
    assert attempt_of(services, run_id) == (2, "stopped")
    assert not services.runs.full_snapshot(run_id).is_recovering
    assert list_interruptions(services, run_id)[-1].state == "cancelled"


def test_joining_pays_off_or_is_wanted_and_waits_longer_each_time(spec: RunSpec) -> None:
    assert limits.is_worthwhile(spec, 100.0, 20.0)
    assert not limits.is_worthwhile(spec, 15.0, 20.0)
    assert limits.is_worthwhile(spec, None, 20.0)
    assert limits.is_worthwhile(replace(spec, rejoin="always"), 15.0, 20.0)
    now_s = 1_000_000.0

    def pause_s(*ages_s: float) -> float:
        losses = [
            limits.Loss(run_id="r", attempt=n, cause=limits.REJOIN, step=1, ended_s=now_s - age_s,
                        state="recovered")
            for n, age_s in enumerate(ages_s)
        ]  # fmt: skip
        return limits.find_end_of_pause(losses, now_s) - now_s

    assert [pause_s(), pause_s(60), pause_s(600, 60), pause_s(9000, 600, 60)] == [0, 240, 840, 3540]
    assert pause_s(5 * 3600, -60) == 0


def test_nodes_that_a_run_may_use_and_does_not_are_found(spec: RunSpec) -> None:
    known = ("alpha", "beta", "gamma")
    assert limits.find_absent(spec, ("beta",), known) == ("alpha", "gamma")
    named = replace(spec, nodes=("gamma", "beta"))
    assert limits.find_absent(named, ("beta",), known) == ("gamma",)
    assert limits.find_absent(replace(spec, parallel="single"), ("beta",), known) == ()
