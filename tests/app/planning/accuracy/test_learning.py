"""What runs teach: medians that hold still, within limits, and nearest knowledge first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.planning.accuracy.learning import (
    MEMORY_LIMITS,
    NEWEST,
    SPEED_LIMITS,
    UNKNOWN,
    Corrections,
    RunOutcome,
)

RUN = RunOutcome(card="RTX 3090", family="llama", adapter="qlora", ended_s=1.0)


def corrections(*outcomes: RunOutcome) -> Corrections:
    return Corrections(outcomes=outcomes)


def test_nothing_known_changes_nothing() -> None:
    found = Corrections().find("RTX 3090", "llama", "qlora")
    assert (found.memory, found.speed) == (UNKNOWN, UNKNOWN)
    other = corrections(replace(RUN, card="RTX 4090", speed_ratio=0.5))
    assert other.find("RTX 3090", "llama", "qlora").speed is UNKNOWN


def test_one_odd_run_among_many_moves_nothing() -> None:
    runs = [replace(RUN, ended_s=float(t), speed_ratio=0.9) for t in range(8)]
    usual = corrections(*runs).find("RTX 3090", "llama", "qlora").speed
    odd = replace(RUN, ended_s=99.0, speed_ratio=0.1)
    assert corrections(*runs, odd).find("RTX 3090", "llama", "qlora").speed.value == pytest.approx(
        usual.value, rel=0.01
    )


def test_old_runs_are_forgotten() -> None:
    old = [replace(RUN, ended_s=float(t), memory_ratio=1.2) for t in range(20)]
    new = [replace(RUN, ended_s=100.0 + t, memory_ratio=1.0) for t in range(NEWEST)]
    found = corrections(*old, *new).find("RTX 3090", "llama", "qlora").memory
    assert (found.value, found.num_runs) == (pytest.approx(1.0), NEWEST)


@pytest.mark.parametrize(("ratio", "limit"), [(0.01, 0), (50.0, 1)])
def test_factors_are_bounded(ratio: float, limit: int) -> None:
    run = replace(RUN, memory_ratio=ratio, speed_ratio=ratio)
    found = corrections(*[run] * 9).find("RTX 3090", "llama", "qlora")
    assert found.memory.value == MEMORY_LIMITS[limit]
    assert found.speed.value == SPEED_LIMITS[limit]


def test_repeating_a_run_converges_on_what_it_measures() -> None:
    """Forecasts are corrected, ratios are not: the factor comes near the true one and stays."""
    truth, outcomes = 0.7, []
    for time_s in range(12):
        outcomes.append(replace(RUN, ended_s=float(time_s), speed_ratio=truth))
    found = corrections(*outcomes).find("RTX 3090", "llama", "qlora").speed
    assert found.value == pytest.approx(truth, rel=0.03)


def test_network_is_learned_over_all_cards() -> None:
    found = corrections(
        replace(RUN, network_ratio=1.5), replace(RUN, card="RTX 4090", network_ratio=1.5)
    ).network
    assert found.value == pytest.approx(1.4)
    assert found.reason == "2 past runs over this network"


def test_a_measurement_of_the_card_leaves_what_its_data_sheet_was_off_by_behind() -> None:
    runs = corrections(*[replace(RUN, speed_ratio=0.5, memory_ratio=1.1)] * 9)
    sheet = runs.find("RTX 3090", "llama", "qlora")
    measured = runs.find("RTX 3090", "llama", "qlora", is_calibrated=True)
    assert sheet.speed.value < 0.6
    assert measured.speed is UNKNOWN
    assert measured.memory == sheet.memory
