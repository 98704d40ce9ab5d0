"""Evaluation data may be far larger than the memory, and every rank does its share of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agents.trainer.data.examples import Example, Segment
from agents.trainer.evaluation import evaluate
from agents.trainer.parallel import batch
from agents.trainer.parallel.data_parallel import DataParallel
from agents.trainer.rank.group import Group, Ranks
from agents.trainer.rank.state_guard import StateGuard
from tests.agents.trainer.ranks import make_spec


class Rows:
    """Ten rows, of which the reader may hold so many."""

    num_tokens = np.arange(10, 20, dtype=np.int32)
    weights = np.arange(9, 19, dtype=np.int32)
    parts = (10,)

    def __len__(self):
        return 10

    def __getitem__(self, place):
        is_target = np.arange(10 + place) > 0
        return Example((Segment(place + 1, np.zeros(10 + place, dtype=np.int32), is_target),))


class Counting:
    """An executor whose loss is 1 for each token that counts."""

    def __init__(self):
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.parts = []

    def evaluate(self, part):
        self.parts.append(list(part.places))
        self.sums.zero_()
        self.sums[0] = sum(example.num_targets for example in part.examples)


def make_strategy(executor, group, shares):
    context = SimpleNamespace(group=group, device=torch.device("cpu"), guard=StateGuard())
    strategy = DataParallel(make_spec(shares=shares), context)
    strategy._flat = SimpleNamespace(buckets=())
    strategy._transport = SimpleNamespace(is_lossy=False)
    strategy.start(executor, None, shares=None, tokens_per_s=())
    return strategy


@pytest.mark.parametrize("at_once", [3, 1024])
def test_rows_are_taken_a_block_at_a_time(monkeypatch, at_once):
    monkeypatch.setattr(batch, "_EVALUATED_AT_ONCE", at_once)
    executor = Counting()
    strategy = make_strategy(executor, Group(Ranks(), ["rank 0"]), (1.0,))
    found = evaluate(strategy, Rows(), first_place=100)
    assert found.means[0] == 1.0
    assert [place for part in executor.parts for place in part] == list(range(100, 110))
    assert max(map(len, executor.parts)) == min(at_once, 10)


def test_a_rank_without_rows_adds_nothing():
    group = Group(Ranks(), ["rank 0", "rank 1"])
    group.rank, group.sum = 1, lambda tensor: None
    executor = Counting()
    found = evaluate(make_strategy(executor, group, (1e9, 1.0)), Rows(), first_place=0)
    assert (found.means, executor.parts) == ((0.0, 0.0, 0.0), [])
