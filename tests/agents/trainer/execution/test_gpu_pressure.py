"""Other programs on a GPU are noticed when they take more and little is left."""

import torch

from agents.trainer.execution.gpu_pressure import GpuPressure, watch_gpu

MIB = 1 << 20


class Card:
    """A GPU of 12,000 MiB, of which others have some, and the clock of who looks at it."""

    def __init__(self):
        self.others, self.own, self.time_s, self.looks = 600, 11_300, 0.0, 0
        self.neighbours = GpuPressure(self.read, lambda: self.time_s)

    def read(self):
        self.looks += 1
        total = 12_000
        return (total - self.others - self.own) * MIB, total * MIB, self.own * MIB

    def ask(self, after_s=5.0):
        self.time_s += after_s
        return self.neighbours.is_high()


def test_those_that_were_there_at_first_take_nothing():
    card = Card()
    card.own = 8_000
    assert not card.ask()
    card.others += 300
    assert not card.ask(), "a library of our own that takes its part in the first steps"
    assert not card.ask()
    card.own = 11_090
    assert not card.ask(), "our own growth leaves little, and is nobody else's"
    card.others += 10
    assert not card.ask(), "a driver takes a little late"


def test_one_that_comes_later_is_noticed_where_little_is_left():
    card = Card()
    card.own = 8_000
    assert [card.ask() for _ in range(3)] == [False] * 3
    card.others += 1_000
    assert not card.ask(), "there is enough for both"
    card.own += 2_100
    assert card.ask()


def test_the_card_is_looked_at_every_few_seconds():
    card = Card()
    for _ in range(20):
        card.ask(after_s=1.0)
    assert 3 <= card.looks <= 5


def test_a_processor_has_no_such_neighbours():
    assert watch_gpu(torch.device("cpu")) is None
