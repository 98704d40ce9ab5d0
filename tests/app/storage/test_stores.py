"""Nodes, runs, events and hashes survive in the store, and a lost store gives back the nodes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.key import MAX_COUNT
from agents.contract.messages import to_wire
from agents.contract.node import Calibration
from agents.contract.run import RankPlacement
from agents.contract.spec import DataSpec, RunSpec
from app.events import RunEvent
from app.planning.accuracy.learning import RunOutcome
from app.storage.database import Database, open_database
from app.storage.hashes import HashStore
from app.storage.nodes import NodeStore
from app.storage.planning import CountedData, LinkRecord, PlanningStore
from app.storage.runs import AttemptRecord, RunRecord, RunStore, StoredProgress

SPEC = RunSpec(model="m", data=DataSpec(train="t.jsonl"), nodes=("b", "a"), shares=(1.0, 2.5))
RUN = RunRecord(
    run_id="20261121-141502-k3f",
    name="mine",
    state="running",
    spec=SPEC,
    attempt=2,
    nodes=("b", "a"),
    created_s=5.0,
    progress=StoredProgress(step=3, total_steps=9, loss=1.5),
)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return open_database(tmp_path / "rackless.sqlite3")


def test_nodes_keep_their_order_and_addresses(database: Database, tmp_path: Path) -> None:
    store = NodeStore(database, tmp_path / "nodes.json")
    for name in ("zeta", "alpha", "beta"):
        store.save(name, {"transport": "ssh", "host": name}, {})
    store.save("zeta", {"transport": "local"}, {})
    store.remove("alpha")
    assert [(n.name, n.address.get("host")) for n in store.all()] == [
        ("zeta", None),
        ("beta", "beta"),
    ]


def test_a_run_from_before_a_rule_of_today_is_listed_and_changed(database: Database) -> None:
    store = RunStore(database)
    store.add(RUN)
    old = to_wire(SPEC) | {"precision": "fp64", "max_steps": 10**18, "seed": 2**62}
    old["adapter"] |= {"kind": "qlora"}
    with database.write() as connection:
        connection.execute("UPDATE runs SET spec = ?", (json.dumps(old),))
    (found,) = store.all()
    assert (found.spec.precision, found.spec.max_steps) == ("fp32", MAX_COUNT)
    assert (found.spec.seed, found.spec.nodes) == (2**62, SPEC.nodes)
    changed = store.change(RUN.run_id, lambda run: replace(run, state="failed"))
    assert changed is not None
    assert store.all() == (changed,)


def test_lost_database_takes_the_nodes_from_their_copy(database: Database, tmp_path: Path) -> None:
    NodeStore(database, tmp_path / "nodes.json").save("alpha", {"transport": "local"}, {})
    database.close()
    (tmp_path / "rackless.sqlite3").unlink()
    again = NodeStore(open_database(tmp_path / "rackless.sqlite3"), tmp_path / "nodes.json")
    assert again.all() == ()
    again.restore_from_copy()
    assert [(n.name, n.address) for n in again.all()] == [("alpha", {"transport": "local"})]


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[3]", '[{"name": "x"}]'])
def test_copy_that_was_edited_badly_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "nodes.json").write_text(text)
    store = NodeStore(open_database(tmp_path / "rackless.sqlite3"), tmp_path / "nodes.json")
    store.restore_from_copy()
    assert store.all() == ()


def test_removed_node_does_not_come_back_from_the_copy(database: Database, tmp_path: Path) -> None:
    store = NodeStore(database, tmp_path / "nodes.json")
    store.save("alpha", {"transport": "local"}, {})
    store.remove("alpha")
    again = NodeStore(open_database(tmp_path / "new.sqlite3"), tmp_path / "nodes.json")
    again.restore_from_copy()
    assert again.all() == ()


def test_run_reads_back_as_it_was(database: Database) -> None:
    store = RunStore(database)
    assert store.add(RUN)
    assert store.get(RUN.run_id) == RUN
    assert not store.add(replace(RUN, name="other"))
    assert store.all() == (RUN,)


def test_runs_are_listed_newest_first_and_by_state(database: Database) -> None:
    store = RunStore(database)
    for number, state in enumerate(("done", "running", "failed")):
        store.add(replace(RUN, run_id=str(number), created_s=float(number), state=state))
    assert [run.run_id for run in store.all()] == ["2", "1", "0"]
    assert store.in_states({"running", "failed"}) == ("2", "1")
    assert store.in_states(()) == ()


def test_change_sees_the_row_as_it_stands(database: Database) -> None:
    store = RunStore(database)
    store.add(RUN)
    changed = store.change(RUN.run_id, lambda run: replace(run, message=run.message + "x"))
    assert changed is not None
    assert store.change(RUN.run_id, lambda run: replace(run, message=run.message + "y"))
    assert store.get(RUN.run_id) == replace(RUN, message="xy")
    assert store.change(RUN.run_id, lambda run: None) is None
    assert store.change(RUN.run_id, lambda run: run) is None
    assert store.change("nobody", lambda run: run) is None


def test_deleted_run_cannot_be_entered_again_but_a_discarded_one_can(database: Database) -> None:
    store = RunStore(database)
    store.add(RUN)
    store.discard(RUN.run_id)
    assert store.get(RUN.run_id) is None
    assert store.add(RUN)
    store.delete(RUN.run_id)
    assert store.is_deleted(RUN.run_id)
    assert not store.add(RUN)


def test_attempts_and_events_go_with_their_run(database: Database) -> None:
    store = RunStore(database)
    store.add(RUN)
    place = RankPlacement(rank=0, local_rank=0, node="b", device="cuda:1", device_id="GPU-1")
    attempts = [
        AttemptRecord(
            run_id=RUN.run_id,
            attempt=number,
            placements=(place,),
            resume_step=number * 10,
            launched_s=1.0,
            inputs={"model": {"value": "m"}},
        )
        for number in (2, 1)
    ]
    for attempt in attempts:
        store.save_attempt(attempt)
    event = RunEvent(run_id=RUN.run_id, time_s=1.0, severity="warning", text="a node is silent")
    store.add_event(replace(event, kind="warning"))  # the database has no column for the kind
    assert store.attempts(RUN.run_id) == tuple(reversed(attempts))
    assert store.events(RUN.run_id) == (event,)
    store.delete(RUN.run_id)
    assert store.attempts(RUN.run_id) == ()
    assert store.events(RUN.run_id) == ()


def test_wish_to_search_nodes_is_remembered(database: Database) -> None:
    store = RunStore(database)
    assert not store.must_search_nodes()
    store.set_search_nodes(True)
    store.set_search_nodes(True)
    assert store.must_search_nodes()
    store.set_search_nodes(False)
    assert not store.must_search_nodes()


def test_hash_is_remembered_until_the_file_changes(database: Database, tmp_path: Path) -> None:
    store = HashStore(database)
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = store.sha256(path)
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert store.sha256(path) == first, "size and time are the same, so it was not read again"
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert store.sha256(path) != first


def test_planning_store_gives_back_what_it_was_given(database: Database) -> None:
    store = PlanningStore(database)
    found = Calibration(card="RTX 3090", matrix_flops_per_s=6e13, measured_s=5.0)
    store.save_calibration("alpha", "GPU-1", found)
    store.save_calibration("beta", "GPU-2", found)
    link = LinkRecord(
        node="alpha", peer="beta", round_trip_s=2e-4, bytes_per_s=1.1e8, measured_s=6.0
    )
    store.save_links([link, replace(link, node="beta", peer="alpha")])
    assert store.calibrations()["alpha", "GPU-1"] == found
    assert store.links()[0] == link
    store.forget_node("alpha")
    assert (list(store.calibrations()), store.links()) == ([("beta", "GPU-2")], ())
    assert store.counted("key") is None
    counted = CountedData(num_rows=9, num_tokens=900, longest_tokens=300)
    store.save_counted("key", counted)
    assert store.counted("key") == counted


def test_forecasts_go_with_their_run_and_outcomes_stay(database: Database) -> None:
    RunStore(database).add(RUN)
    store = PlanningStore(database)
    assert store.forecast(RUN.run_id, 2) == ({}, None)
    store.save_forecast(RUN.run_id, 2, {"step_s": 1.5})
    store.save_measured(RUN.run_id, 2, {"step_s": 1.6})
    assert store.forecast(RUN.run_id, 2) == ({"step_s": 1.5}, {"step_s": 1.6})
    outcome = RunOutcome(
        card="RTX 3090", family="llama", adapter="qlora", ended_s=9.0, speed_ratio=0.9
    )
    store.save_outcomes(RUN.run_id, 2, {0: outcome})
    RunStore(database).delete(RUN.run_id)
    assert store.forecast(RUN.run_id, 2) == ({}, None)
    assert store.outcomes() == (outcome,)
