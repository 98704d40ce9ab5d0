"""A slice is cut into micro-batches that hold every example once, fit the budget, and lie flat."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents.contract.micro_shapes import group_examples, round_size, round_up_tokens
from agents.trainer.data.examples import Example, Segment
from agents.trainer.model.micro_batch import build_micro_batch


@given(
    lengths=st.lists(st.integers(1, 300), max_size=40),
    budget=st.integers(1, 900),
    is_filled=st.booleans(),
)
def test_every_example_is_in_one_group_that_fits(lengths, budget, is_filled):
    groups = group_examples(lengths, budget, is_filled=is_filled)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[place] for place in group) <= budget or len(group) == 1


@given(count=st.integers(1, 60), rows=st.integers(1, 60))
def test_rows_of_one_length_are_cut_alike(count, rows):
    sizes = [len(group) for group in group_examples([100] * count, 100 * rows)]
    assert len(sizes) == -(-count // rows)
    assert max(sizes) - min(sizes) <= 1


def test_where_alike_does_not_fit_gaps_are_filled():
    assert group_examples([6, 5, 4, 3, 2], max_tokens=10) == [[0, 2], [1, 3, 4]]


def test_the_longest_come_first_and_gaps_are_filled():
    assert group_examples([1, 5, 3, 2], max_tokens=6) == [[1, 0], [2, 3]]


def test_examples_lie_end_to_end():
    def segment(length):
        ids = np.arange(length, dtype=np.int32) + 10 * length
        return Segment(1, ids, np.arange(length) == length - 1)

    pair = Example((segment(3), segment(2)))
    batch = build_micro_batch([pair, Example((segment(4),))], torch.device("cpu"))
    assert batch.ids_1M.tolist() == [[30, 31, 32, 20, 21, 40, 41, 42, 43]]
    assert batch.position_1M.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch.segments.bounds == (0, 3, 5, 9)
    assert batch.lengths == (5, 4)
    assert batch.predicted_at_N.tolist() == [1, 3, 7]
    assert batch.label_N.tolist() == [32, 21, 43]
    assert batch.segment_N.tolist() == [0, 1, 2]


@given(num_tokens=st.integers(1, 100_000))
def test_filling_is_less_than_a_tile(num_tokens):
    size = round_up_tokens(num_tokens)
    assert 0 <= size - num_tokens < 64
    assert size % 64 == 0


@given(num_tokens=st.integers(1, 40_000), capacity=st.integers(1, 20_000))
def test_sizes_that_repeat_hold_the_rows_and_are_few(num_tokens, capacity):
    size = round_size(num_tokens, capacity)
    assert size >= num_tokens
    assert size % 64 == 0
    usual = {round_size(count, capacity) for count in range(1, capacity + 1, 7)}
    assert len(usual) <= 8
    assert max(usual) <= round_up_tokens(capacity)
    # No more padding than an eighth of the capacity, rounded up to a tile.
    assert size - num_tokens < capacity / 8 + 72
