"""A slice is cut into micro-batches that hold every row once and fit the budget."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from agents.trainer.micro import estimate_tokens, group_rows


@given(lengths=st.lists(st.integers(1, 300), max_size=40), budget=st.integers(1, 900))
def test_every_row_is_in_one_group_that_fits(lengths, budget):
    groups = group_rows(lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[row] for row in group) * len(group)
        assert padded <= budget or len(group) == 1


def test_the_longest_rows_come_first():
    assert group_rows([1, 5, 3], max_tokens=5) == [[1], [2], [0]]


def test_a_card_gets_as_many_tokens_as_it_holds():
    llama = SimpleNamespace(hidden_size=4096, num_hidden_layers=32, vocab_size=32000)
    assert estimate_tokens(llama, 4 << 30, longest=64) == 528
    assert estimate_tokens(llama, 1 << 20, longest=64) == 64
