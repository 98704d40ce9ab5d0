"""Rows of bench_planning: steps are what training makes of a run's rows."""

from __future__ import annotations

import pytest

from agents.shared.micro_shapes import group_examples
from tests.bench.planning.planning_jobs import FAMILIES, JOBS, TINY, Job, Row
from tests.bench.planning.planning_model import make_rows

UNLIKE = [(job, row) for job in (*JOBS, *FAMILIES) for row in job.rows if row.unlike]


def test_half_of_the_rows_is_held_out():
    rows = [job.held_out for job in (*JOBS, *FAMILIES) for _ in job.rows]
    assert len(rows) >= 60
    assert 0.4 <= sum(rows) / len(rows) <= 0.6


@pytest.mark.parametrize(("job", "row"), UNLIKE[:4])
def test_rows_of_unlike_length_fill_their_micro_batches(job: Job, row: Row):
    _, part = make_rows(row, job, 2)
    lengths = [one.num_tokens for one in part.examples]
    capacity = row.sequence * row.batch
    sums = [
        sum(lengths[index] for index in group)
        for group in group_examples(lengths, capacity, is_filled=True)
    ]
    assert len(sums) == 2
    assert len(set(lengths)) > 10
    assert max(sums) > 0.9 * capacity


def test_a_step_of_a_tiny_model_is_measured():
    import torch

    from tests.bench.planning.planning_measure import Bench
    from tests.bench.planning.planning_model import make_base

    job, device = TINY[2], torch.device("cpu")
    bench = Bench(job, make_base(job, device), device)
    assert bench.compile()["num_layers"] == 4
    found = bench.measure(job.rows[0])
    assert found["fits"]
    # Pairs of two answers of 64 tokens.
    assert found["shapes"] == [[128, 2, 128, 64]] * 2
    assert len(found["pass_s"]) >= 2
