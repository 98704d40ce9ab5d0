"""The states of a run and the verdict over what its nodes report."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import get_args

import pytest

from agents.contract.run import AttemptState, AttemptStatus, RankStatus
from app.events import ACTIVE_STATES, RESUMABLE_STATES, RunState
from app.runs.run import MOVES, REGROUP_IDLE_S, REGROUP_S, RunPart, Situation, judge, may_move

ALL_STATES: tuple[RunState, ...] = get_args(RunState)
PART_STATES: tuple[AttemptState, ...] = get_args(AttemptState)


def part(node: str, state: AttemptState, message: str = "", **changes: object) -> RunPart:
    status = AttemptStatus(
        run_id="r", attempt=1, node=node, state=state, message=message, **changes
    )
    return RunPart(node=node, status=status)


def silent(node: str, for_s: float = 1.0) -> RunPart:
    return RunPart(node=node, silent_s=for_s)


def absent(node: str) -> RunPart:
    return RunPart(node=node)


def verdict(*parts: RunPart, **changes: object) -> tuple[str, str, tuple[str, ...]]:
    found = judge(Situation(parts=parts, **changes))
    return found.state, found.message, found.stop


def test_every_state_has_moves_and_ends_are_not_active() -> None:
    assert set(MOVES) == set(ALL_STATES)
    assert set(ALL_STATES) - ACTIVE_STATES == RESUMABLE_STATES | {"done"}


def test_staying_is_always_legal_and_done_is_final() -> None:
    assert all(may_move(state, state) for state in ALL_STATES)
    assert not any(may_move("done", state) for state in ALL_STATES if state != "done")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stopping", "running"),
        ("stopped", "running"),
        ("interrupted", "running"),
        ("failed", "done"),
        ("created", "running"),
        ("running", "launching"),
    ],
)
def test_illegal_moves(old: RunState, new: RunState) -> None:
    assert not may_move(old, new)


@pytest.mark.parametrize("state", sorted(RESUMABLE_STATES))
def test_resumable_states_can_be_launched_again(state: RunState) -> None:
    assert may_move(state, "launching")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("running", "running"), "running"),
        (("starting", "running"), "running"),
        (("done", "running"), "running"),
        (("done", "done"), "done"),
        (("stopped", "done"), "stopped"),
        (("stopped", "stopped"), "stopped"),
        (("stopping", "running"), "stopping"),
        (("stopped", "running"), "stopping"),
    ],
)
def test_verdict_over_two_healthy_parts(states: tuple[AttemptState, ...], expected: str) -> None:
    parts = [part(node, state) for node, state in zip(("alpha", "beta"), states, strict=True)]
    assert verdict(*parts) == (expected, "", ())


def test_asked_to_stop_shows_while_ranks_still_run() -> None:
    assert verdict(part("alpha", "running"), stop_asked=True)[0] == "stopping"


def test_lost_node_names_step_checkpoint_and_who_is_left() -> None:
    found = judge(
        Situation(
            parts=(
                part("alpha", "running"),
                part("beta", "running"),
                part("gamma", "lost", message="This PC was restarted."),
            ),
            step=812,
            checkpoint_step=800,
        )
    )
    assert found.state == "interrupted"
    assert found.message == (
        "node gamma lost its part at step 812; newest checkpoint is step 800. This PC was "
        "restarted."
    )
    assert found.hint == "Resume on alpha and beta."
    assert found.stop == ("alpha", "beta")


def test_node_that_was_restarted_is_named_with_the_time() -> None:
    at_s = datetime(2027, 3, 4, 3, 12, 7).timestamp()
    gone = part("gamma", "lost", message="Attempt 1 left no record of an end.", restarted_s=at_s)
    found = judge(Situation(parts=(part("alpha", "running"), gone), step=812, now_s=at_s + 60.0))
    assert found.message.startswith(
        "node gamma was restarted at 03:12:07 and lost its part at step 812"
    )
    assert (found.state, found.cause) == ("interrupted", "lost")
    # A power cut takes several.
    too = part("beta", "lost", restarted_s=at_s)
    found = judge(Situation(parts=(part("alpha", "running"), too, gone), now_s=at_s + 60.0))
    assert found.message.startswith("nodes beta and gamma were restarted, ")
    assert "at 03:12:07, and lost their parts" in found.message


def test_silent_node_alone_stops_nothing() -> None:
    state, message, stop = verdict(part("alpha", "running"), silent("beta", 3600.0))
    assert (state, stop) == ("running", ())
    assert "beta cannot be reached; training continues" in message


def test_silent_node_is_lost_when_the_others_stand_still() -> None:
    parts = (part("alpha", "running"), silent("beta", 16.0))
    assert verdict(*parts, idle_s=14.0, lost_after_s=15.0)[0] == "running"
    state, message, stop = verdict(*parts, idle_s=15.0, lost_after_s=15.0)
    assert (state, stop) == ("interrupted", ("alpha",))
    assert message.startswith("node beta was lost")


def test_node_that_just_fell_silent_gets_its_time_though_others_stand_still() -> None:
    parts = (part("alpha", "running"), silent("beta", 2.0))
    assert verdict(*parts, idle_s=100.0, lost_after_s=15.0)[0] == "running"


def test_ranks_that_lost_a_peer_make_the_silent_node_the_culprit() -> None:
    lost_peer = {"message": "Rank 0 failed: connection closed", "peer_lost": True}
    state, message, _ = verdict(
        part("alpha", "failed", **lost_peer), part("beta", "failed", **lost_peer), silent("gamma")
    )
    assert state == "interrupted"
    assert message.startswith("node gamma was lost")


def test_failure_of_its_own_comes_before_lost_peers_and_silence() -> None:
    state, message, stop = verdict(
        part("alpha", "failed", "peer", peer_lost=True, ended_s=1.0),
        part("beta", "failed", "Rank 1 on node beta was killed", ended_s=2.0),
        silent("gamma"),
        part("delta", "running"),
    )
    assert (state, message) == ("failed", "Rank 1 on node beta was killed")
    assert stop == ("delta",)


def test_first_of_two_own_failures_is_the_cause() -> None:
    assert (
        verdict(
            part("alpha", "failed", "later", ended_s=9.0),
            part("beta", "failed", "earlier", ended_s=3.0),
        )[1]
        == "earlier"
    )


def test_lost_peers_alone_wait_for_the_real_culprit_then_give_up() -> None:
    parts = (part("alpha", "failed", "peer", peer_lost=True), part("beta", "running"))
    assert verdict(*parts, idle_s=1.0)[0] == "running"
    state, message, stop = verdict(*parts, idle_s=60.0)
    assert (state, stop) == ("interrupted", ("beta",))
    assert "lost their connection" in message


def test_ranks_that_load_do_not_keep_a_run_running_that_lost_its_others() -> None:
    """Their heartbeats never grow old, since a thread writes them."""
    ended = part("alpha", "failed", "peer", peer_lost=True, ended_s=100.0)
    parts = (ended, part("beta", "running"))
    assert verdict(*parts, now_s=159.0)[0] == "running"
    state, _, stop = verdict(*parts, now_s=161.0)
    assert (state, stop) == ("interrupted", ("beta",))


def test_all_lost_their_peers() -> None:
    parts = [part(node, "failed", "peer", peer_lost=True) for node in ("alpha", "beta")]
    found = judge(Situation(parts=tuple(parts), step=7, checkpoint_step=5))
    assert found.state == "interrupted"
    assert "at step 7; newest checkpoint is step 5" in found.message
    assert "rackless check" in found.hint
    assert "resume from step 5" in found.hint


def test_failure_offers_the_checkpoint() -> None:
    found = judge(
        Situation(parts=(part("a", "failed", "boom", hint="Fix it."),), checkpoint_step=30)
    )
    assert found.hint == "Fix it. Then resume from step 30."


def test_failure_offers_it_in_a_sentence_of_its_own() -> None:
    failed = part("a", "failed", "boom", hint="Look at the log of rank 0")
    found = judge(Situation(parts=(failed,), checkpoint_step=30))
    assert found.hint == "Look at the log of rank 0. Then resume from step 30."


def test_failure_that_a_resume_would_repeat_does_not_offer_it() -> None:
    hint = "Lower learning_rate, and start a new run: this one would diverge again"
    found = judge(Situation(parts=(part("a", "failed", "nan", hint=hint),), checkpoint_step=30))
    assert found.hint == hint


def test_part_that_is_not_there_ends_a_broken_launch() -> None:
    state, message, stop = verdict(part("alpha", "running"), absent("beta"))
    assert (state, stop) == ("interrupted", ("alpha",))
    assert "beta does not have its part" in message


def test_launch_under_way_may_have_parts_missing() -> None:
    assert verdict(part("alpha", "starting"), absent("beta"), launching=True)[0] == "launching"
    assert verdict(absent("alpha"), launching=True)[0] == "launching"


def test_launch_of_another_master_is_left_alone() -> None:
    parts = (part("alpha", "running"), absent("beta"))
    assert verdict(*parts, is_ours=False) == ("running", "", ())
    assert verdict(part("alpha", "done"), absent("beta"), is_ours=False)[0] == "interrupted"


def test_all_nodes_silent_says_that_nothing_is_known() -> None:
    state, message, stop = verdict(silent("alpha", 9e9), silent("beta", 9e9))
    assert (state, stop) == ("running", ())
    assert "alpha and beta cannot be reached; the state of the run is unknown" in message
    assert verdict(silent("alpha"), stop_asked=True)[0] == "stopping"


def test_stop_that_lost_the_last_checkpoint_says_so() -> None:
    message = "While stopping, rank 1 failed: the disk of node beta has no room."
    parts = (part("alpha", "stopped"), part("beta", "stopped", message=message))
    assert verdict(*parts, stop_asked=True) == ("stopped", message, ())


def test_stop_with_a_silent_node_tells_what_may_be_left() -> None:
    state, message, _ = verdict(part("alpha", "stopped"), silent("beta"), stop_asked=True)
    assert state == "stopped"
    assert "beta could not be reached" in message


def test_done_on_all_that_answer_is_done() -> None:
    assert verdict(part("alpha", "done"), silent("beta"))[0] == "done"


def test_node_lost_while_stopping_is_a_stop() -> None:
    state, message, stop = verdict(part("alpha", "stopping"), part("beta", "lost"), stop_asked=True)
    assert (state, stop) == ("stopped", ("alpha",))
    assert "beta was lost while the run was stopping" in message


OPTIONS = [
    *(part("x", state) for state in PART_STATES),
    part("x", "failed", "p", peer_lost=True),
    silent("x", 100.0),
    absent("x"),
]


@pytest.mark.parametrize("stop_asked", [False, True])
@pytest.mark.parametrize("idle_s", [0.0, 100.0])
def test_every_combination_of_three_parts_ends_in_a_sound_verdict(
    stop_asked: bool, idle_s: float
) -> None:
    """Over all 11 ** 3 combinations: an end never leaves a part running that it does not stop, a
    bad end always says why, and only parts that are active are stopped."""
    for chosen in itertools.product(OPTIONS, repeat=3):
        parts = tuple(
            RunPart(node=node, status=found.status, silent_s=found.silent_s)
            for node, found in zip("abc", chosen, strict=True)
        )
        found = judge(Situation(parts=parts, stop_asked=stop_asked, idle_s=idle_s))
        active = tuple(p.node for p in parts if p.active)
        states = [p.status.state if p.status else None for p in parts]
        assert found.stop in ((), active), states
        if found.state not in ACTIVE_STATES:
            assert found.stop == active, states
        if found.state in ("interrupted", "failed"):
            assert found.message or states.count("failed"), states
        if found.state == "done":
            assert set(states) <= {"done", None}, states


@pytest.mark.parametrize(
    ("of_alpha", "of_beta", "message"),
    [
        (("gamma",), ("gamma",), "node gamma was lost: the others could not reach it"),
        (("gamma",), (), "node gamma was lost: the others could not reach it"),
        (("beta",), ("alpha",), "the nodes lost their connection to each other"),
        ((), (), "the nodes lost their connection to each other"),
    ],
)
def test_node_that_the_others_could_not_reach_is_named(
    of_alpha: tuple[str, ...], of_beta: tuple[str, ...], message: str
) -> None:
    found = verdict(
        part("alpha", "failed", peer_lost=True, lost_nodes=of_alpha),
        part("beta", "failed", peer_lost=True, lost_nodes=of_beta),
        part("gamma", "failed", peer_lost=True),
    )
    assert found[0] == "interrupted"
    assert found[1].startswith(message)


def test_a_rank_that_hangs_is_named_once_the_others_have_given_it_up() -> None:
    hangs = "Rank 1 on node beta has stood still for 66 s. The process is stuck in the kernel."
    parts = (part("alpha", "failed", peer_lost=True), part("beta", "running", hangs))
    state, message, stop = verdict(*parts, idle_s=66.0)
    assert (state, stop) == ("interrupted", ("beta",))
    assert message.startswith(hangs.rstrip("."))
    found = verdict(parts[0], part("beta", "running"), idle_s=66.0)
    assert found[1].startswith("the nodes lost their connection")


def training(node: str, phase: str = "training", **changes: object) -> RunPart:
    """Return a part whose ranks train, and may go on in their processes."""
    ranks = (RankStatus(rank=0, pid=1, step=7, phase=phase),)
    return part(node, "running", ranks=ranks, may_regroup=True, **changes)


KILLED = part("gamma", "failed", "Rank 2 was killed.", cause="killed", ended_s=100.0)


def test_ranks_that_may_go_on_in_their_processes_are_not_stopped() -> None:
    alpha, beta = training("alpha"), training("beta", "regrouping")
    assert verdict(alpha, beta, KILLED, now_s=103.0) == ("running", "", ())
    stopped = ("alpha", "beta")
    assert verdict(alpha, beta, KILLED, now_s=100.0 + REGROUP_S)[2] == stopped, "it took too long"
    assert verdict(alpha, beta, KILLED, stop_asked=True)[2] == stopped
    assert verdict(alpha, training("beta", "loading"), KILLED)[2] == stopped, (
        "nothing to go on with"
    )
    assert verdict(alpha, part("beta", "running"), KILLED)[2] == stopped, "an earlier version"
    lost = part("beta", "lost")
    assert verdict(alpha, lost, KILLED)[2] == ("alpha",), "too few are left"


def test_a_silent_node_is_left_to_the_others_for_a_while() -> None:
    waits = {"lost_after_s": 60.0, "idle_s": 61.0}
    parts = (training("alpha"), training("beta"), silent("gamma", 61.0))
    assert verdict(*parts, **waits)[2] == ()
    assert verdict(*parts, **{**waits, "idle_s": 60.0 + REGROUP_IDLE_S})[2] == ("alpha", "beta")


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        (KILLED, "Rank 2 was killed"),
        (part("gamma", "failed", "Rank 2 lost rank 0.", peer_lost=True), "gamma was lost"),
        (silent("gamma", 999.0), "gamma was lost"),
        (part("gamma", "running"), "gamma was lost"),
    ],
)
def test_who_was_left_out_is_named_and_does_not_decide_about_the_run(
    gone: RunPart, reason: str
) -> None:
    others = {"generation": 1, "members": ("alpha", "beta")}
    alpha, beta = training("alpha", **others), training("beta", **others)
    assert verdict(alpha, beta, gone) == (
        "running", f"{reason}; the others train on.", ()
    )  # fmt: skip
    done = [part(node, "done", **others) for node in ("alpha", "beta")]
    assert verdict(*done, gone)[0] == "done"
    # The next loss leaves too few: it is recovered as any other.
    second = part("beta", "failed", "Rank 1 was killed.", cause="killed", **others)
    assert verdict(alpha, second, gone) == ("failed", "Rank 1 was killed.", ("alpha",))
