"""Shares follow what each rank needs; equal ranks and single pauses move nothing."""

from __future__ import annotations

import random

import pytest

from agents.trainer.parallel.balance import Balancer, choose_first_shares, predict_s
from tests.draws import seed

DRAW = random.Random(seed(3))


def work(balancer, token_s, noise=0.0, tokens=10_000):
    """Do a step of `tokens` on ranks of these speeds; return whether the shares changed."""
    total = sum(balancer.shares)
    mine = [tokens * share / total for share in balancer.shares]
    seconds = [
        count * one * (1 + DRAW.uniform(0, noise)) for count, one in zip(mine, token_s, strict=True)
    ]
    return balancer.learn(seconds, mine)


def test_a_rank_at_half_speed_has_its_new_share_within_ten_steps():
    balancer = Balancer((0.463, 0.307, 0.229), active=True)
    usual = [1 / 87.9, 1 / 58.3, 1 / 43.5]
    assert not any(work(balancer, usual) for _ in range(20))
    slowed = [2 / 87.9, *usual[1:]]
    changed = [work(balancer, slowed) for _ in range(10)]
    assert sum(changed) == 1
    best = predict_s(choose_first_shares([1 / one for one in slowed]), slowed)
    assert predict_s(balancer.shares, slowed) == pytest.approx(best, rel=0.01)
    assert [work(balancer, usual) for _ in range(10)].count(True) == 1


def test_equal_ranks_keep_equal_shares_under_noise_and_pauses():
    balancer = Balancer(choose_first_shares([1000.0, 985.0]), active=True)
    assert balancer.shares == (1.0, 1.0)
    for step in range(300):
        pause = 3.0 if step % 7 == 0 else 1.0
        assert not work(balancer, [pause, 1.0], noise=0.03)
    assert balancer.shares == (1.0, 1.0)


def test_switched_off_and_alone_nothing_changes():
    for balancer in (Balancer((1.0, 1.0), active=False), Balancer((1.0,), active=True)):
        slow = [9.0, 1.0][: len(balancer.shares)]
        assert not any(work(balancer, slow) for _ in range(20))


def test_a_rank_that_never_had_work_does_not_stop_the_others():
    balancer = Balancer((1.0, 1.0, 0.001), active=True)
    changed = [balancer.learn([2.0, 1.0, 0.0], [500.0, 500.0, 0.0]) for _ in range(10)]
    assert any(changed)
    fast, slow, idle = balancer.shares[1], balancer.shares[0], balancer.shares[2]
    assert fast > slow > idle > 0
