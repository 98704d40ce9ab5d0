"""Figures of a time without news are gaps, and those of a silent node are not shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agents.contract.node import GpuFacts, GpuSample, NodeFacts, Sample
from app.events import NodeSnapshot, RankProgress, RunSnapshot
from app.gui.tables.device_columns import device_columns, make_row
from app.telemetry.state import describe_device, describe_run
from app.telemetry.stream import TIME, TOKENS, UTILISATION, DeviceKey, Telemetry
from tests.fakes.core import SPEC

KEY = DeviceKey("alpha", "cuda:0")
NOW_S = 1000.0


def make_node(
    state: str = "online", last_seen_s: float = NOW_S, name: str = "alpha"
) -> NodeSnapshot:
    gpu = GpuFacts(uuid="GPU-0", index=0, name="RTX 3090")
    facts = NodeFacts(
        hostname=name, os="Ubuntu", kernel="6", architecture="x86_64", python="3.12", gpus=(gpu,)
    )
    return NodeSnapshot(
        name=name,
        transport="ssh",
        address="a@b",
        state=state,  # type: ignore[arg-type]
        facts=facts,
        last_seen_s=last_seen_s,
    )


def make_run(**rank: object) -> RunSnapshot:
    fields = {"tokens_per_s": 120.0, "step_s": 2.0, "phase": "training", "step": 40, **rank}
    ranks = tuple(
        RankProgress(rank=i, node=name, device="cuda:0", state="training", **fields)  # type: ignore[arg-type]
        for i, name in enumerate(("alpha", "beta"))
    )
    return RunSnapshot(
        run_id="r-1",
        name="poems",
        state="running",
        spec=SPEC,
        attempt=1,
        nodes=("alpha", "beta"),
        created_s=0.0,
        phase="training",
        tokens_per_s=240.0,
        mfu=0.3,
        eta=0.9,
        remaining_s=60.0,
        ranks=ranks,
    )


def make_telemetry() -> Telemetry:
    telemetry = Telemetry()
    telemetry.expect(make_node())
    return telemetry


def take(telemetry: Telemetry, *times_s: float, replayed: bool = False) -> None:
    for time_s in times_s:
        gpu = GpuSample(uuid="GPU-0", index=0, name="RTX 3090", utilisation=0.9)
        sample = Sample(time_s=time_s, seq=int(time_s), gpus=(gpu,))
        telemetry.take("alpha", sample, None if replayed else time_s, replayed=replayed)


def speeds(telemetry: Telemetry) -> dict[float, float]:
    history = telemetry[KEY].history.view()
    known = np.isfinite(history[TOKENS])
    return dict(zip(history[TIME][known].tolist(), history[TOKENS][known].tolist(), strict=True))


def test_replayed_samples_never_get_the_speed_of_today() -> None:
    telemetry = make_telemetry()
    telemetry.follow_runs([make_run(time_s=900.0)])
    take(telemetry, *range(300, 920, 100), 896.0, 899.0, replayed=True)
    # Only those within the newest step, and shortly after it, have its speed.
    assert speeds(telemetry) == {900.0: 120.0}


def test_replayed_samples_have_no_speed_while_the_time_of_the_step_is_unknown() -> None:
    telemetry = make_telemetry()
    telemetry.follow_runs([make_run()])
    take(telemetry, 1.0, 2.0, replayed=True)
    take(telemetry, 3.0)
    assert speeds(telemetry) == {3.0: 120.0}


def test_there_is_no_speed_before_the_run_began_nor_while_its_ranks_load() -> None:
    telemetry = make_telemetry()
    take(telemetry, 1.0, 2.0)
    telemetry.follow_runs([make_run(phase="loading")])
    take(telemetry, 3.0)
    telemetry.follow_runs([make_run(time_s=4.0)])
    take(telemetry, 4.0)
    assert speeds(telemetry) == {4.0: 120.0}


def test_a_speed_ends_when_its_rank_has_finished_no_step_for_long() -> None:
    telemetry = make_telemetry()
    telemetry.follow_runs([make_run(time_s=10.0)])
    take(telemetry, 11.0, 40.0, 41.0)
    assert speeds(telemetry) == {11.0: 120.0, 40.0: 120.0}
    assert telemetry[KEY].reading.tokens_per_s is None
    telemetry.follow_runs([make_run(time_s=10.0, step_s=60.0)])
    assert telemetry[KEY].reading.tokens_per_s == 120.0, "a slow step is not overdue yet"


def test_no_line_is_drawn_across_the_time_without_samples() -> None:
    telemetry = make_telemetry()
    take(telemetry, 1.0, 2.0, 60.0, 61.0)
    history = telemetry[KEY].history.view()
    assert np.isfinite(history[UTILISATION]).tolist() == [True, True, False, False, True, True]
    assert (np.diff(history[TIME]) > 0).all()


# ---------------------------------------------------------------- silent nodes


def test_a_lost_nodes_ranks_are_not_training_and_have_no_figures() -> None:
    from app.telemetry.state import current_run, describe_rank

    nodes = {"alpha": make_node(), "beta": make_node("unreachable", NOW_S - 12, "beta")}
    shown = current_run(make_run(), nodes, NOW_S)
    here, lost = shown.ranks
    assert (here.state, here.tokens_per_s) == ("training", 120.0)
    assert (lost.state, lost.step, lost.tokens_per_s) == ("unreachable", None, None)
    assert describe_rank(lost, NOW_S) == "silent for 12 s"
    assert describe_run(shown.state, shown.phase).text == "running, beta unreachable"
    assert shown.tokens_per_s == 240.0, "the other node still tells the sum"


def test_a_run_without_any_node_that_answers_has_no_speed_and_no_time_left() -> None:
    from app.telemetry.state import current_run

    nodes = {"alpha": make_node("unreachable", NOW_S - 60)}  # beta was removed
    shown = current_run(make_run(), nodes, NOW_S)
    assert (shown.tokens_per_s, shown.mfu, shown.eta, shown.remaining_s) == (None,) * 4
    assert {rank.state for rank in shown.ranks} == {"unreachable", "removed"}
    assert describe_run(shown.state, shown.phase).text == "running, no contact"
    ended = replace(make_run(), state="done")
    assert current_run(ended, {}, NOW_S) == ended


def test_a_node_that_has_just_fallen_silent_shows_dashes() -> None:
    telemetry = make_telemetry()
    telemetry.follow_runs([make_run(time_s=NOW_S - 20)])
    take(telemetry, NOW_S - 20)
    device = telemetry[KEY]
    for node, words in (
        (make_node(last_seen_s=NOW_S - 12), "silent for 12 s"),
        (make_node(), "no readings for 20 s"),
        (make_node("unreachable", NOW_S - 12), "unreachable for 12 s"),
    ):
        assert describe_device(device, node, NOW_S).text == words
        row = make_row(device, node, NOW_S)
        shown = {column.title: column.text(row) for column in device_columns()}
        assert {shown[name] for name in ("Load", "Temp", "Power", "Tokens/s")} == {"\u2013"}


def test_the_sum_of_a_run_that_stands_still_beside_a_lost_node_is_not_frozen() -> None:
    from app.telemetry.state import current_run

    nodes = {"alpha": make_node(), "beta": make_node("unreachable", NOW_S - 60, "beta")}
    moving = current_run(make_run(time_s=NOW_S - 4), nodes, NOW_S)
    assert (moving.tokens_per_s, moving.silent_nodes) == (240.0, ("beta",))
    still = current_run(make_run(time_s=NOW_S - 60), nodes, NOW_S)
    assert (still.tokens_per_s, still.remaining_s) == (None, None)
    assert describe_run(still.state, still.phase, is_silent=True).tone == "warning"
