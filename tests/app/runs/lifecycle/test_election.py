"""A master shares the recovery of a run with its nodes: both never start it, and it takes over."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.mandate import Handover, consent_bytes
from agents.contract.requests.attempts import Attempts
from agents.contract.run import AttemptLoss, RankPlacement
from agents.contract.signatures import sign
from agents.contract.spec import RunSpec
from app.errors import UserError
from app.presentation.interruption_text import tell_story
from app.runs.interruptions import list_interruptions
from app.runs.lifecycle import election, recovery
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.reconcile import reconcile_run, search_nodes
from app.runs.lifecycle.recovery import recover_run
from app.runs.lifecycle.resume import Automatic
from app.runs.lifecycle.stop import stop_run
from app.runs.lifecycle.watch import RunWatch
from app.runs.nodes import attempt_status
from app.runs.services import Services
from tests.fakes.adopting import adopt
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.resuming import resume_run

KILLED = "Rank 2 on node gamma (cpu) was ended by SIGKILL in phase training"


def texts(services: Services, run_id: str) -> list[str]:
    return [event.text for event in services.runs.events(run_id)]


def start_by_nodes(services: Services, cluster: FakeCluster, run_id: str) -> None:
    """Let alpha have started attempt 2 on alpha and beta, after gamma was lost."""
    ranks = tuple(
        RankPlacement(rank=rank, local_rank=0, node=node, device="cpu")
        for rank, node in enumerate(("alpha", "beta"))
    )
    seeds = {node: cluster[node].intents[0].node_seed for node in ("alpha", "beta")}
    consents = {n: sign(seed, consent_bytes(run_id, 2, 1, n)) for n, seed in seeds.items()}
    handover = Handover(attempt=2, replaces=1, consents=consents)
    for node in ("alpha", "beta"):
        first = cluster[node].attempts[run_id, 1]
        assert first.election is not None
        assert first.proof is not None
        loss = AttemptLoss(
            attempt=1, step=13, ended_s=100.0, resumed_s=130.0, cause="killed", reason=KILLED
        )
        plan = replace(
            first.election,
            losses=(loss,),
            started_by="alpha",
            reason=f"{KILLED}; no master asked for 60 s",
        )
        cluster[node].set_state(run_id, 1, "failed", "peer lost", peer_lost=True, cause="peer_lost")
        cluster[node].attempts[run_id, 2] = replace(
            first,
            attempt=2,
            state="running",
            all_ranks=ranks,
            election=plan,
            resume_step=10,
            is_confirmed=True,
            proof=replace(first.proof, handovers=(handover,)),
        )
    cluster["gamma"].reachable = False


def test_runs_of_three_nodes_and_more_are_shared_with_them_and_no_others(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    def plans(changed: RunSpec) -> list[bool]:
        for node in cluster.nodes.values():
            node.intents.clear()
        run_id = asyncio.run(start_run(services, changed))
        found = [i.election for n in cluster.nodes.values() for i in n.intents]
        asyncio.run(stop_run(services, run_id))
        if found[0] is not None:
            assert found[0].patience_s == services.settings.number("lost_after_s")
            assert set(found[0].ports) == set(cluster.names())
        return [plan is not None for plan in found]

    assert plans(spec) == [True] * 3
    assert plans(replace(spec, recovery="off")) == [False] * 3
    assert plans(replace(spec, nodes=("alpha", "beta"))) == [False] * 2


def test_an_automatic_recovery_needs_a_claim_that_a_majority_grants(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    assert asyncio.run(asyncio.wait_for(recover_run(services, interrupted), 10)) is True
    assert services.runs.get(interrupted).nodes == ("alpha", "beta")
    for name in ("alpha", "beta"):
        calls = cluster[name].calls
        assert calls.index("run_claim") < len(calls) - 1 - calls[::-1].index("launch")
        assert "keep" in calls, "its nodes wait meanwhile"


def test_a_minority_is_resumed_by_a_person_alone(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["beta"].reachable = False
    with pytest.raises(UserError, match="beta and gamma cannot be reached and may continue"):
        asyncio.run(resume_run(services, interrupted, automatic=Automatic()))
    assert services.recoveries.pending() == (interrupted,), "it is tried again"
    assert cluster["alpha"].fences.get(interrupted, 0) < 2, "nothing newer was promised"
    asyncio.run(resume_run(services, interrupted))
    assert services.runs.get(interrupted).nodes == ("alpha",)


def test_a_number_that_nodes_have_claimed_is_not_used_again(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["beta"].fences[interrupted] = 3
    asyncio.run(resume_run(services, interrupted, automatic=Automatic()))
    assert [i.attempt for i in cluster["alpha"].intents] == [1, 4]


def test_an_attempt_that_nodes_started_is_told_in_plain_words_and_goes_on_as_ours(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    start_by_nodes(services, cluster, run_id)
    asyncio.run(reconcile_run(services, run_id))
    run = services.runs.get(run_id)
    assert (run.state, run.attempt, run.nodes) == ("running", 2, ("alpha", "beta"))
    assert services.runs.is_ours(run), "the next loss is recovered by this master again"
    assert (
        f"alpha started attempt 2 without this PC, on alpha and beta: {KILLED}; no master asked "
        "for 60 s. Nothing to do."
    ) in texts(services, run_id)
    (loss,) = services.recoveries.of_run(run_id)
    assert (loss.step, loss.state, loss.resumed_attempt) == (13, "resumed", 2)
    assert (loss.cause, loss.ended_s) == ("killed", 100.0)
    (story,) = list_interruptions(services, run_id)
    assert KILLED in {moment.title: moment.text for moment in tell_story(story)}["Loss noticed"]
    assert services.runs.store.attempts(run_id)[-1].resume_step == 10
    assert not [stop for node in cluster.nodes.values() for stop in node.stops]
    asyncio.run(search_nodes(services, ("alpha", "beta")))
    assert len([t for t in texts(services, run_id) if "without this PC" in t]) == 1


def test_a_recovery_that_comes_too_late_takes_over_what_nodes_started(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    start_by_nodes(services, cluster, interrupted)
    with pytest.raises(UserError, match="running and cannot be resumed"):
        asyncio.run(resume_run(services, interrupted))
    assert services.runs.get(interrupted).attempt == 2
    assert asyncio.run(asyncio.wait_for(recover_run(services, interrupted), 10)) is True
    assert not any(node.fences for node in cluster.nodes.values())


def test_nodes_that_went_on_out_of_sight_are_not_stopped_and_resumed(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    for name in ("alpha", "beta"):
        cluster[name].add_checkpoint(run_id, 10)
        cluster[name].reachable = False
    cluster["gamma"].set_state(run_id, 1, "failed", "peer lost", peer_lost=True, cause="peer_lost")
    asyncio.run(reconcile_run(services, run_id))
    assert services.runs.get(run_id).state == "interrupted", "that is all that can be seen"
    assert services.recoveries.pending() == (run_id,)

    for name in ("alpha", "beta"):
        cluster[name].reachable = True
        cluster[name].set_state(run_id, 1, "running", generation=1, members=("alpha", "beta"))
    assert asyncio.run(asyncio.wait_for(recover_run(services, run_id), 10)) is True
    run = services.runs.get(run_id)
    assert (run.state, run.attempt, run.message) == ("running", 1, "")
    assert not [stop for name in ("alpha", "beta") for stop in cluster[name].stops]
    assert not any(node.fences for node in cluster.nodes.values())
    assert services.recoveries.pending() == ()
    assert any(
        text.startswith("alpha and beta continued meanwhile") for text in texts(services, run_id)
    )
    asyncio.run(reconcile_run(services, run_id))
    assert services.runs.get(run_id).state == "running", "what gamma says counts no more"


def test_a_master_says_that_it_watches_its_own_runs_only(
    tmp_path: Path, services: Services, cluster: FakeCluster, run_id: str
) -> None:
    async def watch(by: Services) -> None:
        for node in cluster.nodes.values():
            node.calls.clear()
        task = asyncio.create_task(
            RunWatch(by, by.runs.get(run_id), by.runs._events).run_until_end()
        )
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(watch(services))
    assert all("keep" in node.calls for node in cluster.nodes.values())
    other = make_services(tmp_path / "other", cluster)
    asyncio.run(adopt(other, run_id))
    asyncio.run(watch(other))
    assert not any("keep" in node.calls for node in cluster.nodes.values())


def test_nodes_are_kept_from_it_while_the_master_ends_and_plans(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election, "keep_interval_s", lambda services: 0.02)
    for name in ("alpha", "beta"):
        cluster[name].add_checkpoint(run_id, 10)
        cluster[name].stop_delay_s = 0.3  # its ranks save what they hold

    def count_keeps() -> int:
        return min(cluster[name].calls.count("keep") for name in ("alpha", "beta"))

    cluster["gamma"].set_state(run_id, 1, "lost")
    asyncio.run(reconcile_run(services, run_id))
    while_stopping = count_keeps()
    assert while_stopping >= 3

    cluster["gamma"].reachable = False
    hang_when_asked(cluster, "gamma")
    monkeypatch.setattr(attempt_status, "SILENT_WAIT_S", 0.3)
    assert asyncio.run(asyncio.wait_for(recover_run(services, run_id), 10)) is True
    assert services.runs.get(run_id).nodes == ("alpha", "beta")
    assert count_keeps() >= while_stopping + 3


def hang_when_asked(cluster: FakeCluster, name: str) -> None:
    async def hang(*asked: object) -> Attempts:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits for that long")

    cluster[name].attempt_list = hang  # type: ignore[method-assign]


def test_nodes_do_not_start_what_a_person_stopped_or_what_failed_by_itself(
    services: Services, cluster: FakeCluster, interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "POLL_INTERVAL_S", 0.01)
    asyncio.run(stop_run(services, interrupted))
    assert "keep_closed" in cluster["alpha"].calls
    run_id = asyncio.run(start_run(services, replace(services.runs.get(interrupted).spec,
                                                     nodes=("alpha", "beta"))))  # fmt: skip
    cluster["beta"].calls.clear()
    cluster["beta"].set_state(run_id, 1, "failed", "The data is bad.", cause="error")
    asyncio.run(reconcile_run(services, run_id))
    assert "keep_closed" in cluster["beta"].calls


def test_a_node_that_was_cut_off_is_told_that_the_run_has_gone_on(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    asyncio.run(resume_run(services, interrupted))
    assert services.runs.get(interrupted).attempt == 2
    cluster["gamma"].reachable = True
    cluster["gamma"].calls.clear()
    asyncio.run(search_nodes(services, ("gamma",)))
    assert cluster["gamma"].calls.count("keep_closed") == 1
