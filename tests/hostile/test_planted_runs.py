"""A node whose files were edited lists runs and attempts that this home never started.

What a node says starts, resumes, stops, reads and copies nothing by itself: such an attempt is only
shown as found, until the user decides.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.mandate import AttemptProof, Handover, Mandate, consent_bytes, sign_mandate
from agents.contract.run import AttemptStatus, MasterIdentity
from agents.contract.signatures import make_seed, public_key, sign
from agents.contract.spec import CheckpointSpec, DataSpec, RunSpec
from app.errors import UserError
from app.runs import mandates
from app.runs.inputs import run_inputs
from app.runs.lifecycle import election
from app.runs.lifecycle.adoption import adopt_run, find_runs, ignore_run
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.reconcile import adopt_newer, reconcile_run, search_nodes
from app.runs.lifecycle.recovery import recover_run
from app.runs.lifecycle.resume import Automatic, Changes
from app.runs.lifecycle.stop import delete_run, stop_run
from app.runs.lifecycle.takeover import take_over_run
from app.runs.services import Services
from app.storage.runs import AttemptRecord, RunRecord
from tests.fakes.adopting import adopt, lose_store
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.models import write_model
from tests.fakes.resuming import resume_run

ASKING = {"attempt_list", "attempt_status"}
"""Requests that change and read nothing of a run."""
Attack = Callable[..., None]
Plant = Callable[["Home"], None]
DIARY = "/home/me/diary.txt"


class Home:
    """A home with a run on three nodes, of which beta is taken over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = FakeCluster("alpha", "beta", "gamma")
        self.services: Services = make_services(folder / "home", self.cluster)
        data = folder / "chats.jsonl"
        data.write_text(json.dumps({"text": "hello"}) + "\n")
        self.spec = RunSpec(
            model=str(write_model(folder / "model")),
            data=DataSpec(train=str(data)),
            checkpoint=CheckpointSpec(every_steps=5, copies=2),
        )
        self.run_id = asyncio.run(start_run(self.services, self.spec))
        for node in self.cluster.nodes.values():
            node.calls.clear()

    @property
    def genuine(self) -> AttemptStatus:
        return self.cluster["beta"].attempts[self.run_id, 1]

    def plant(self, **changes: Any) -> AttemptStatus:
        """Put an attempt folder on beta: a copy of the genuine one with some changes."""
        status = replace(self.genuine, **changes)
        self.cluster["beta"].attempts[status.run_id, status.attempt] = status
        return status

    def add_checkpoints(self, step: int, *names: str) -> None:
        for name in names:
            self.cluster[name].add_checkpoint(self.run_id, step)

    def write_steps(self, node: str, rank: int, newest: int) -> None:
        lines = [{"kind": "step", "step": step, "time_s": 1.0, "loss": 1.0} for step in (1, newest)]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        self.cluster[node].write(self.run_id, 1, f"rank-{rank}.jsonl", data)

    def texts(self) -> str:
        events = self.services.runs.store.events(self.run_id)
        return "\n".join(event.text for event in events)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """The settings whose files this PC opened."""
    found: list[RunSpec] = []
    real = run_inputs.find_inputs

    def find(services: Services, spec: RunSpec) -> run_inputs.Inputs:
        found.append(spec)
        return real(services, spec)

    monkeypatch.setattr(run_inputs, "find_inputs", find)
    return found


def diary_spec(home: Home) -> RunSpec:
    return replace(home.spec, data=DataSpec(train=DIARY))


def forged_proof(home: Home, run_id: str, attempt: int, key: str = "") -> AttemptProof:
    """Sign a mandate with a key of the attacker, who may name the home's own key."""
    seed = make_seed()
    mandate = Mandate(
        run_id=run_id,
        attempt=attempt,
        spec=diary_spec(home),
        places=(("alpha", "cpu"), ("beta", "cpu"), ("gamma", "cpu")),
        node_keys={name: public_key(seed) for name in home.cluster.names()},
    )
    own = public_key(seed)
    return AttemptProof(mandate=sign_mandate(mandate, key or own, lambda text: sign(seed, text)))


def own_consents(home: Home, attempt: int) -> AttemptProof:
    """Extend the genuine proof by a handover to which only beta's key consented."""
    proof = home.genuine.proof
    assert proof is not None
    seed = home.cluster["beta"].intents[0].node_seed
    consents = {
        name: sign(seed, consent_bytes(home.run_id, attempt, 1, name))
        for name in home.cluster.names()
    }
    return replace(proof, handovers=(Handover(attempt=attempt, replaces=1, consents=consents),))


def other_run(home: Home) -> None:
    home.plant(run_id="20260101-000000-abc", spec=diary_spec(home))


def other_run_that_was_lost(home: Home) -> None:
    home.plant(run_id="20260101-000000-abc", spec=diary_spec(home), state="lost")


def other_run_by_a_forged_key(home: Home) -> None:
    run_id = "20260101-000000-abc"
    home.plant(run_id=run_id, proof=forged_proof(home, run_id, 1), spec=diary_spec(home))


def other_run_in_our_name(home: Home) -> None:
    run_id = "20260101-000000-abc"
    proof = forged_proof(home, run_id, 1, home.services.key.public)
    home.plant(run_id=run_id, proof=proof, master=home.services.identity)


def other_run_without_proof(home: Home) -> None:
    home.plant(run_id="20260101-000000-abc", proof=None, master=home.services.identity)


def attempt_7(home: Home) -> None:
    home.plant(attempt=7)


def attempt_7_without_proof(home: Home) -> None:
    home.plant(attempt=7, proof=None)


def attempt_7_that_has_ended(home: Home) -> None:
    home.plant(attempt=7, state="done", proof=None)


def attempt_7_with_its_own_consents(home: Home) -> None:
    plan = replace(home.genuine.election, started_by="beta") if home.genuine.election else None
    home.plant(attempt=7, proof=own_consents(home, 7), election=plan)


def attempt_7_of_a_forged_master(home: Home) -> None:
    home.plant(attempt=7, proof=forged_proof(home, home.run_id, 7))


def changed_settings(home: Home) -> None:
    home.plant(spec=diary_spec(home))


def changed_ranks(home: Home) -> None:
    home.plant(all_ranks=tuple(replace(rank, node="beta") for rank in home.genuine.all_ranks))


def taken_over_by_another(home: Home) -> None:
    owner = MasterIdentity(host="evil", user="evil", home="/evil")
    home.plant(master=owner, owner=owner)


def group_of_its_own(home: Home) -> None:
    home.plant(generation=999, members=("beta",), state="done", may_regroup=True)


def group_of_nobody(home: Home) -> None:
    home.plant(generation=999, members=("delta", "epsilon"))


PLANTS: tuple[Plant, ...] = (
    other_run,
    other_run_that_was_lost,
    other_run_by_a_forged_key,
    other_run_in_our_name,
    other_run_without_proof,
    attempt_7,
    attempt_7_without_proof,
    attempt_7_that_has_ended,
    attempt_7_with_its_own_consents,
    attempt_7_of_a_forged_master,
    changed_settings,
    changed_ranks,
    taken_over_by_another,
    group_of_its_own,
    group_of_nobody,
)
SHOWN = {plant for plant in PLANTS if plant.__name__.startswith(("other_run", "attempt_7"))}
"""Attempts that this home never allowed."""


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_attempt_starts_stops_and_reads_nothing(
    home: Home, opened: list[RunSpec], plant: Plant, attack: Attack
) -> None:
    services, cluster = home.services, home.cluster
    before = services.runs.get(home.run_id)
    plant(home)
    asyncio.run(search_nodes(services, cluster.names()))
    asyncio.run(reconcile_run(services, home.run_id))
    asyncio.run(adopt_newer(services, services.runs.get(home.run_id)))
    after = services.runs.get(home.run_id)
    assert [run.run_id for run in services.runs.store.all()] == [home.run_id]
    assert (after.state, after.attempt, after.nodes) == ("running", 1, before.nodes)
    assert after.spec == before.spec
    assert services.runs.is_ours(after)
    assert not services.recoveries.pending()
    for name, node in cluster.nodes.items():
        assert not node.stops, name
        assert not node.deleted, name
        assert [intent.attempt for intent in node.intents] == [1], name
    assert not opened
    # Journals are read for the run's own attempt only.
    parts = [p.parent.name for p in services.paths.runs.glob("*/attempts/*/*") if p.is_dir()]
    assert set(parts) <= {"1"}
    assert {p.name for p in services.paths.runs.iterdir()} == {home.run_id}
    found = services.runs.found()
    assert [one.node for one in found] == (["beta"] if plant in SHOWN else [])
    happened = f"found on beta, not ours: {found[0].run_id}" if found else "the run trains on"
    attack(given=plant.__name__, tried="search, judge, adopt", happened=happened)


@pytest.mark.parametrize(
    "plant",
    [
        attempt_7,
        attempt_7_without_proof,
        attempt_7_with_its_own_consents,
        attempt_7_of_a_forged_master,
        changed_settings,
        taken_over_by_another,
        group_of_its_own,
    ],
    ids=lambda plant: plant.__name__,
)
def test_an_automatic_recovery_is_neither_misled_nor_prevented(
    home: Home, opened: list[RunSpec], plant: Plant, attack: Attack
) -> None:
    services, cluster = home.services, home.cluster
    home.add_checkpoints(10, "alpha", "beta", "gamma")
    plant(home)
    cluster["gamma"].set_state(home.run_id, 1, "lost")
    asyncio.run(reconcile_run(services, home.run_id))
    assert services.runs.get(home.run_id).state == "interrupted"
    assert asyncio.run(asyncio.wait_for(recover_run(services, home.run_id), 20)) is True
    run = services.runs.get(home.run_id)
    assert (run.state, run.attempt) == ("running", 2)
    assert {"alpha", "gamma"} <= set(run.nodes)
    for name in ("alpha", "gamma"):
        assert cluster[name].intents[-1].spec == home.spec
    assert not [stop for stop in cluster["beta"].stops if stop[1] == 7], "not ours to stop"
    assert not opened, "the stored inputs are used"
    left_out = "beta is left out" in home.texts()
    assert left_out == plant.__name__.startswith("attempt_7")
    attack(given=plant.__name__, tried="resume after a loss", happened=f"runs on {run.nodes}")


def test_a_run_that_stays_lost_is_never_resumed_by_a_home_that_did_not_start_it(
    home: Home, opened: list[RunSpec], tmp_path: Path, attack: Attack
) -> None:
    """A new or restored home without the key needs the user's yes for every run."""
    for node in home.cluster.nodes.values():
        node.set_state(home.run_id, 1, "lost")
    other = make_services(tmp_path / "other", home.cluster)
    asyncio.run(search_nodes(other, home.cluster.names()))
    assert other.runs.store.all() == ()
    assert not other.recoveries.pending()
    assert [one.node for one in other.runs.found()] == ["alpha", "beta", "gamma"]
    assert not opened
    attack(given="a lost run of another key", tried="search", happened="only shown")


def test_a_home_that_lost_its_store_takes_the_settings_that_it_signed(
    home: Home, attack: Attack
) -> None:
    for plant in (changed_settings, changed_ranks, attempt_7_of_a_forged_master):
        plant(home)
    for path in home.services.paths.home.glob("rackless.sqlite3*"):
        path.unlink()
    again = make_services(home.services.paths.home, home.cluster)
    asyncio.run(search_nodes(again, ("beta",)))  # only the liar answers
    run = again.runs.get(home.run_id)
    assert (run.spec, run.nodes, run.attempt) == (home.spec, ("alpha", "beta", "gamma"), 1)
    assert again.runs.is_ours(run)
    assert again.runs.is_trusted(run)
    attack(given="a changed intent", tried="find the run again", happened=run.spec.data.train)


def test_a_restored_store_takes_a_later_launch_of_its_home_as_it_was_signed(home: Home) -> None:
    services, cluster = home.services, home.cluster
    before, (record,) = services.runs.get(home.run_id), services.runs.store.attempts(home.run_id)
    asyncio.run(stop_run(services, home.run_id))
    asyncio.run(resume_run(services, home.run_id, changes=Changes(learning_rate=1e-6)))
    database = services.paths.home / "restored"
    restored = lose_store(services, database, cluster)
    restored.runs.add(before)
    restored.runs.store.save_attempt(record)
    home.cluster["beta"].attempts[home.run_id, 2] = replace(
        home.cluster["beta"].attempts[home.run_id, 2], spec=diary_spec(home)
    )
    asyncio.run(search_nodes(restored, ("beta", "alpha", "gamma")))
    run = restored.runs.get(home.run_id)
    assert (run.attempt, run.spec.learning_rate) == (2, 1e-6)
    assert run.spec.data == home.spec.data
    assert restored.runs.is_ours(run)


def test_a_proof_of_thousands_of_consents_costs_no_time(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, seed = "20260101-000000-abc", make_seed()
    names = home.cluster.names()
    proof = forged_proof(home, run_id, 1)
    consents = dict.fromkeys(names, sign(seed, consent_bytes(run_id, 2, 1, "beta")))
    long = tuple(Handover(attempt=n + 1, replaces=n, consents=consents) for n in range(1, 400))
    home.plant(run_id=run_id, proof=replace(proof, handovers=long))
    verified: list[object] = []
    monkeypatch.setattr(mandates, "prove", lambda proof, rule: verified.append(proof))
    (found,) = asyncio.run(find_runs(home.services))
    assert found.run_id == run_id
    assert all(not one.handovers for one in verified if isinstance(one, AttemptProof))


def test_a_mandate_counts_on_its_own_nodes_only(home: Home) -> None:
    """Beta gives a copy of its folder to a node that has no part in the run."""
    spec = replace(home.spec, nodes=("alpha", "beta"))
    run_id = asyncio.run(start_run(make_free(home), spec))
    copied = home.cluster["beta"].attempts[run_id, 1]
    home.cluster["gamma"].attempts[run_id, 1] = replace(copied, node="beta")
    asyncio.run(search_nodes(home.services, home.cluster.names()))
    assert [(one.run_id, one.node) for one in home.services.runs.found()] == [(run_id, "gamma")]
    assert not home.cluster["gamma"].stops


def make_free(home: Home) -> Services:
    asyncio.run(stop_run(home.services, home.run_id))
    for node in home.cluster.nodes.values():
        node.stops.clear()
    return home.services


# ---------------------------------------------------------------- what the user may do


def test_adopting_a_run_needs_a_yes_to_each_file_that_it_names(
    home: Home, opened: list[RunSpec], attack: Attack
) -> None:
    services = home.services
    planted = home.plant(run_id="20260101-000000-abc", spec=diary_spec(home), proof=None)
    (found,) = asyncio.run(find_runs(services))
    assert DIARY in found.files
    with pytest.raises(UserError, match="not what you agreed to"):
        asyncio.run(adopt_run(services, planted.run_id, "beta", ("/some/other.txt",)))
    assert services.runs.store.get(planted.run_id) is None
    asyncio.run(adopt_run(services, planted.run_id, "beta", found.files))
    run = services.runs.get(planted.run_id)
    assert not services.runs.is_ours(run), "it is only watched"
    assert services.runs.found() == ()
    assert not opened
    home.cluster["beta"].set_state(planted.run_id, 1, "lost")
    asyncio.run(reconcile_run(services, planted.run_id))
    assert not services.recoveries.is_pending(planted.run_id), "nothing resumes it by itself"
    attack(given="a run with a diary", tried="adopt", happened=f"asks: {', '.join(found.files)}")


def test_the_id_of_a_deleted_run_deletes_no_run_of_another_home(home: Home, tmp_path: Path) -> None:
    other = make_services(tmp_path / "other", home.cluster)
    other.runs.store.delete(home.run_id)
    asyncio.run(search_nodes(other, home.cluster.names()))
    assert all(node.deleted == [] for node in home.cluster.nodes.values()), "it is not ours"
    with pytest.raises(UserError, match="was deleted here"):
        asyncio.run(adopt(other, home.run_id, "beta"))


def test_an_ignored_run_is_shown_no_more(home: Home) -> None:
    other_run(home)
    (found,) = asyncio.run(find_runs(home.services))
    ignore_run(home.services, found.run_id, found.node)
    assert home.services.runs.found() == ()
    assert asyncio.run(find_runs(home.services)) == ()


def test_what_an_earlier_version_took_from_nodes_is_not_opened_without_a_yes(
    home: Home, opened: list[RunSpec]
) -> None:
    """It stored runs of other masters as a node described them."""
    services, run_id = home.services, "20260101-000000-abc"
    planted = home.plant(run_id=run_id, spec=diary_spec(home), proof=None, state="lost")
    services.runs.add(
        RunRecord(
            run_id=run_id,
            name="diary",
            state="interrupted",
            spec=diary_spec(home),
            attempt=1,
            nodes=("beta",),
            created_s=1.0,
        )
    )
    services.runs.store.save_attempt(
        AttemptRecord(
            run_id=run_id, attempt=1, placements=planted.all_ranks[1:2], launched_s=1.0, taken=""
        )
    )
    for action in (resume_run(services, run_id), take_over_run(services, run_id)):
        with pytest.raises(UserError, match=DIARY):
            asyncio.run(action)
    assert not opened
    (found,) = asyncio.run(find_runs(services))
    assert DIARY in found.files
    asyncio.run(adopt_run(services, run_id, "beta", found.files))
    assert services.runs.found() == ()
    asyncio.run(take_over_run(services, run_id))
    assert services.runs.is_ours(services.runs.get(run_id))


def test_runs_that_an_earlier_version_launched_stay_ours(home: Home) -> None:
    """They have no proof, on the nodes and in the store."""
    services, cluster = home.services, home.cluster
    (record,) = services.runs.store.attempts(home.run_id)
    services.runs.store.save_attempt(replace(record, is_signed=False))
    for node in cluster.nodes.values():
        node.attempts[home.run_id, 1] = replace(node.attempts[home.run_id, 1], proof=None)
    home.add_checkpoints(10, "alpha", "beta")
    asyncio.run(search_nodes(services, cluster.names()))
    assert services.runs.found() == ()
    attempt_7_without_proof(home)
    asyncio.run(search_nodes(services, cluster.names()))
    assert services.runs.get(home.run_id).attempt == 1, "one node is no majority"
    del cluster["beta"].attempts[home.run_id, 7]
    cluster["gamma"].set_state(home.run_id, 1, "lost")
    asyncio.run(reconcile_run(services, home.run_id))
    asyncio.run(resume_run(services, home.run_id, automatic=Automatic()))
    run = services.runs.get(home.run_id)
    assert (run.attempt, run.state, run.spec) == (2, "running", home.spec)
    asyncio.run(stop_run(services, home.run_id))
    asyncio.run(delete_run(services, home.run_id))


# ---------------------------------------------------------------- checkpoints and journals


def test_a_planted_checkpoint_is_not_what_a_run_resumes_from(home: Home, attack: Attack) -> None:
    services, cluster = home.services, home.cluster
    for rank, name in enumerate(cluster.names()):
        home.write_steps(name, rank, 13)
    home.add_checkpoints(10, "alpha", "beta")
    home.add_checkpoints(3900, "beta")
    # Its own journal says that it got there, and so does one of a rank that is not its own.
    home.write_steps("beta", 1, 3900)
    home.write_steps("beta", 0, 3900)
    home.write_steps("beta", 2, 3900)
    cluster["gamma"].set_state(home.run_id, 1, "lost")
    asyncio.run(reconcile_run(services, home.run_id))
    asyncio.run(resume_run(services, home.run_id, automatic=Automatic()))
    assert {node.intents[-1].resume_step for node in cluster.nodes.values()} == {10}
    assert "step 3900 on beta is left out" in home.texts()
    attack(given="step 3900 and journals for it", tried="resume", happened="resumed from step 10")


def test_another_copy_of_a_genuine_step_replaces_no_other(home: Home, attack: Attack) -> None:
    """All files of it are intact, and it is newer than the others."""
    home.add_checkpoints(10, "alpha", "gamma")
    home.cluster["beta"].add_checkpoint(home.run_id, 10, content="evil")
    planted = home.cluster["beta"].checkpoints[home.run_id, 10]
    home.cluster["beta"].checkpoints[home.run_id, 10] = replace(planted, created_s=9e9)
    for node in home.cluster.nodes.values():
        node.set_state(home.run_id, 1, "lost")
    asyncio.run(reconcile_run(home.services, home.run_id))
    asyncio.run(resume_run(home.services, home.run_id, automatic=Automatic()))
    kept = {n.checkpoints[home.run_id, 10].manifest_sha256 for n in home.cluster.nodes.values()}
    assert kept == {"10"}
    attack(given="another checkpoint of step 10", tried="resume", happened="that of most nodes")


def test_a_journal_of_one_node_does_not_make_checkpoints_void(home: Home) -> None:
    """It says that the attempt started from scratch, after those were saved."""
    home.add_checkpoints(10, "alpha", "beta")
    for _ in range(2):
        for node in home.cluster.nodes.values():
            node.set_state(home.run_id, home.services.runs.get(home.run_id).attempt, "lost")
        line = json.dumps({"kind": "started", "step": 0, "total_steps": 99, "time_s": 1.0}) + "\n"
        home.cluster["beta"].write(home.run_id, 2, "rank-1.jsonl", line.encode())
        asyncio.run(reconcile_run(home.services, home.run_id))
        asyncio.run(resume_run(home.services, home.run_id))
        assert {n.intents[-1].resume_step for n in home.cluster.nodes.values()} == {10}


def test_a_planted_export_is_no_artifact_of_this_home(home: Home) -> None:
    home.cluster["beta"].artifacts["artifacts/evil/1"] = ()
    asyncio.run(search_nodes(home.services, home.cluster.names()))
    assert home.services.artifacts.all() == ()
    assert not set(home.cluster["beta"].calls) - ASKING - {"stream_list", "confirm"}


def test_a_checkpoint_of_an_attempt_that_never_was_is_left_out(home: Home) -> None:
    home.add_checkpoints(10, "alpha", "beta")
    home.cluster["beta"].add_checkpoint(home.run_id, 12, attempt=7)
    home.cluster["gamma"].set_state(home.run_id, 1, "lost")
    asyncio.run(reconcile_run(home.services, home.run_id))
    asyncio.run(resume_run(home.services, home.run_id, automatic=Automatic()))
    assert {n.intents[-1].resume_step for n in home.cluster.nodes.values()} == {10}


def test_a_saved_checkpoint_counts_although_one_node_denies_it(home: Home) -> None:
    for rank, (name, step) in enumerate((("alpha", 13), ("beta", 2), ("gamma", 13))):
        home.write_steps(name, rank, step)
    home.add_checkpoints(5, "alpha", "beta")
    home.add_checkpoints(10, "alpha")
    home.cluster["gamma"].set_state(home.run_id, 1, "lost")
    asyncio.run(reconcile_run(home.services, home.run_id))
    asyncio.run(resume_run(home.services, home.run_id, automatic=Automatic()))
    assert {n.intents[-1].resume_step for n in home.cluster.nodes.values()} == {10}


def test_a_fence_of_one_node_does_not_use_up_the_numbers(home: Home) -> None:
    home.cluster["beta"].fences[home.run_id] = 999_999
    asyncio.run(stop_run(home.services, home.run_id))
    asyncio.run(resume_run(home.services, home.run_id, nodes=("alpha", "gamma")))
    assert home.services.runs.get(home.run_id).attempt == 2


def test_a_claim_of_a_newer_attempt_alone_does_not_end_a_recovery(home: Home) -> None:
    services = home.services
    attempt_7(home)
    run = services.runs.get(home.run_id)
    number, granted = asyncio.run(election.claim_attempt(services, run, home.cluster.names()))
    assert granted == ("alpha", "gamma")
    assert number > 1
    assert "beta is left out: it names a newer attempt" in home.texts()
