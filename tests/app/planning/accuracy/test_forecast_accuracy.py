"""Forecast against measurement: only like with like, and corrections are taken out first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.planning.accuracy.forecast_accuracy import (
    Forecast,
    Measured,
    RankForecast,
    RankMeasured,
    learn,
)
from app.planning.memory.forecast import MemorySetting
from app.planning.memory.gpu import GpuMemory

SETTING = MemorySetting(micro_tokens=2048, num_recomputed=3)
CARD = GpuMemory(total_bytes=24 << 30)
GPU = RankForecast(node="a", device="cuda:0", card="RTX 3090", tokens_per_s=1000.0, gpu=CARD)
CPU = RankForecast(node="b", device="cpu", tokens_per_s=10.0)
TOLD = Forecast(
    mode="data", family="llama", adapter="qlora", longest_tokens=512, ranks=(GPU, CPU),
    network_s=2.0,
)  # fmt: skip
SEEN = Measured(
    num_steps=40,
    ranks=(
        RankMeasured(tokens_per_s=900.0, setting=SETTING, memory_bytes=1030),
        RankMeasured(tokens_per_s=9.0),
    ),
    network_s=3.0,
)


def thousand(gpu: GpuMemory, setting: MemorySetting) -> int:
    assert (gpu, setting) == (CARD, SETTING)
    return 1000


def test_memory_is_held_against_the_setting_that_was_used() -> None:
    found = learn(TOLD, SEEN, 7.0, thousand)
    assert list(found) == [0]
    assert found[0].memory_ratio == pytest.approx(1.03)
    assert found[0].speed_ratio == pytest.approx(0.9)
    assert found[0].network_ratio == pytest.approx(1.5)
    assert (found[0].card, found[0].family, found[0].ended_s) == ("RTX 3090", "llama", 7.0)


def test_corrections_are_taken_out_of_the_forecast() -> None:
    told = replace(TOLD, ranks=(replace(GPU, speed_factor=0.9), CPU), network_factor=1.5)
    found = learn(told, SEEN, 7.0, thousand)[0]
    assert found.speed_ratio == pytest.approx(0.81)
    assert found.network_ratio == pytest.approx(2.25)


def test_short_attempts_and_noise_teach_nothing() -> None:
    assert learn(TOLD, replace(SEEN, num_steps=3), 7.0, thousand) == {}
    quiet = learn(replace(TOLD, network_s=0.01), SEEN, 7.0, thousand)
    assert quiet[0].network_ratio is None
    unknown = replace(SEEN, ranks=(RankMeasured(), RankMeasured()), network_s=None)
    assert learn(TOLD, unknown, 7.0, thousand) == {}
