"""A node answers the requests of its master as it likes: what its numbers and signatures reach."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.mandate import Handover, closing_bytes, consent_bytes
from agents.contract.requests import NodeRequest
from agents.contract.requests.runs import ClaimAttempt, Fence, Halted, HaltRun, RaiseFence
from agents.contract.run import AttemptLoss, AttemptStatus, Claim
from agents.contract.signatures import sign, verify
from agents.contract.wire import WireError, from_wire
from app.artifacts.exports.export import find_whole
from app.errors import UserError
from app.events import ACTIVE_STATES
from app.runs import recovery as decisions
from app.runs.belief import find_foreign
from app.runs.lifecycle import election, recovery
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.reconcile import adopt_newer, reconcile_run, search_nodes
from app.runs.lifecycle.resume import Automatic
from app.runs.lifecycle.stop import stop_run
from tests.fakes.cluster import FakeCluster, FakeNode, make_services
from tests.fakes.resuming import resume_run
from tests.hostile.test_planted_runs import Home

LOSS = AttemptLoss(attempt=1, step=3, ended_s=1.0, resumed_s=2.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def lie(
    node: FakeNode, kind: type[NodeRequest[Any]], answer: Callable[[Any], Any], patch: Any
) -> None:
    """Let a node answer requests of one kind by `answer`."""
    honest = node.ask

    async def ask(request: NodeRequest[Any], progress: Any = None) -> Any:
        return answer(request) if isinstance(request, kind) else await honest(request, progress)

    patch.setattr(node, "ask", ask)


def start_themselves(home: Home, *names: str, losses: tuple[AttemptLoss, ...] = (LOSS,)) -> None:
    """Let these nodes start attempt 2 of the run by their consents, without the master."""
    proof, plan = home.genuine.proof, home.genuine.election
    assert proof is not None
    assert plan is not None
    consents = {
        name: sign(home.cluster[name].intents[0].node_seed, consent_bytes(home.run_id, 2, 1, name))
        for name in names
    }
    handover = Handover(attempt=2, replaces=1, consents=consents)
    for name in names:
        attempts = home.cluster[name].attempts
        first = attempts[home.run_id, 1]
        attempts[home.run_id, 1] = replace(first, state="lost")
        attempts[home.run_id, 2] = replace(
            first,
            attempt=2,
            state="running",
            proof=replace(proof, handovers=(handover,)),
            election=replace(plan, started_by=names[0], reason="gamma was lost", losses=losses),
            all_ranks=tuple(r for r in first.all_ranks if r.node in names),
        )


# ---------------------------------------------------------------- stops that nodes missed


def stop_unreachable(home: Home, *names: str) -> None:
    for name in names:
        home.cluster[name].reachable = False
    for _ in range(2):  # the second one gives up what is out of reach
        if home.services.runs.get(home.run_id).state in ACTIVE_STATES:
            with contextlib.suppress(UserError):
                asyncio.run(stop_run(home.services, home.run_id))
    assert home.services.runs.get(home.run_id).state == "stopped"
    for name in names:
        home.cluster[name].reachable = True


@pytest.mark.parametrize("away", [("alpha", "beta", "gamma"), ("alpha", "beta")])
def test_an_attempt_that_nodes_started_after_a_stop_is_stopped(
    home: Home, away: tuple[str, ...]
) -> None:
    stop_unreachable(home, *away)
    start_themselves(home, "alpha", "beta")
    asyncio.run(search_nodes(home.services, home.cluster.names()))
    run = home.services.runs.get(home.run_id)
    assert (run.state, run.attempt) == ("stopped", 1)
    assert home.cluster["alpha"].attempts[home.run_id, 2].state == "stopped"
    assert home.cluster["beta"].attempts[home.run_id, 2].state == "stopped"
    word = home.cluster["alpha"].closings[-1]
    assert verify(home.services.key.public, closing_bytes(home.run_id, 2), word)
    assert "attempt 2 was still running on alpha; it is stopped" in home.texts()


def test_the_same_attempt_is_adopted_if_nobody_stopped_the_run(home: Home) -> None:
    start_themselves(home, "alpha", "beta")
    asyncio.run(search_nodes(home.services, home.cluster.names()))
    run = home.services.runs.get(home.run_id)
    assert (run.state, run.attempt, run.nodes) == ("running", 2, ("alpha", "beta"))


def test_a_group_that_missed_a_stop_does_not_make_the_run_active(home: Home) -> None:
    stop_unreachable(home, "beta", "gamma")
    for name in ("beta", "gamma"):
        home.cluster[name].set_state(home.run_id, 1, "running", generation=1)
    assert not asyncio.run(adopt_newer(home.services, home.services.runs.get(home.run_id)))
    asyncio.run(search_nodes(home.services, home.cluster.names()))
    assert home.services.runs.get(home.run_id).state == "stopped"
    assert home.cluster["beta"].attempts[home.run_id, 1].state == "stopped"


def test_a_plan_without_losses_ends_no_search(home: Home) -> None:
    start_themselves(home, "alpha", "beta", losses=())
    asyncio.run(search_nodes(home.services, home.cluster.names()))
    assert home.services.runs.get(home.run_id).attempt == 2


# ---------------------------------------------------------------- signatures and numbers


def test_a_stop_signs_no_future_attempt_for_one_node(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With such a word, the node could end the recovery of a later attempt."""
    beta, every = home.cluster["beta"], tuple(range(1, 50))
    lie(beta, HaltRun, lambda _: Halted(attempt=1, active=every), monkeypatch)
    asyncio.run(stop_run(home.services, home.run_id))
    assert home.services.runs.get(home.run_id).state == "stopped"
    public = home.services.key.public
    signed = {
        number
        for number in every
        for word in beta.closings
        if verify(public, closing_bytes(home.run_id, number), word)
    }
    assert signed == {1}


def test_a_node_does_not_list_thousands_of_active_attempts() -> None:
    with pytest.raises(WireError):
        from_wire(Halted, {"attempt": 1, "active": list(range(1, 10_000))})


def test_a_claim_far_ahead_does_not_use_up_the_numbers(home: Home) -> None:
    home.cluster["beta"].fences[home.run_id] = 999_999
    run = home.services.runs.get(home.run_id)
    number, granted = asyncio.run(election.claim_attempt(home.services, run, home.cluster.names()))
    assert granted == ("alpha", "gamma")
    assert number < 10
    assert "beta is left out" in home.texts()


def test_a_number_that_most_nodes_know_counts(home: Home) -> None:
    for name in ("alpha", "gamma"):
        home.cluster[name].fences[home.run_id] = 5000
    run = home.services.runs.get(home.run_id)
    number, granted = asyncio.run(election.claim_attempt(home.services, run, home.cluster.names()))
    assert (number, granted) == (5001, ("alpha", "beta", "gamma"))


def test_a_fence_that_rises_with_each_request_ends(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    beta = home.cluster["beta"]
    lie(beta, RaiseFence, lambda asked: Fence(attempt=asked.attempt + 900), monkeypatch)
    asyncio.run(stop_run(home.services, home.run_id))
    asyncio.run(resume_run(home.services, home.run_id, nodes=("alpha", "gamma")))
    run = home.services.runs.get(home.run_id)
    assert run.state == "running"
    assert run.attempt < 2000


def test_a_fence_of_one_node_ends_no_recovery(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    lie(
        home.cluster["beta"],
        RaiseFence,
        lambda asked: Fence(attempt=asked.attempt + 1),
        monkeypatch,
    )
    home.cluster["gamma"].set_state(home.run_id, 1, "lost")
    asyncio.run(reconcile_run(home.services, home.run_id))
    asyncio.run(resume_run(home.services, home.run_id, automatic=Automatic()))
    assert home.services.runs.get(home.run_id).state == "running"


def test_a_node_that_grants_no_number_is_left_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    beta = home.cluster["beta"]
    lie(beta, ClaimAttempt, lambda a: Claim(is_granted=False, fence=a.attempt), monkeypatch)
    run = home.services.runs.get(home.run_id)
    number, granted = asyncio.run(election.claim_attempt(home.services, run, home.cluster.names()))
    assert granted == ("alpha", "gamma")
    assert number < 20
    assert "beta is left out: it grants no attempt number" in home.texts()


def test_a_node_that_refuses_each_launch_is_left_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "RETRY_S", (0.0,) * len(decisions.RETRY_S))
    monkeypatch.setattr(recovery, "POLL_INTERVAL_S", 0.0)
    home.add_checkpoints(10, "alpha", "beta", "gamma")
    home.cluster["beta"].launch_error = UserError("no")
    home.cluster["gamma"].set_state(home.run_id, 1, "lost")
    asyncio.run(reconcile_run(home.services, home.run_id))
    assert asyncio.run(recovery.recover_run(home.services, home.run_id))
    run = home.services.runs.get(home.run_id)
    assert (run.state, run.nodes) == ("running", ("alpha", "gamma"))
    assert "beta is left out: it has refused to launch its part" in home.texts()


def test_a_node_that_cannot_note_a_stop_ends_its_part(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: HaltRun) -> Halted:
        raise UserError("the disk is full")

    lie(home.cluster["beta"], HaltRun, refuse, monkeypatch)
    asyncio.run(stop_run(home.services, home.run_id))
    assert home.services.runs.get(home.run_id).state == "stopped"
    assert home.cluster["beta"].attempts[home.run_id, 1].state == "stopped"


def test_two_nodes_start_no_attempt_themselves(tmp_path: Path, home: Home) -> None:
    """The first of two would be their majority alone, and so would the only one of one."""
    cluster = FakeCluster("alpha", "beta")
    services = make_services(tmp_path / "two", cluster)
    run_id = asyncio.run(start_run(services, home.spec))
    alpha = cluster["alpha"]
    first, seed = alpha.attempts[run_id, 1], alpha.intents[0].node_seed
    assert first.proof is not None
    consents = {"alpha": sign(seed, consent_bytes(run_id, 999_999, 1, "alpha"))}
    handover = Handover(attempt=999_999, replaces=1, consents=consents)
    proof = replace(first.proof, handovers=(handover,))
    alpha.attempts[run_id, 999_999] = replace(first, attempt=999_999, proof=proof)
    asyncio.run(search_nodes(services, cluster.names()))
    assert services.runs.get(run_id).attempt == 1


def test_thousands_of_planted_runs_cost_no_quadratic_time(home: Home) -> None:
    compared = 0

    class Counted(AttemptStatus):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

        __hash__ = None  # type: ignore[assignment]

    fields = {
        field.name: getattr(home.genuine, field.name) for field in dataclasses.fields(home.genuine)
    }
    doubted = [
        Counted(**{**fields, "run_id": f"20260101-000000-{number}"}) for number in range(300)
    ]
    assert len(find_foreign(home.services, doubted)) == 300
    assert compared < 300


# ---------------------------------------------------------------- checkpoints


def test_a_planted_checkpoint_is_not_exported(home: Home) -> None:
    for rank, name in enumerate(home.cluster.names()):
        home.write_steps(name, rank, 13)
    home.add_checkpoints(10, "alpha", "beta")
    home.add_checkpoints(3900, "beta")
    asyncio.run(reconcile_run(home.services, home.run_id))
    copies = asyncio.run(find_whole(home.services, home.run_id, home.cluster.names()))
    assert {copy.info.step for copy in copies} == {10}
    named = asyncio.run(find_whole(home.services, home.run_id, ("beta",), 3900))
    assert [copy.node for copy in named] == ["beta"], "the user may name it"


# ---------------------------------------------------------------- the key of the home


def test_a_damaged_key_keeps_no_run_from_being_stopped(home: Home) -> None:
    (home.services.paths.home / "master.key").write_text("damaged")
    again = make_services(home.services.paths.home, home.cluster)
    asyncio.run(stop_run(again, home.run_id))
    assert again.runs.get(home.run_id).state == "stopped"
    states = {node.attempts[home.run_id, 1].state for node in home.cluster.nodes.values()}
    assert states == {"stopped"}
    with pytest.raises(UserError, match="damaged"):
        asyncio.run(resume_run(again, home.run_id))
