"""Named numbers survive the sum over ranks, each in its own place."""

from __future__ import annotations

import pytest
import torch

from agents.trainer.metrics.step_statistics import StatsLayout
from tests.agents.trainer.ranks import Run, make_spec

PARTS = ("input", "compute", "wait", "optimizer")

CPU = torch.device("cpu")


def layout(rank: int) -> StatsLayout:
    return StatsLayout(sums=("loss", "stop"), per_rank=("speed", "size"), rank=rank, world_size=3)


def test_sums_add_up_and_every_rank_keeps_its_own_place():
    vectors = [
        layout(rank).fill(
            {"loss": torch.tensor(0.1 * (rank + 1), dtype=torch.float64), "speed": 10.0 + rank}, CPU
        )
        for rank in range(3)
    ]
    stats = layout(1).read(sum(vectors), torch.tensor(7.5))
    assert stats.sums == {"loss": pytest.approx(0.6, abs=1e-15), "stop": 0.0}
    assert stats.per_rank == {"speed": (10.0, 11.0, 12.0), "size": (0.0, 0.0, 0.0)}
    assert stats.local == (7.5,)


def test_a_rank_number_keeps_every_bit():
    third = 1 / 3
    vectors = [layout(rank).fill({"size": third * (rank + 1)}, CPU) for rank in range(3)]
    assert layout(0).read(sum(vectors)).per_rank["size"] == (third, third * 2, third * 3)


def test_an_unknown_name_is_a_mistake():
    with pytest.raises(KeyError, match="lost"):
        layout(0).fill({"lost": 1.0}, CPU)


def test_a_single_rank_is_compared_with_its_own_step(tmp_path, tiny_model):
    """A measurement of other work before the first step once gave 3.2, 1.4 and 0.2."""
    run = Run(tmp_path / "run", tiny_model, make_spec(max_steps=2))
    run.train_to_end()
    for step in run.steps(0).values():
        assert step["eta"] == pytest.approx(step["compute_s"] / step["step_s"])
        assert sum(step[f"{name}_s"] for name in PARTS) <= step["step_s"]
