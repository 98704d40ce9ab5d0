"""Every batch is cut into slices that are the batch again, in proportion to the shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.trainer.parallel.shares import shares_from_speeds, split_batch

LENGTHS = st.lists(st.integers(1, 2048), min_size=1, max_size=64)
SHARES = st.lists(st.floats(0.001, 100), min_size=1, max_size=10)


@given(lengths=LENGTHS, shares=SHARES)
def test_slices_are_the_batch_without_gap_or_double(lengths, shares):
    slices = split_batch(lengths, shares)
    assert len(slices) == len(shares)
    assert [place for part in slices for place in part] == list(range(len(lengths)))


@given(lengths=LENGTHS, shares=SHARES)
def test_no_cut_is_further_off_than_half_a_sequence(lengths, shares):
    wanted = passed = 0.0
    for part, share in zip(split_batch(lengths, shares), shares, strict=True):
        wanted += share / sum(shares) * sum(lengths)
        passed += sum(lengths[place] for place in part)
        assert abs(passed - wanted) <= max(lengths) / 2 + 1e-6 * sum(lengths)


@pytest.mark.parametrize(
    ("shares", "tokens"),
    [((7, 5, 3), (70, 50, 30)), ((1, 1, 6), (20, 20, 110)), ((1, 1, 1000), (0, 0, 150))],
)
def test_tokens_follow_the_shares(shares, tokens):
    slices = split_batch([10] * 15, shares)
    assert tuple(10 * len(part) for part in slices) == tokens


def test_a_rank_may_get_nothing():
    assert split_batch([5], [1, 1, 1]) == [range(0, 0), range(0, 1), range(1, 1)]


def test_shares_follow_speed_and_never_vanish():
    assert shares_from_speeds([300.0, 200.0, 500.0]) == (0.3, 0.2, 0.5)
    assert shares_from_speeds([1e6, 1.0])[1] > 0
