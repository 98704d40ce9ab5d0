"""Runs that lose ranks and nodes go on without a person, and a person's stop wins."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.requests.attempts import Attempts, ListAttempts
from agents.contract.requests.runs import Fence
from agents.contract.spec import RunSpec
from app.errors import UserError
from app.presentation.interruption_text import summarize_story, tell_story
from app.runs import preflight
from app.runs import recovery as limits
from app.runs.interruptions import list_interruptions
from app.runs.lifecycle import recovery
from app.runs.lifecycle.background_tasks import BackgroundTasks
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.reconcile import reconcile_run
from app.runs.lifecycle.recovery import recover_run
from app.runs.lifecycle.resume import Automatic
from app.runs.lifecycle.stop import stop_run
from app.runs.services import Services
from tests.fakes.adopting import adopt
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.resuming import resume_run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("app.runs.lifecycle.watch.JUDGE_INTERVAL_S", 0.02)
    monkeypatch.setattr("app.runs.lifecycle.watch.RETRY_S", 0.02)
    monkeypatch.setattr("agents.contract.election.BACK_OFF_S", (0.0,))
    monkeypatch.setattr(limits, "RETRY_S", (0.02,))


def texts(services: Services, run_id: str) -> list[str]:
    return [event.text for event in services.runs.events(run_id)]


def write_step(cluster: FakeCluster, node: str, run_id: str, attempt: int, step: int) -> None:
    line = {"kind": "step", "step": step, "loss": 1.0, "time_s": 100.0 * attempt + step,
            "loss_hex": (1.0).hex()}  # fmt: skip
    cluster[node].write(run_id, attempt, "rank-0.jsonl", json.dumps(line).encode() + b"\n")


def write_line(cluster: FakeCluster, node: str, run_id: str, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    cluster[node].write(run_id, 1, "rank-1.jsonl", text.encode())


def watched(services: Services, scenario: Callable[[asyncio.Task[None], str], Awaitable[Any]],
            run_id: str) -> None:  # fmt: skip
    """Run a scenario while this master watches the run, as a command with `--watch` does."""

    async def run() -> None:
        tasks = BackgroundTasks(services, None, None, None, services.runs._events)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(scenario(tasks.watch(run_id), run_id), 20)
        finally:
            await tasks.end()

    asyncio.run(run())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing signals what a fake node was asked
        await asyncio.sleep(0.01)


def attempt_of(services: Services, run_id: str) -> tuple[int, str]:
    run = services.runs.get(run_id)
    return run.attempt, run.state


def finish(cluster: FakeCluster, run_id: str, attempt: int) -> None:
    for node in cluster.nodes.values():
        if (run_id, attempt) in node.attempts:
            node.set_state(run_id, attempt, "done")


def test_a_lost_node_is_left_out_and_the_story_is_told_with_its_cost(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        for name in ("alpha", "beta"):
            cluster[name].add_checkpoint(run_id, 10)
        write_step(cluster, "alpha", run_id, 1, 13)
        await until(lambda: services.runs.history(run_id).attempt(1).newest)
        cluster["gamma"].set_state(run_id, 1, "lost")
        await until(lambda: attempt_of(services, run_id) == (2, "running"))
        write_step(cluster, "alpha", run_id, 2, 11)
        await until(lambda: any("training again" in text for text in texts(services, run_id)))
        finish(cluster, run_id, 2)
        await task

    ask = cluster["gamma"].attempt_list

    async def vanish(request: ListAttempts, progress: object) -> Attempts:
        # Its processes are gone, and by now the PC is, too.
        cluster["gamma"].reachable = False
        return await ask(request)

    cluster["gamma"].attempt_list = vanish  # type: ignore[method-assign]
    watched(services, scenario, run_id)
    run = services.runs.get(run_id)
    assert (run.state, run.attempt, run.nodes) == ("done", 2, ("alpha", "beta"))
    assert cluster["alpha"].intents[-1].resume_step == 10
    (launched,) = [text for text in texts(services, run_id) if "resumed automatically" in text]
    assert "on alpha and beta, without gamma" in launched
    assert "3 steps are repeated from step 10" in launched
    (back,) = [text for text in texts(services, run_id) if "training again" in text]
    # From step 13 of the first attempt to step 11 of the second, by the nodes' clocks.
    assert back.startswith("training again since step 11: the loss cost 1 min 38 s, and 3 steps")
    (one,) = list_interruptions(services, run_id)
    told = {moment.title: moment.text for moment in tell_story(one)}
    assert list(told) == ["Last step", "Loss noticed", "Resumed", "Training again"]
    assert "node gamma lost its part at step 13" in told["Loss noticed"]
    assert "on alpha and beta, without gamma, from step 10" in told["Resumed"]
    assert told["Training again"] == "cost 1 min 38 s in all, and 3 steps are repeated from step 10"
    assert summarize_story([one]) == "Interrupted once; 1 min 38 s lost, 3 steps trained again"


def test_a_loss_before_the_first_step_is_timed_from_the_loss_and_not_from_its_discovery(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    """The others wait for the node timeout before they say that they lost it."""
    lost_s = time.time() - 139.0

    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        write_line(cluster, "beta", run_id, {"kind": "phase", "phase": "x", "time_s": lost_s})
        await until(lambda: services.runs.history(run_id).attempt(1).heard_s)
        cluster["beta"].set_state(run_id, 1, "lost")
        await until(lambda: attempt_of(services, run_id) == (2, "running"))
        step = {"kind": "step", "step": 1, "loss": 1.0, "time_s": lost_s + 145.0}
        line = json.dumps({**step, "loss_hex": (1.0).hex()}).encode() + b"\n"
        cluster["alpha"].write(run_id, 2, "rank-0.jsonl", line)
        await until(lambda: any("training again" in text for text in texts(services, run_id)))
        finish(cluster, run_id, 2)
        await task

    watched(services, scenario, run_id)
    (launched,) = [text for text in texts(services, run_id) if "resumed automatically on" in text]
    assert re.search(r", 2 min \d+ s after the loss; no step is repeated$", launched), launched
    (back,) = [text for text in texts(services, run_id) if "training again" in text]
    assert "the loss cost 2 min 25 s" in back
    (one,) = list_interruptions(services, run_id)
    assert one.cost_s == pytest.approx(145.0)


@pytest.mark.parametrize("cause", ["killed", "crashed", "stalled"])
def test_a_lost_rank_is_started_again_on_all_nodes(
    services: Services, cluster: FakeCluster, run_id: str, cause: str
) -> None:
    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        cluster["beta"].set_state(run_id, 1, "failed", "Rank 1 was lost.", cause=cause)
        await until(lambda: attempt_of(services, run_id) == (2, "running"))
        finish(cluster, run_id, 2)
        await task

    watched(services, scenario, run_id)
    assert services.runs.get(run_id).nodes == ("alpha", "beta", "gamma")
    assert all(node.attempts[run_id, 1].state in ("failed", "stopped") for node in
               cluster.nodes.values())  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "recovery"),
    [("error", "auto"), ("", "auto"), ("killed", "off"), ("diverged", "auto")],
)
def test_a_failure_of_its_own_and_a_run_that_says_no_are_left(
    services: Services, cluster: FakeCluster, spec: RunSpec, cause: str, recovery: str
) -> None:
    run_id = asyncio.run(start_run(services, replace(spec, recovery=recovery)))  # type: ignore[arg-type]

    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        cluster["beta"].set_state(run_id, 1, "failed", "It failed.", cause=cause)
        await task

    watched(services, scenario, run_id)
    assert attempt_of(services, run_id) == (1, "failed")
    assert "automatically" not in services.runs.get(run_id).hint
    assert not services.runs.full_snapshot(run_id).is_recovering


def test_a_run_that_diverged_goes_on_at_half_the_rate_where_it_says_so(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    rate = spec.learning_rate
    run_id = asyncio.run(start_run(services, replace(spec, divergence="retry")))

    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        cluster["alpha"].add_checkpoint(run_id, 10)
        cluster["beta"].set_state(run_id, 1, "failed", "It diverged.", cause="diverged")
        await until(lambda: attempt_of(services, run_id) == (2, "running"))
        finish(cluster, run_id, 2)
        await task

    watched(services, scenario, run_id)
    intent = cluster["alpha"].intents[-1]
    assert (intent.resume_step, intent.spec.learning_rate) == (10, rate / 2)
    # What a person sees and repeats is what trains.
    assert services.runs.get(run_id).spec.learning_rate == rate / 2
    assert f"the learning rate is {rate / 2:g} instead of {rate:g} from step 11 on" in texts(
        services, run_id
    )


def test_three_losses_without_a_step_end_in_a_reason(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        for attempt in (1, 2, 3):
            await until(lambda n=attempt: attempt_of(services, run_id) == (n, "running"))
            cluster["beta"].set_state(run_id, attempt, "failed", "Rank 1 died.", cause="killed")
        await task

    watched(services, scenario, run_id)
    run = services.runs.get(run_id)
    assert (run.attempt, run.state) == (3, "failed")
    assert run.message.endswith(
        "no longer resumed automatically: it was lost 3 times before its first step without "
        "getting further"
    )
    assert run.hint.startswith("Find the cause")
    # A person's resume begins to count anew.
    asyncio.run(resume_run(services, run_id))
    assert services.recoveries.of_run(run_id) == ()


def test_a_resume_that_is_refused_is_tried_until_enough_nodes_answer(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    assert services.runs.full_snapshot(interrupted).is_recovering
    for name in ("alpha", "beta"):
        cluster[name].reachable = False

    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        await until(
            lambda: any("not resumed yet: no node of" in t for t in texts(services, run_id))
        )
        await asyncio.sleep(0.1)
        cluster["beta"].reachable = True
        await until(lambda: any("alpha and gamma cannot" in t for t in texts(services, run_id)))
        cluster["alpha"].reachable = True
        await until(lambda: attempt_of(services, run_id) == (2, "running"))
        finish(cluster, run_id, 2)
        await task

    watched(services, scenario, interrupted)
    assert services.runs.get(interrupted).nodes == ("alpha", "beta")
    assert sum("not resumed yet" in text for text in texts(services, interrupted)) == 2


@pytest.mark.parametrize("problem", ["disk", "process"])
def test_a_node_that_cannot_take_part_is_left_out_and_does_not_join(
    services: Services,
    cluster: FakeCluster,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    problem: str,
) -> None:
    monkeypatch.setattr(preflight, "STUCK_PAUSE_S", 0.01)
    said = {
        "disk": "node gamma: Read-only file system",
        "process": "processes of attempt 1 of the run cannot be ended on node gamma. Restart that",
    }

    async def refuse(*asked: object) -> Fence:
        raise UserError(said["disk"])

    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        left = {"cause": "stalled", "num_processes": 1 if problem == "process" else 0}
        if problem == "disk":
            cluster["gamma"].run_fence = refuse  # type: ignore[method-assign]
        cluster["gamma"].set_state(run_id, 1, "failed", "Rank 2 stood still.", **left)
        await until(lambda: attempt_of(services, run_id) == (2, "running"))
        finish(cluster, run_id, 2)
        await task
        assert await preflight.find_fit(services, ("beta", "gamma"), run_id) == ("beta",)

    watched(services, scenario, run_id)
    assert services.runs.get(run_id).nodes == ("alpha", "beta")
    (told,) = [text for text in texts(services, run_id) if "left out" in text]
    assert told.startswith(f"gamma is left out: {said[problem]}")


def test_a_launch_that_a_node_refuses_is_tried_again(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["beta"].launch_error = UserError("its GPU is busy")

    async def scenario(task: asyncio.Task[None], run_id: str) -> None:
        await until(lambda: any("its GPU is busy. It is" in t for t in texts(services, run_id)))
        cluster["beta"].launch_error = None
        await until(lambda: services.runs.get(run_id).state == "running")
        finish(cluster, run_id, services.runs.get(run_id).attempt)
        await task

    watched(services, scenario, interrupted)
    assert services.runs.get(interrupted).state == "done"


# ---------------------------------------------------------------- a person's stop


def test_a_stop_before_the_recovery_ends_it(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    asyncio.run(stop_run(services, interrupted))
    assert asyncio.run(recover_run(services, interrupted)) is False
    run = services.runs.get(interrupted)
    assert (run.state, run.attempt) == ("stopped", 1)
    assert run.message.endswith("the user stopped it before it was resumed")
    with pytest.raises(UserError, match="not active"):
        asyncio.run(stop_run(services, interrupted))


@pytest.mark.parametrize("stage", ["run_fence", "checkpoint_list", "port_choose"])
def test_a_stop_in_the_middle_of_a_recovery_wins(
    services: Services, cluster: FakeCluster, interrupted: str, stage: str
) -> None:
    node = cluster["alpha"]
    ask = getattr(node, stage)

    async def asked(*args: Any) -> Any:
        # A command of another process, which sees the same store.
        await stop_run(services, interrupted)
        return await ask(*args)

    setattr(node, stage, asked)
    assert asyncio.run(asyncio.wait_for(recover_run(services, interrupted), 10)) is False
    assert attempt_of(services, interrupted)[1] == "stopped"
    assert not any((interrupted, 2) in one.attempts for one in cluster.nodes.values())


def test_a_stop_while_nodes_launch_ends_what_was_launched(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    async def scenario() -> None:
        cluster["beta"].launch_gate = asyncio.Event()
        recovering = asyncio.create_task(recover_run(services, interrupted))
        await cluster["beta"].asked_to_launch.wait()
        stopping = asyncio.create_task(stop_run(services, interrupted))
        await until(lambda: services.runs.get(interrupted).stop_asked)
        cluster["beta"].launch_gate.set()
        await asyncio.wait_for(asyncio.gather(recovering, stopping), 10)

    cluster["beta"].asked_to_launch = asyncio.Event()
    asyncio.run(scenario())
    assert attempt_of(services, interrupted) == (2, "stopped")
    assert asyncio.run(recover_run(services, interrupted)) is False
    assert cluster["alpha"].attempts[interrupted, 2].state == "stopped"
    # Its launch was still on the way: refused, or stopped as well.
    launched = cluster["beta"].attempts.get((interrupted, 2))
    assert launched is None or launched.state == "stopped"


def test_a_stop_as_the_run_is_lost_keeps_it_from_being_resumed(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.change(run_id, lambda run: replace(run, stop_asked=True))
    cluster["beta"].set_state(run_id, 1, "failed", "Rank 1 died.", cause="killed")
    asyncio.run(reconcile_run(services, run_id))
    assert not services.recoveries.pending()


# ---------------------------------------------------------------- several masters


def test_two_watchers_of_one_home_launch_one_attempt(
    tmp_path: Path, services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    second = make_services(tmp_path / "home", cluster)

    async def scenario() -> list[bool]:
        both = (recover_run(services, interrupted), recover_run(second, interrupted))
        return list(await asyncio.wait_for(asyncio.gather(*both), 10))

    assert asyncio.run(scenario()) == [True, True]
    assert attempt_of(services, interrupted) == (2, "running")
    assert len([one for one in cluster["alpha"].intents if one.attempt == 2]) == 1
    assert not [stop for stop in cluster["alpha"].stops if stop[1] == 2]


def test_a_loss_right_after_the_launch_that_another_watcher_saw_is_recovered_too(
    tmp_path: Path,
    services: Services,
    cluster: FakeCluster,
    interrupted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second, resume = make_services(tmp_path / "home", cluster), recovery.resume_run

    async def resume_and_lose(*args: Any, **options: Any) -> None:
        await resume(*args, **options)
        if attempt_of(services, interrupted) == (2, "running"):
            cluster["beta"].set_state(interrupted, 2, "failed", "Rank 1 died.", cause="killed")
            await reconcile_run(second, interrupted)

    monkeypatch.setattr(recovery, "resume_run", resume_and_lose)
    assert asyncio.run(asyncio.wait_for(recover_run(services, interrupted), 10)) is True
    assert attempt_of(services, interrupted) == (3, "running")


def test_two_resumes_at_once_launch_one_attempt(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    """The second one read the run before the first one had launched it."""
    asyncio.run(resume_run(services, interrupted))
    stale = replace(services.runs.get(interrupted), state="interrupted", attempt=1)
    real = services.runs.get
    answers = iter([stale, stale])
    services.runs.get = lambda run_id: next(answers, None) or real(run_id)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="is running and cannot be resumed"):
        asyncio.run(resume_run(services, interrupted))
    assert not [stop for stop in cluster["alpha"].stops if stop[1] == 2]


def test_another_master_only_watches(
    tmp_path: Path, services: Services, cluster: FakeCluster, run_id: str
) -> None:
    other = make_services(tmp_path / "other", cluster)
    asyncio.run(adopt(other, run_id))
    cluster["gamma"].set_state(run_id, 1, "lost")
    asyncio.run(reconcile_run(other, run_id))
    assert other.runs.get(run_id).state == "interrupted"
    assert not other.recoveries.pending()


def test_an_attempt_of_another_master_is_left_alone(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    old = cluster["beta"].attempts[interrupted, 1]
    cluster["beta"].attempts[interrupted, 2] = replace(old, attempt=2, state="running")
    with pytest.raises(UserError, match="beta and gamma cannot be reached"):
        asyncio.run(resume_run(services, interrupted, automatic=Automatic()))
    assert cluster["beta"].attempts[interrupted, 2].state == "running"
    assert any("beta is left out" in e.text for e in services.runs.store.events(interrupted))
    newest = max(node.fences.get(interrupted, 0) for node in cluster.nodes.values())
    assert newest < 2, "nothing newer was promised"


def test_a_master_that_died_while_it_recovered_goes_on_when_it_is_back(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    """Killed after the intent, with one of two parts launched."""
    services.runs.change(interrupted, lambda run: replace(run, state="launching", attempt=2))
    (first,) = services.runs.store.attempts(interrupted)
    services.runs.store.save_attempt(replace(first, attempt=2))
    old = cluster["alpha"].attempts[interrupted, 1]
    cluster["alpha"].attempts[interrupted, 2] = replace(old, attempt=2, state="running")
    asyncio.run(reconcile_run(services, interrupted))
    assert services.recoveries.pending() == (interrupted,)
    assert asyncio.run(asyncio.wait_for(recover_run(services, interrupted), 10)) is True
    assert attempt_of(services, interrupted) == (3, "running")


def test_a_pause_for_a_hot_gpu_is_part_of_the_story(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    services.settings.set("when_hot", "wait")
    services.settings.set_of_node("beta", "when_hot", "limit")
    run_id = asyncio.run(start_run(services, spec))
    chosen = {name: cluster[name].intents[-1].when_hot for name in ("alpha", "beta")}
    assert chosen == {"alpha": "wait", "beta": "limit"}
    gpu = "GPU 0 of beta (RTX 4070)"
    hot = {"kind": "too_hot", "step": 7, "gpu": gpu, "celsius": 92.0, "until_celsius": 82.0}
    write_line(cluster, "beta", run_id, {**hot, "time_s": 100.0})
    asyncio.run(reconcile_run(services, run_id))
    told = tell_story(list_interruptions(services, run_id)[0])
    assert [moment.title for moment in told] == ["Too hot", "Cooling down"]
    cooled = {"kind": "cooled", "step": 7, "gpu": gpu, "paused_s": 65.0, "time_s": 165.0}
    write_line(cluster, "beta", run_id, cooled, {**hot, "step": 9, "time_s": 300.0})
    finish(cluster, run_id, 1)
    asyncio.run(reconcile_run(services, run_id))
    found = list_interruptions(services, run_id)
    assert summarize_story(found) == "Paused twice to cool down; 1 min 5 s lost, no step repeated"
    assert [(m.title, m.text) for one in found for m in tell_story(one)] == [
        ("Too hot", f"{gpu}: 92 \u00b0C, after step 7"),
        ("Training again", "cost 1 min 5 s in all, and no step is repeated"),
        ("Too hot", f"{gpu}: 92 \u00b0C, after step 9"),  # the run ended before it was cooler
    ]
    events = texts(services, run_id)
    assert f"{gpu} has 92 \u00b0C: all ranks pause until it is down to 82 \u00b0C" in events
    assert "training continues after a pause of 1 min 5 s for cooling" in events
