"""Groups hold every example once and fit the budget; sizes that repeat are few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.shared.micro_shapes import group_examples, round_size, round_up_tokens


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
