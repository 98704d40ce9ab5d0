"""Stop, resume, reconcile, watch, delete and export, over nodes that fail in every way."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.messages import Progress
from agents.contract.requests.attempts import Attempts
from agents.contract.run import AttemptStatus, RankPlacement
from agents.contract.spec import DataSpec, RunSpec
from app.artifacts.exports.export import export_run
from app.errors import HostKeyChanged, UsageError, UserError
from app.events import Event, EventHub, LogArrived, RunChanged, StepsArrived
from app.runs.checkpoints import find_copies, group_by_step, verify_copies
from app.runs.lifecycle.launch import start_run
from app.runs.lifecycle.reconcile import reconcile_run, search_nodes
from app.runs.lifecycle.resume import Changes
from app.runs.lifecycle.stop import delete_run, stop_run
from app.runs.lifecycle.watch import RunWatch
from app.runs.services import Services
from tests.fakes.adopting import adopt, lose_store
from tests.fakes.cluster import FakeCluster, make_services
from tests.fakes.exports import ask_export
from tests.fakes.resuming import resume_run


def state(services: Services, run_id: str) -> str:
    return services.runs.get(run_id).state


def finish(cluster: FakeCluster, run_id: str, how: str = "done", attempt: int = 1) -> None:
    for node in cluster.nodes.values():
        if (run_id, attempt) in node.attempts:
            node.set_state(run_id, attempt, how)  # type: ignore[arg-type]


# ---------------------------------------------------------------- reconcile


def test_finished_run_is_found_done_with_its_whole_journal(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    for number in (1, 2):
        line = {"kind": "step", "step": number, "loss": 3.0 - number, "time_s": 1.0}
        cluster["alpha"].write(run_id, 1, "rank-0.jsonl", json.dumps(line).encode() + b"\n")
    finish(cluster, run_id)
    asyncio.run(reconcile_run(services, run_id))
    run = services.runs.full_snapshot(run_id)
    assert (run.state, run.step, run.loss, run.first_loss) == ("done", 2, 1.0, 2.0)
    assert run.ended_s is not None


def test_lost_node_stops_the_others_and_says_so(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["gamma"].set_state(run_id, 1, "lost")
    asyncio.run(reconcile_run(services, run_id))
    run = services.runs.get(run_id)
    assert run.state == "interrupted"
    assert run.message.startswith("node gamma lost its part")
    assert run.hint.startswith("It is resumed automatically while the window or `rackless watch`")
    assert cluster["alpha"].stops
    assert cluster["beta"].stops
    assert any("gamma lost its part" in event.text for event in services.runs.events(run_id))


def test_one_look_does_not_give_up_a_silent_node_while_others_train(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["gamma"].reachable = False
    for name in ("alpha", "beta"):
        cluster[name].set_rank(run_id, 1, phase="training", step=5, heartbeat_age_s=0.2)
    asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "running"
    assert "gamma cannot be reached" in services.runs.get(run_id).message


def test_a_node_whose_host_key_has_changed_has_not_lost_its_part(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*asked: object) -> AttemptStatus:
        raise HostKeyChanged("gamma", "SHA256:old", "SHA256:new")

    monkeypatch.setattr(cluster["gamma"], "attempt_status", refuse)
    for name in ("alpha", "beta"):
        cluster[name].set_rank(run_id, 1, phase="training", step=5, heartbeat_age_s=0.2)
    asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "running"
    assert not any(cluster[name].stops for name in ("alpha", "beta"))


def test_one_look_gives_up_a_silent_node_when_the_others_have_waited_for_long(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["gamma"].reachable = False
    for name in ("alpha", "beta"):
        cluster[name].set_rank(run_id, 1, phase="training", step=5, heartbeat_age_s=59.0)
    asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "running", "an outage of up to a minute restarts nothing"
    for name in ("alpha", "beta"):
        cluster[name].set_rank(run_id, 1, phase="training", step=5, heartbeat_age_s=61.0)
    asyncio.run(reconcile_run(services, run_id))
    assert services.runs.get(run_id).message.startswith("node gamma was lost at step 5")


def test_loading_ranks_are_never_called_standing(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["gamma"].reachable = False
    for name in ("alpha", "beta"):
        cluster[name].set_rank(run_id, 1, phase="loading", heartbeat_age_s=500.0)
    asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "running"


def test_launcher_that_died_half_way_is_cleaned_up(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.change(run_id, lambda run: replace(run, state="launching"))
    del cluster["beta"].attempts[run_id, 1]
    asyncio.run(reconcile_run(services, run_id))
    run = services.runs.get(run_id)
    assert run.state == "interrupted"
    assert "beta does not have its part" in run.message
    assert cluster["alpha"].attempts[run_id, 1].state == "stopped"


def test_launcher_that_died_after_its_last_launch_lets_the_run_go_on(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.change(run_id, lambda run: replace(run, state="launching"))
    asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "running"


def test_living_launcher_is_left_alone(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.change(run_id, lambda run: replace(run, state="launching"))
    cluster["beta"].attempts.clear()
    with services.launching(run_id):
        asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "launching"
    assert not cluster["alpha"].stops


def test_start_that_died_before_any_node_was_asked(services: Services, run_id: str) -> None:
    services.runs.change(run_id, lambda run: replace(run, state="created"))
    asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "failed"
    assert "before any node was asked" in services.runs.get(run_id).message


def test_master_that_died_while_stopping_is_taken_over(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.change(run_id, lambda run: replace(run, state="stopping", stop_asked=True))
    cluster["alpha"].set_state(run_id, 1, "stopped")
    asyncio.run(reconcile_run(services, run_id))
    asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "stopped"
    assert not cluster["alpha"].stops
    assert cluster["beta"].stops


# ---------------------------------------------------------------- what nodes remember


def test_lost_store_finds_its_runs_again(
    tmp_path: Path, services: Services, cluster: FakeCluster, run_id: str
) -> None:
    line = {"kind": "step", "step": 3, "loss": 1.0, "time_s": 1.0}
    cluster["beta"].write(run_id, 1, "rank-1.jsonl", json.dumps(line).encode() + b"\n")
    again = lose_store(services, tmp_path / "other", cluster)
    assert asyncio.run(search_nodes(again, cluster.names())) == ()
    found, lost = again.runs.full_snapshot(run_id), services.runs.full_snapshot(run_id)
    assert (found.state, found.step) == ("running", 3)
    assert (found.spec, found.nodes, found.attempt) == (lost.spec, lost.nodes, lost.attempt)
    assert [rank.node for rank in found.ranks] == ["alpha", "beta", "gamma"]


def test_search_tells_who_was_silent(services: Services, cluster: FakeCluster) -> None:
    cluster["beta"].reachable = False
    assert asyncio.run(search_nodes(services, cluster.names())) == ("beta",)


def test_zombie_of_a_run_that_is_over_is_ended_when_its_node_returns(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["gamma"].reachable = False
    for name in ("alpha", "beta"):
        cluster[name].set_rank(run_id, 1, phase="training", step=5, heartbeat_age_s=60.0)
    asyncio.run(reconcile_run(services, run_id))
    assert state(services, run_id) == "interrupted"
    cluster["gamma"].reachable = True
    asyncio.run(search_nodes(services, ("gamma",)))
    assert cluster["gamma"].attempts[run_id, 1].state == "stopped"
    assert state(services, run_id) == "interrupted"


def test_old_attempt_on_a_node_that_returns_is_ended_and_the_new_one_goes_on(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.change(
        run_id, lambda run: replace(run, attempt=2, nodes=("alpha",), state="running")
    )
    old = cluster["gamma"].attempts[run_id, 1]
    cluster["alpha"].attempts[run_id, 2] = replace(old, attempt=2, node="alpha")
    asyncio.run(search_nodes(services, ("alpha", "gamma")))
    assert cluster["gamma"].attempts[run_id, 1].state == "stopped"
    assert cluster["alpha"].attempts[run_id, 2].state == "running"
    assert state(services, run_id) == "running"


def test_newer_attempt_of_another_master_is_watched_once_the_user_adopts_it(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    finish(cluster, run_id, "stopped")
    asyncio.run(reconcile_run(services, run_id))
    ranks = (RankPlacement(rank=0, local_rank=0, node="beta", device="cpu"),)
    cluster["beta"].attempts[run_id, 2] = AttemptStatus(
        run_id=run_id,
        attempt=2,
        node="beta",
        state="running",
        all_ranks=ranks,
        spec=services.runs.get(run_id).spec,
    )
    asyncio.run(search_nodes(services, ("beta",)))
    assert (services.runs.get(run_id).state, services.runs.get(run_id).attempt) == ("stopped", 1)
    asyncio.run(adopt(services, run_id, "beta"))
    run = services.runs.get(run_id)
    assert (run.state, run.attempt, run.nodes) == ("running", 2, ("beta",))
    assert not [stop for stop in cluster["beta"].stops if stop[1] == 2]


def test_launch_of_another_master_is_not_disturbed(
    tmp_path: Path, cluster: FakeCluster, services: Services, run_id: str
) -> None:
    """A second master that sees only half of a launch must not take it for a broken one."""
    other = make_services(tmp_path / "other", cluster)
    part = cluster["gamma"].attempts.pop((run_id, 1))
    asyncio.run(adopt(other, run_id))
    assert not any(node.stops for node in cluster.nodes.values())
    cluster["gamma"].attempts[run_id, 1] = part
    asyncio.run(reconcile_run(other, run_id))
    assert other.runs.get(run_id).state == "running"


def test_deleted_run_is_deleted_on_a_node_that_returns(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    finish(cluster, run_id)
    cluster["gamma"].reachable = False
    later = asyncio.run(delete_run(services, run_id))
    assert later == ("gamma",)
    cluster["gamma"].reachable = True
    asyncio.run(search_nodes(services, ("gamma",)))
    assert cluster["gamma"].deleted == [run_id]
    assert services.runs.store.all() == ()


# ---------------------------------------------------------------- stop and delete


def test_stop_gives_time_to_save_and_a_second_stop_none(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["alpha"].stop_error = UserError("it takes its time")
    with pytest.raises(UserError, match="takes its time"):
        asyncio.run(stop_run(services, run_id))
    cluster["alpha"].stop_error = None
    asyncio.run(stop_run(services, run_id))
    graces = [grace for _, _, grace in cluster["alpha"].stops]
    assert graces[0] == 120.0
    assert graces[-1] == 0.0
    assert state(services, run_id) == "stopped"


def test_stop_says_at_once_what_it_waits_for(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["alpha"].set_rank(run_id, 1, phase="saving", step=7)
    cluster["beta"].set_state(run_id, 1, "stopping", "Rank 1 on node beta has stood still.")
    cluster["gamma"].set_state(run_id, 1, "done")
    for name in ("alpha", "beta"):
        cluster[name].stop_delay_s = 0.3
    said: list[str] = []
    asyncio.run(stop_run(services, run_id, said.append))
    assert said == [
        "waiting up to 2 min: alpha: rank 0 is saving after step 7; "
        "Rank 1 on node beta has stood still"
    ]


def test_stop_of_a_run_that_is_over_is_refused(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    asyncio.run(stop_run(services, run_id))
    with pytest.raises(UserError, match="is stopped, not active"):
        asyncio.run(stop_run(services, run_id))


def test_stop_names_the_node_that_it_could_not_reach(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["gamma"].reachable = False
    asyncio.run(stop_run(services, run_id))
    run = services.runs.get(run_id)
    assert run.state == "stopped"
    assert "gamma" in run.message


def test_stop_without_any_node_tells_and_the_second_gives_up(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    for node in cluster.nodes.values():
        node.reachable = False
    with pytest.raises(UserError, match="may still be training there"):
        asyncio.run(stop_run(services, run_id))
    assert state(services, run_id) == "stopping"
    asyncio.run(stop_run(services, run_id))
    assert state(services, run_id) == "stopped"
    assert "given up" in services.runs.get(run_id).message
    cluster["beta"].reachable = True
    asyncio.run(search_nodes(services, ("beta",)))
    assert cluster["beta"].attempts[run_id, 1].state == "stopped"


def test_stop_ends_what_a_run_that_is_over_has_left(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.move(run_id, 1, "failed", "node alpha was lost", "")
    for name in ("beta", "gamma"):
        cluster[name].set_state(run_id, 1, "done")
    asyncio.run(stop_run(services, run_id))
    assert cluster["alpha"].attempts[run_id, 1].state == "stopped"
    assert not cluster["beta"].stops
    assert state(services, run_id) == "failed"
    events = [event.text for event in services.runs.events(run_id)]
    assert "attempt 1 was still running on alpha; it is stopped" in events
    cluster["gamma"].reachable = False
    with pytest.raises(UserError) as refused:
        asyncio.run(stop_run(services, run_id))
    assert refused.value.hint == (
        "There is nothing to stop on the nodes that answer; gamma cannot be reached."
    )


def test_delete_ends_what_a_run_that_is_over_has_left(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.move(run_id, 1, "failed", "node alpha was lost", "")
    assert asyncio.run(delete_run(services, run_id)) == ()
    assert cluster["alpha"].stops == [(run_id, 1, 0.0)]
    assert cluster["alpha"].deleted == [run_id]


def test_delete_that_a_node_refuses_keeps_the_run_and_says_why(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    finish(cluster, run_id)
    cluster["beta"].delete_error = UserError("the disk of beta is read-only", "Remount it.")
    with pytest.raises(UserError) as refused:
        asyncio.run(delete_run(services, run_id))
    assert refused.value.message == (
        f"run {run_id} could not be deleted on beta: the disk of beta is read-only"
    )
    assert refused.value.hint == f"Remount it. Then delete it again: rackless runs delete {run_id}"
    assert services.runs.get(run_id).state == "done"
    cluster["beta"].delete_error = None
    asyncio.run(delete_run(services, run_id))
    assert services.runs.store.all() == ()


def test_delete_spares_what_another_master_has_resumed(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    finish(cluster, run_id)
    resumed = replace(cluster["alpha"].attempts[run_id, 1], attempt=2, state="running")
    cluster["alpha"].attempts[run_id, 2] = resumed
    with pytest.raises(UserError, match="attempt 2 is running there; another master resumed it"):
        asyncio.run(delete_run(services, run_id))
    assert cluster["alpha"].attempts[run_id, 2].state == "running"


def test_launch_is_confirmed_on_every_node(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    assert all(node.attempts[run_id, 1].is_confirmed for node in cluster.nodes.values())
    assert all(node.intents[0].confirm_s == 30.0 for node in cluster.nodes.values())


def test_part_that_its_launcher_could_not_confirm_is_confirmed_by_who_sees_all_parts(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    services.runs.change(run_id, lambda run: replace(run, state="launching"))
    cluster["beta"].set_state(run_id, 1, "running", is_confirmed=False)
    cluster["gamma"].reachable = False
    asyncio.run(reconcile_run(services, run_id))
    assert not cluster["beta"].attempts[run_id, 1].is_confirmed  # gamma may have no part
    cluster["gamma"].reachable = True
    asyncio.run(reconcile_run(services, run_id))
    assert cluster["beta"].attempts[run_id, 1].is_confirmed


def test_active_run_cannot_be_deleted(services: Services, run_id: str) -> None:
    with pytest.raises(UserError, match="is running and cannot be deleted"):
        asyncio.run(delete_run(services, run_id))
    assert services.runs.get(run_id)


def test_delete_removes_mirrors_and_store(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["alpha"].write(run_id, 1, "rank-0.log", b"text")
    finish(cluster, run_id)
    asyncio.run(delete_run(services, run_id))
    assert not services.paths.run(run_id).exists()
    assert all(node.deleted == [run_id] for node in cluster.nodes.values())


# ---------------------------------------------------------------- resume


def test_resume_on_the_rest_from_the_newest_checkpoint(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    asyncio.run(resume_run(services, interrupted))
    run = services.runs.get(interrupted)
    assert (run.state, run.attempt, run.nodes) == ("running", 2, ("alpha", "beta"))
    intent = cluster["alpha"].intents[-1]
    assert (intent.attempt, intent.resume_step) == (2, 10)
    for name in ("alpha", "beta"):
        calls = cluster[name].calls
        assert calls.index("run_fence") < len(calls) - calls[::-1].index("launch") - 1
        assert cluster[name].fences[interrupted] == 2
    assert run.message == ""


def test_damaged_copies_are_passed_over_and_removed(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    for name in ("alpha", "beta"):
        cluster[name].damaged.add(10)
    asyncio.run(resume_run(services, interrupted))
    assert cluster["alpha"].intents[-1].resume_step == 5
    assert (interrupted, 10) not in cluster["alpha"].checkpoints
    texts = [event.text for event in services.runs.events(interrupted)]
    assert sum("is damaged: state.json was changed" in text for text in texts) == 2


def test_checkpoint_whose_manifest_is_damaged_is_told_and_passed_over(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    """Its attempt is not known, which is no reason not to speak of it."""
    problem = "manifest.json cannot be used: it is missing or not JSON"
    for name in ("alpha", "beta"):
        cluster[name].damaged.add(15)
        cluster[name].add_checkpoint(interrupted, 15)
        whole = cluster[name].checkpoints[interrupted, 15]
        cluster[name].checkpoints[interrupted, 15] = replace(
            whole, attempt=0, manifest_sha256="", verified=False, problem=problem
        )
    copies = asyncio.run(find_copies(services, interrupted, ("alpha", "beta")))
    listed = group_by_step(copies)[0]
    assert (listed.step, listed.verified) == (15, False)
    assert listed.problem == f"alpha: {problem}; beta: {problem}"
    asyncio.run(resume_run(services, interrupted))
    assert cluster["alpha"].intents[-1].resume_step == 10
    assert (interrupted, 15) not in cluster["alpha"].checkpoints
    texts = [event.text for event in services.runs.events(interrupted)]
    assert sum("checkpoint of step 15 on" in text and "is damaged" in text for text in texts) == 2


def test_one_damaged_copy_is_replaced_by_the_whole_one(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["alpha"].damaged.add(10)
    asyncio.run(resume_run(services, interrupted))
    assert cluster["alpha"].intents[-1].resume_step == 10
    assert [(s, t) for s, t, _ in cluster.copies] == [("beta", "alpha")]


def test_a_node_that_is_named_twice_is_refused(services: Services, interrupted: str) -> None:
    with pytest.raises(UsageError, match="nodes has 'alpha' twice"):
        asyncio.run(resume_run(services, interrupted, nodes=("alpha", "beta", "alpha")))
    assert services.runs.get(interrupted).attempt == 1


def test_a_run_goes_on_in_another_way_from_a_resume_on(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    cluster["alpha"].add_checkpoint(run_id, 10)
    asyncio.run(stop_run(services, run_id))
    before = services.runs.get(run_id).spec.parallel
    asyncio.run(resume_run(services, run_id, changes=Changes(parallel="data")))
    intent = cluster["beta"].intents[-1]
    assert (intent.resume_step, intent.spec.parallel) == (10, "data")
    assert services.runs.get(run_id).spec.parallel == "data" != before
    told = [event.text for event in services.runs.events(run_id)]
    assert f"parallel is data instead of {before} from step 11 on" in told


def test_a_way_that_the_settings_exclude_is_refused_before_anything_is_stopped(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    spec = replace(spec, parallel="data", compression="powersgd")
    run_id = asyncio.run(start_run(services, spec))
    finish(cluster, run_id, "failed")
    with pytest.raises(UsageError, match="compression") as refused:
        asyncio.run(resume_run(services, run_id, changes=Changes(parallel="pipeline")))
    assert refused.value.hint == "Resume it as before, or in another way."
    assert services.runs.get(run_id).attempt == 1


def test_checkpoint_is_copied_to_a_node_that_lacks_it(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["gamma"].reachable = True
    asyncio.run(resume_run(services, interrupted, nodes=("gamma", "alpha")))
    assert [(s, t) for s, t, _ in cluster.copies] == [("alpha", "gamma")]
    assert services.runs.get(interrupted).nodes == ("gamma", "alpha")


def test_chosen_step_voids_what_came_after(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    asyncio.run(resume_run(services, interrupted, checkpoint=5))
    assert cluster["beta"].intents[-1].resume_step == 5
    assert (interrupted, 10) not in cluster["beta"].checkpoints
    cluster["gamma"].reachable = True
    cluster["gamma"].add_checkpoint(interrupted, 10)
    copies = asyncio.run(find_copies(services, interrupted, cluster.names()))
    assert {copy.info.step for copy in copies} == {5}, "gamma's old step 10 no longer counts"


def test_chosen_step_voids_nothing_when_the_resume_fails_before_its_launch(
    services: Services, cluster: FakeCluster, interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster["gamma"].reachable = True
    push = cluster.push

    async def refuse(name: str, *more: Any) -> str:
        if name == "gamma":
            raise UserError("the disk of gamma is full")
        return await push(name, *more)

    monkeypatch.setattr(cluster, "push", refuse)
    with pytest.raises(UserError, match="gamma is full"):
        asyncio.run(
            resume_run(services, interrupted, checkpoint=5, nodes=("alpha", "beta", "gamma"))
        )
    assert {step for _, step in cluster["beta"].checkpoints} == {5, 10}
    assert services.runs.get(interrupted).state == "interrupted"


def test_step_that_is_not_there_is_refused_with_those_that_are(
    services: Services, interrupted: str
) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 7") as refused:
        asyncio.run(resume_run(services, interrupted, checkpoint=7))
    assert "10, 5" in refused.value.hint
    assert state(services, interrupted) == "interrupted"


def test_without_any_checkpoint_it_starts_again(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    asyncio.run(stop_run(services, run_id))
    asyncio.run(resume_run(services, run_id))
    assert cluster["alpha"].intents[-1].resume_step is None
    texts = [event.text for event in services.runs.events(run_id)]
    assert any("starts from the beginning" in text for text in texts)


def test_run_is_not_started_again_while_its_checkpoints_are_out_of_reach(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    for name in ("alpha", "beta"):
        line = {"kind": "checkpoint", "step": 10, "seconds": 1.0}
        services.runs.mirror(interrupted, 1, name).append(
            f"rank-{int(name == 'beta')}.jsonl", 0, json.dumps(line).encode() + b"\n"
        )
        cluster[name].reachable = False
    cluster["gamma"].reachable = True
    before = services.runs.get(interrupted)
    with pytest.raises(UserError) as refused:
        asyncio.run(resume_run(services, interrupted))
    assert "of step 10, is on nodes that cannot be reached (alpha and beta)" in str(refused.value)
    assert refused.value.hint.startswith("Turn on alpha or beta and resume again, or start a new")
    assert services.runs.get(interrupted) == before
    assert len(cluster["gamma"].intents) == 1
    texts = [event.text for event in services.runs.events(interrupted)]
    assert not any("starts from the beginning" in text for text in texts)
    cluster["alpha"].reachable = True
    asyncio.run(resume_run(services, interrupted))
    assert cluster["alpha"].intents[-1].resume_step == 10


def save_on_gamma_alone(services: Services, run_id: str, *steps: int) -> None:
    """Let gamma's journal tell of checkpoints that no other node has."""
    for step in steps:
        line = json.dumps({"kind": "checkpoint", "step": step, "seconds": 1.0}).encode()
        mirror = services.runs.mirror(run_id, 1, "gamma")
        mirror.append("rank-2.jsonl", mirror.sizes().get("rank-2.jsonl", 0), line + b"\n")


def test_resume_that_costs_one_checkpoint_says_so(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    save_on_gamma_alone(services, interrupted, 10, 15)
    asyncio.run(resume_run(services, interrupted))
    assert cluster["alpha"].intents[-1].resume_step == 10
    texts = [event.text for event in services.runs.events(interrupted)]
    told = "resuming from step 10: the checkpoint of step 15 is on gamma, which cannot be reached"
    assert told in texts


def test_resume_that_costs_several_checkpoints_is_refused_until_it_is_asked_for(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    save_on_gamma_alone(services, interrupted, 15, 20, 25)
    before = services.runs.get(interrupted)
    with pytest.raises(UserError) as refused:
        asyncio.run(resume_run(services, interrupted))
    assert refused.value.message == (
        f"resuming run {interrupted} from step 10 discards 3 newer checkpoints, up to step 25: "
        "they are on nodes that cannot be reached (gamma)"
    )
    assert refused.value.hint == (
        "Turn on gamma and resume again, or discard them: rackless runs resume "
        f"{interrupted} --checkpoint 10. No checkpoint was touched."
    )
    assert services.runs.get(interrupted) == before
    assert len(cluster["alpha"].checkpoints) == 2
    asyncio.run(resume_run(services, interrupted, checkpoint=10))
    assert cluster["alpha"].intents[-1].resume_step == 10
    asyncio.run(stop_run(services, interrupted))
    asyncio.run(resume_run(services, interrupted))
    assert cluster["alpha"].intents[-1].resume_step == 10, "gamma's do not count any more"


def test_run_is_not_started_again_while_nobody_knows_what_was_saved(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    """This PC was off when the checkpoints were written, so no journal here tells of them."""
    cluster["alpha"].reachable = cluster["beta"].reachable = False
    cluster["gamma"].reachable = True
    with pytest.raises(UserError, match=r"may hold its checkpoints.*\(alpha and beta\)"):
        asyncio.run(resume_run(services, interrupted))
    assert len(cluster["gamma"].intents) == 1
    cluster["alpha"].checkpoints.clear()
    cluster["alpha"].reachable = True
    asyncio.run(resume_run(services, interrupted))
    assert cluster["gamma"].intents[-1].resume_step is None, "alpha would hold it as beta does"


def test_run_whose_checkpoints_are_all_damaged_is_not_started_again(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    for name in ("alpha", "beta"):
        cluster[name].damaged.update({5, 10})
    before = services.runs.get(interrupted)
    with pytest.raises(UserError) as refused:
        asyncio.run(resume_run(services, interrupted))
    assert "(step 10 on alpha and beta, step 5 on alpha and beta)" in refused.value.message
    assert "start a new run with the same settings" in refused.value.hint
    assert services.runs.get(interrupted) == before
    assert [len(cluster[name].checkpoints) for name in ("alpha", "beta")] == [2, 2]
    assert len(cluster["alpha"].intents) == 1


def test_checkpoint_that_was_brought_to_other_nodes_is_known_there(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["gamma"].reachable = True
    asyncio.run(resume_run(services, interrupted, checkpoint=5, nodes=("gamma",)))
    asyncio.run(stop_run(services, interrupted))
    cluster["gamma"].reachable = False
    for name in ("alpha", "beta"):
        cluster[name].checkpoints.clear()
    with pytest.raises(UserError, match=r"known, of step 5, is on nodes.*\(gamma\)"):
        asyncio.run(resume_run(services, interrupted, nodes=("alpha", "beta")))
    del cluster.nodes["gamma"]
    with pytest.raises(UserError) as refused:
        asyncio.run(resume_run(services, interrupted, nodes=("alpha", "beta")))
    assert refused.value.hint.startswith("Add gamma to the nodes again, or start a new run")


def test_checkpoint_that_was_taken_off_its_nodes_is_missed(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    progress = replace(services.runs.get(interrupted).progress, newest_checkpoint_step=10)
    services.runs.change(interrupted, lambda run: replace(run, progress=progress))
    for name in ("alpha", "beta"):
        cluster[name].checkpoints.clear()
    with pytest.raises(UserError, match=r"of step 10, is no longer on alpha and beta"):
        asyncio.run(resume_run(services, interrupted))


def test_resume_of_an_active_or_finished_run_is_refused(
    services: Services, cluster: FakeCluster, run_id: str
) -> None:
    with pytest.raises(UserError, match="is running and cannot be resumed"):
        asyncio.run(resume_run(services, run_id))
    finish(cluster, run_id)
    with pytest.raises(UserError, match="is done"):
        asyncio.run(resume_run(services, run_id))


def test_resume_without_any_of_its_nodes_is_refused(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    for node in cluster.nodes.values():
        node.reachable = False
    with pytest.raises(UserError, match="no node of the run answers"):
        asyncio.run(resume_run(services, interrupted))
    assert state(services, interrupted) == "interrupted"

    async def refuse(*asked: object) -> Attempts:
        raise HostKeyChanged("beta", "SHA256:old", "SHA256:new")

    cluster["beta"].attempt_list = refuse  # type: ignore[method-assign]
    with pytest.raises(HostKeyChanged):  # what a person can do something about
        asyncio.run(resume_run(services, interrupted))
    cluster["alpha"].reachable = True
    asyncio.run(resume_run(services, interrupted))
    assert services.runs.get(interrupted).nodes == ("alpha",)


def test_attempt_number_rises_above_what_any_node_knows(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["beta"].fences[interrupted] = 6
    asyncio.run(resume_run(services, interrupted))
    assert services.runs.get(interrupted).attempt == 7
    assert cluster["alpha"].fences[interrupted] == 7


def test_resume_uses_the_data_of_the_first_launch(
    services: Services, cluster: FakeCluster, interrupted: str, spec: RunSpec
) -> None:
    first = cluster["alpha"].intents[0]
    Path(spec.data.train).write_text('{"text": "something else"}\n')
    asyncio.run(resume_run(services, interrupted))
    assert cluster["alpha"].intents[-1].train_path == first.train_path


def test_given_shares_are_measured_again_on_other_ranks(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    run_id = asyncio.run(start_run(services, replace(spec, shares=(1.0, 2.0, 3.0))))
    asyncio.run(stop_run(services, run_id))
    asyncio.run(resume_run(services, run_id, nodes=("alpha", "beta")))
    assert cluster["alpha"].intents[-1].spec.shares is None
    assert services.runs.get(run_id).spec.shares == (1.0, 2.0, 3.0)


def test_resume_that_cannot_launch_is_failed_and_can_be_tried_again(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["beta"].launch_error = UserError("out of disk")
    with pytest.raises(UserError, match="out of disk"):
        asyncio.run(resume_run(services, interrupted))
    assert state(services, interrupted) == "failed"
    cluster["beta"].launch_error = None
    asyncio.run(resume_run(services, interrupted))
    assert (state(services, interrupted), services.runs.get(interrupted).attempt) == ("running", 3)


# ---------------------------------------------------------------- checkpoints and export


def test_checkpoints_are_listed_with_their_holders(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["beta"].damaged.add(10)
    copies = asyncio.run(find_copies(services, interrupted, cluster.names()))
    listed = group_by_step(copies)
    assert [(c.step, c.nodes, c.verified) for c in listed] == [
        (10, ("alpha", "beta"), None),
        (5, ("alpha", "beta"), None),
    ]
    checked = group_by_step(asyncio.run(verify_copies(services.pool, copies)))
    assert [(c.step, c.verified) for c in checked] == [(10, False), (5, True)]
    assert checked[0].problem == "beta: state.json was changed"


def test_copies_that_differ_are_not_verified(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    cluster["beta"].add_checkpoint(interrupted, 10, content="other")
    copies = asyncio.run(find_copies(services, interrupted, cluster.names()))
    newest = group_by_step(asyncio.run(verify_copies(services.pool, copies)))[0]
    assert (newest.verified, newest.problem) == (False, "the copies differ")


def test_export_merges_where_the_checkpoint_lies(
    services: Services, cluster: FakeCluster, interrupted: str, tmp_path: Path
) -> None:
    told: list[str] = []
    out = tmp_path / "new" / "model"
    made = asyncio.run(export_run(services, ask_export(interrupted), out, told.append))
    assert (made.path, made.verdicts) == (out, ())
    assert out.is_dir()
    job = cluster["alpha"].merges[0]
    assert (job.step, job.destination) == (10, f"runs/{interrupted}/exports/merged-10")
    assert job.model_path.startswith("/agent/models/model-")
    assert told


def test_export_into_an_empty_folder_is_fine_and_into_a_full_one_refused(
    services: Services, interrupted: str, tmp_path: Path
) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "precious").write_text("")
    asyncio.run(export_run(services, ask_export(interrupted), empty))
    for place in (full, full / "precious"):
        with pytest.raises(UserError, match=r"is not empty|is a file"):
            asyncio.run(export_run(services, ask_export(interrupted), place))
    assert (full / "precious").exists()


def test_export_formats(services: Services, interrupted: str, tmp_path: Path) -> None:
    def refuse(to: str, *types: str) -> None:
        asyncio.run(export_run(services, ask_export(interrupted, to, types=types), tmp_path / "x"))

    with pytest.raises(UsageError, match="zip is no export format"):
        refuse("zip")
    with pytest.raises(UsageError, match="gguf has no type Q4"):
        refuse("gguf", "Q8_0", "Q4")
    with pytest.raises(UsageError, match="nf4 has no type Q8_0"):
        refuse("nf4", "Q8_0")
    with pytest.raises(UsageError, match="one type at a time"):
        refuse("gptq", "4-bit", "8-BIT")
    assert not (tmp_path / "x").exists()


def test_export_goes_where_there_is_room(
    services: Services, interrupted: str, cluster: FakeCluster, spec: RunSpec, tmp_path: Path
) -> None:
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    }  # fmt: skip
    Path(spec.model, "config.json").write_text(json.dumps(config))
    for name, free_gib in (("alpha", 10), ("beta", 40)):
        node = cluster[name]
        node.facts_now = replace(node.facts_now, disk_free_bytes=free_gib << 30)
    reports: list[Progress] = []
    request = ask_export(interrupted, "gguf")
    asyncio.run(export_run(services, request, tmp_path / "x", reports.append))
    assert not cluster["alpha"].made
    assert len(cluster["beta"].made) == 1
    expected = "expected: Q8_0 6.7 GiB; 19.8 GiB on the node while it is made"
    assert expected in [report.message for report in reports]
    cluster["beta"].facts_now = replace(cluster["beta"].facts_now, disk_free_bytes=19 << 30)
    with pytest.raises(
        UserError, match=r"alpha needs 19\.8 GiB on its disk, and 10\.0 GiB are free"
    ):
        asyncio.run(export_run(services, ask_export(interrupted, "gguf"), tmp_path / "y"))
    assert not (tmp_path / "y").exists()


def test_export_quantizes_what_it_has_merged_where_that_lies(
    services: Services, interrupted: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    kinds = ("q8_0", "Q4_K_M", "Q8_0")
    cluster["alpha"].facts_now = replace(cluster["alpha"].facts_now, compiler="/usr/bin/cc")
    asyncio.run(export_run(services, ask_export(interrupted, "gguf", types=kinds), tmp_path / "x"))
    asyncio.run(export_run(services, ask_export(interrupted, "gguf"), tmp_path / "y"))
    asyncio.run(export_run(services, ask_export(interrupted, "nf4"), tmp_path / "z"))
    asyncio.run(export_run(services, ask_export(interrupted, "gptq"), tmp_path / "u"))
    node = cluster["alpha"]
    first, second, third, fourth = node.made
    assert fourth.types == ("4-bit",)
    assert fourth.packages not in (None, first.packages)
    assert (first.types, second.types, third.types) == (("Q8_0", "Q4_K_M"), ("Q8_0",), ())
    assert first.model == node.merges[0].destination
    assert first.packages is not None
    assert third.packages is None, "the training environment has what NF4 needs"
    assert first.origin.run_id == interrupted
    assert first.train.path.startswith("/agent/data/")
    assert re.fullmatch(f"runs/{interrupted}/exports/nf4-10-[0-9a-f]{{8}}", third.destination)
    assert not node.artifacts, "what was fetched is not left on the node"


def test_export_is_calibrated_with_a_file_of_ones_own(
    services: Services, interrupted: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    file = tmp_path / "own.txt"
    for text, problem in (("only three words", "has 3 words"), ("w " * 64, "")):
        file.write_text(text)
        made = export_run(
            services,
            ask_export(interrupted, "awq", node="beta", calibration=str(file)),
            tmp_path / "x",
        )
        if problem:
            with pytest.raises(UserError, match=problem):
                asyncio.run(made)
            assert not cluster["beta"].merges
        else:
            asyncio.run(made)
    (job,) = cluster["beta"].made
    assert job.calibration is not None
    assert job.calibration.path.startswith("/agent/data/own")
    with pytest.raises(UsageError, match="nf4 is not calibrated"):
        asyncio.run(
            export_run(
                services, ask_export(interrupted, "nf4", calibration=str(file)), tmp_path / "y"
            )
        )


def test_export_without_a_checkpoint(services: Services, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no whole checkpoint"):
        asyncio.run(export_run(services, ask_export(run_id), tmp_path / "x"))


# ---------------------------------------------------------------- watch


async def watch(services: Services, run_id: str, hub: EventHub) -> None:
    await RunWatch(services, services.runs.get(run_id), hub).run_until_end()


def test_watch_publishes_steps_and_log_bytes_until_the_end(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runs.lifecycle.watch.JUDGE_INTERVAL_S", 0.05)
    seen: list[Event] = []
    hub = services.runs._events

    async def scenario() -> None:
        with hub.listening(seen.append):
            task = asyncio.create_task(watch(services, run_id, hub))
            for number in range(1, 30):
                line = {"kind": "step", "step": number, "loss": 1.0, "time_s": 1.0}
                cluster["alpha"].write(run_id, 1, "rank-0.jsonl", json.dumps(line).encode() + b"\n")
                cluster["beta"].write(run_id, 1, "rank-1.log", b"line %d\n" % number)
                await asyncio.sleep(0.01)
            finish(cluster, run_id)
            await asyncio.wait_for(task, 10)

    began_s = time.monotonic()
    asyncio.run(scenario())
    took_s = time.monotonic() - began_s
    steps = [s.step for event in seen if isinstance(event, StepsArrived) for s in event.steps]
    assert steps == list(range(1, 30))
    log = sorted((e.offset, e.data) for e in seen if isinstance(e, LogArrived))
    assert b"".join(data for _, data in log) == b"".join(b"line %d\n" % n for n in range(1, 30))
    changes = [event for event in seen if isinstance(event, RunChanged)]
    assert changes[-1].run.state == "done"
    assert len(changes) < 10 * took_s + 15, "told more than ten times a second"


def test_watch_names_the_node_that_fell_silent_for_good(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runs.lifecycle.watch.JUDGE_INTERVAL_S", 0.05)
    services.settings.set("lost_after_s", 3.0)
    for name in ("alpha", "beta"):
        cluster[name].set_rank(run_id, 1, phase="training", step=8, heartbeat_age_s=99.0)
    cluster["gamma"].reachable = False
    asyncio.run(asyncio.wait_for(watch(services, run_id, EventHub()), 20))
    assert services.runs.get(run_id).message.startswith("node gamma was lost at step 8")
    assert cluster["alpha"].attempts[run_id, 1].state == "stopped"


def test_a_node_that_never_answers_delays_no_judgement(
    services: Services, cluster: FakeCluster, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runs.lifecycle.watch.JUDGE_INTERVAL_S", 1.0)
    asked = asyncio.Event()

    async def vanish(*args: object) -> AttemptStatus:
        asked.set()
        await asyncio.sleep(60)
        raise AssertionError("a question times out")

    cluster["gamma"].attempt_status = vanish  # type: ignore[method-assign]

    async def scenario() -> float:
        task = asyncio.create_task(watch(services, run_id, EventHub()))
        await asked.wait()
        asked.clear()
        await asked.wait()  # it is known to be silent now
        for name in ("alpha", "beta"):
            cluster[name].set_state(run_id, 1, "failed", peer_lost=True, lost_nodes=("gamma",))
        began_s = time.monotonic()
        await asyncio.wait_for(task, 10)
        return time.monotonic() - began_s

    assert asyncio.run(scenario()) < 2.5
    assert services.runs.get(run_id).message.startswith("node gamma was lost")


def test_watch_ends_when_a_newer_attempt_took_over(
    services: Services, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runs.lifecycle.watch.JUDGE_INTERVAL_S", 0.05)
    services.runs.change(run_id, lambda run: replace(run, attempt=2))
    run = replace(services.runs.get(run_id), attempt=1)
    asyncio.run(asyncio.wait_for(RunWatch(services, run, EventHub()).run_until_end(), 10))
    assert state(services, run_id) == "running"


def test_data_files_of_every_kind_can_be_started(
    services: Services, spec: RunSpec, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text("text\nhello\n")
    run_id = asyncio.run(
        start_run(services, replace(spec, data=DataSpec(train=str(tmp_path / "t.csv"))))
    )
    assert state(services, run_id) == "running"


def test_the_log_of_an_attempt_that_ran_while_no_master_was_there_is_fetched(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    from app.runs.journals.logs import find_logs
    from app.runs.lifecycle.reconcile import sync_attempts

    asyncio.run(resume_run(services, interrupted))
    # Written after the last look at the first attempt, and never mirrored.
    cluster["beta"].write(interrupted, 1, "rank-1.log", b"out of memory\n")
    cluster["alpha"].write(interrupted, 2, "rank-0.log", b"going on\n")
    asyncio.run(sync_attempts(services, services.runs.get(interrupted)))
    found = {
        (file.attempt, file.node): b"".join(data for _, data in file.pieces())
        for file in find_logs(services.paths, interrupted)
    }
    assert found[1, "beta"].endswith(b"out of memory\n")
    assert found[2, "alpha"].endswith(b"going on\n")
