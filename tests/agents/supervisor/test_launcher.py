"""What a rank is given besides its place."""

from __future__ import annotations

import os

import pytest

from agents.supervisor.launcher import choose_num_threads


@pytest.mark.parametrize(
    ("num_cores", "num_local", "named", "expected"),
    [
        (8, 1, "", 8),
        (8, 3, "", 2),
        (2, 4, "", 1),
        (8, 1, "2", 2),
        (4, 2, "16", 2),
        (4, 1, "0", 4),
        (4, 1, "many", 4),
    ],
)
def test_threads_of_a_rank(
    monkeypatch, num_cores: int, num_local: int, named: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setenv("OMP_NUM_THREADS", named)
    assert choose_num_threads(num_local) == expected
