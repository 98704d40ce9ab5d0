"""Evaluation data may be far larger than the memory, and every rank does its share of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agents.trainer import evaluation
from agents.trainer.data.examples import Example, Segment
from agents.trainer.evaluation import evaluate
from agents.trainer.rank.group import Group, Ranks


class Rows:
    """Ten rows, of which the reader may hold so many."""

    num_tokens = np.arange(10, 20, dtype=np.int32)
    weights = np.arange(9, 19, dtype=np.int32)

    def __len__(self):
        return 10

    def __getitem__(self, place):
        is_target = np.arange(10 + place) > 0
        return Example((Segment(place + 1, np.zeros(10 + place, dtype=np.int32), is_target),))


class Counting:
    """A computer whose loss is 1 for each token that counts."""

    def __init__(self):
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.parts = []

    def evaluate(self, part):
        self.parts.append(list(part.places))
        self.sums.zero_()
        self.sums[0] = sum(example.num_targets for example in part.examples)


@pytest.mark.parametrize("at_once", [3, 1024])
def test_rows_are_taken_a_block_at_a_time(monkeypatch, at_once):
    monkeypatch.setattr(evaluation, "_AT_ONCE", at_once)
    computer = Counting()
    found = evaluate(computer, Group(Ranks(), ["rank 0"]), Rows(), (1.0,), first_place=100)
    assert found.means[0] == 1.0
    assert [place for part in computer.parts for place in part] == list(range(100, 110))
    assert max(map(len, computer.parts)) == min(at_once, 10)


def test_a_rank_without_rows_adds_nothing(monkeypatch):
    group = Group(Ranks(), ["rank 0", "rank 1"])
    group.rank, group.sum = 1, lambda tensor: None
    computer = Counting()
    found = evaluate(computer, group, Rows(), (1e9, 1.0), first_place=0)
    assert (found.means, computer.parts) == ((0.0, 0.0, 0.0), [])
