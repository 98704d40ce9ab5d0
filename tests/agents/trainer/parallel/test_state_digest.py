"""The digest shows every difference between two ranks' states, of any type of number."""

from __future__ import annotations

import pytest
import torch

from agents.trainer.parallel.state_digest import _ROWS_AT_ONCE, digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_one_bit_more_and_swapped_values_show(dtype):
    first = torch.arange(1, 102).to(dtype)
    one_more, swapped = first.clone(), first.clone()
    one_more.view(torch.uint8)[-1] ^= 1
    swapped[[0, 1]] = swapped[[1, 0]]
    found = {tuple(digest([t, first]).tolist()) for t in (first, one_more, swapped)}
    assert len(found) == 3
    assert digest([first, first]).tolist() == digest([first.clone(), first]).tolist()


def test_what_lies_beyond_one_row_and_the_order_of_tensors_count(monkeypatch):
    monkeypatch.setattr("agents.trainer.parallel.state_digest._ROW", 8)
    a, b = torch.ones(20), torch.ones(20)
    a[5] = b[17] = 2
    assert digest([a, b]).tolist() != digest([b, a]).tolist()
    assert digest([a]).tolist() != digest([b]).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
def test_a_state_of_several_rows_stays_as_it_was(monkeypatch, dtype):
    monkeypatch.setattr("agents.trainer.parallel.state_digest._ROW", 8)
    values = torch.arange(1, 30).to(dtype)
    before = values.clone()
    digest([values])
    assert torch.equal(values, before)


@pytest.mark.parametrize("num_values", [7, 8, 20, 24, 61])
def test_how_many_rows_are_taken_at_once_makes_no_difference(monkeypatch, num_values):
    monkeypatch.setattr("agents.trainer.parallel.state_digest._ROW", 8)
    values = torch.linspace(-1, 1, num_values)
    one_by_one = digest([values]).tolist()
    for rows in (2, 3, 128):
        monkeypatch.setitem(_ROWS_AT_ONCE, "cpu", rows)
        assert digest([values]).tolist() == one_by_one
