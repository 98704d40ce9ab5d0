"""The order of rows is a pure function, and covers the data evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.trainer.data.order import DataOrder, count_steps, epoch_at, hash_rows, shuffle_epoch


@given(
    seed=st.integers(0, 2**70),
    num_rows=st.integers(1, 60),
    batch=st.integers(1, 25),
    num_steps=st.integers(1, 12),
)
def test_the_batches_are_the_epochs_laid_end_to_end(seed, num_rows, batch, num_steps):
    batches = [
        DataOrder(seed, (num_rows,), (num_rows,)).choose(step=step, batch=batch)
        for step in range(1, num_steps + 1)
    ]
    assert all(len(rows) == batch for rows in batches)
    flat = [row for rows in batches for row in rows]
    for epoch in range(len(flat) // num_rows):
        part = flat[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(part) == list(range(num_rows))
    tail = flat[len(flat) // num_rows * num_rows :]
    assert len(set(tail)) == len(tail)


def test_the_order_never_changes_between_versions():
    # These numbers are in every checkpoint's meaning: a resume relies on them.
    assert DataOrder(42, (10,), (10,)).choose(step=1, batch=8) == [7, 1, 6, 4, 3, 5, 9, 0]
    assert hash_rows([3, 1, 2]) == "edb794d615a63f5e"


def test_seed_and_epoch_change_the_order():
    first = shuffle_epoch(1, 0, 50).tolist()
    assert first != shuffle_epoch(2, 0, 50).tolist()
    assert first != shuffle_epoch(1, 1, 50).tolist()


def test_steps_cover_the_epochs_that_were_asked_for():
    assert count_steps(epochs=1, num_rows=10, batch=4, max_steps=None) == 3
    assert count_steps(epochs=0.5, num_rows=10, batch=5, max_steps=None) == 1
    assert count_steps(epochs=0.1, num_rows=30, batch=1, max_steps=None) == 3
    assert count_steps(epochs=3, num_rows=10, batch=4, max_steps=2) == 2
    assert epoch_at(step=3, batch=4, num_rows=10) == 1.2
