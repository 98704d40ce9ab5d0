"""The messages of stages do not hold each other up where NCCL carries them out.

NCCL does what a rank sends and receives in a group one after the other, and a message when both of
its ranks have come to it. Here the stages' own calls are played with that rule.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import distributed as dist

from agents.trainer.parallel.pipeline.order import plan_in_flight, plan_order
from agents.trainer.parallel.pipeline.transport import NUM_LANES, Transport
from agents.trainer.parallel.pipeline.wire_format import WireFormat
from agents.trainer.rank import group as group_module
from agents.trainer.rank.group import Group, Ranks

DEPTH = 2


@dataclass(eq=False)
class Message:
    """One end of a message."""

    sender: int
    receiver: int
    tag: int
    begun_after: int
    """Things on the rank's own stream that are before it."""
    is_done: bool = False

    def wait(self) -> None:
        """Let the rank's stream wait for it, as NCCL does."""
        Wire.rank.stream.append(self)


@dataclass
class Rank:
    """What a rank has put on its GPU."""

    number: int
    stream: list[Message] = field(default_factory=list)
    queues: dict[object, list[Message]] = field(default_factory=lambda: defaultdict(list))
    at: int = 0

    def advance(self) -> None:
        """Go on to the first message that is waited for."""
        while self.at < len(self.stream) and self.stream[self.at].is_done:
            self.at += 1

    def next_in(self, lane: object) -> Message | None:
        """Return what NCCL does next in a group; None: nothing can be done."""
        waiting = [one for one in self.queues[lane] if not one.is_done]
        return waiting[0] if waiting and waiting[0].begun_after <= self.at else None


class Wire:
    """Stands in for NCCL."""

    rank: Rank
    """The one whose calls come now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, one_group_a_lane: bool) -> None:
        self._one_group_a_lane = one_group_a_lane
        self._made = 0
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(dist, "new_group", self._make_group)
        monkeypatch.setattr(dist, "isend", self._send)
        monkeypatch.setattr(dist, "irecv", self._receive)
        monkeypatch.setattr(group_module, "outlast_outages", lambda: None)

    def play(self, num_stages: int, num_micro: int) -> bool:
        """Return whether all stages come to the end of a step."""
        ranks = [Rank(number) for number in range(num_stages)]
        for rank in ranks:
            Wire.rank, self._made = rank, 0
            make_calls(rank.number, num_stages, num_micro)
        while any([self._meet(a, b) for a, b in pairwise(ranks)]):
            pass
        return all(rank.at == len(rank.stream) for rank in ranks)

    def _meet(self, a: Rank, b: Rank) -> bool:
        """Carry out the messages for which two ranks are ready; return whether there were any."""
        found = False
        for lane in [*a.queues]:
            mine, theirs = a.next_in(lane), b.next_in(lane)
            if mine and theirs and _ends(mine) == _ends(theirs):
                mine.is_done = theirs.is_done = found = True
        a.advance()
        b.advance()
        return found

    def _make_group(self, ranks: list[int]) -> object:
        self._made += 1
        return self._made % NUM_LANES if self._one_group_a_lane else (self._made, *ranks)

    def _send(self, tensor: object, to: int, lane: object, tag: int) -> Message:
        return self._add(lane, self.rank.number, to, tag)

    def _receive(self, tensor: object, source: int, lane: object, tag: int) -> Message:
        return self._add(lane, source, self.rank.number, tag)

    def _add(self, lane: object, sender: int, receiver: int, tag: int) -> Message:
        assert lane is not None
        message = Message(sender, receiver, tag, len(self.rank.stream))
        self.rank.queues[lane].append(message)
        return message


def _ends(message: Message) -> tuple[int, int, int]:
    return message.sender, message.receiver, message.tag


def make_calls(number: int, num_stages: int, num_micro: int) -> None:
    """Do a step of a stage, without computing anything."""
    in_flight = plan_in_flight(DEPTH, [None] * num_stages)
    group = Group(Ranks(rank=number, world_size=num_stages), ["a rank"] * num_stages)
    group._store = dist.HashStore()
    group.open_lanes([*pairwise(range(num_stages))], NUM_LANES)
    is_last = number + 1 == num_stages
    transport = Transport(
        group,
        torch.device("cpu"),
        WireFormat(4, torch.float32),
        previous=number - 1 if number else None,
        following=None if is_last else number + 1,
        ahead=DEPTH,
    )
    features = torch.zeros(1, 4)
    transport.begin([1] * num_micro, streams=1, is_training=True)
    for kind, micro in plan_order(num_micro, in_flight[number]):
        if kind == "forward":
            if number:
                transport.receive_features(micro)
                transport.confirm_gradient(micro - in_flight[number - 1])
            if not is_last:
                transport.send_features(micro, features)
        else:
            if not is_last:
                transport.receive_gradient(micro)
            if number:
                transport.send_gradient(micro, features)
    transport.finish()


@pytest.mark.parametrize(("num_stages", "num_micro"), [(2, 3), (5, 8), (7, 8), (7, 64)])
def test_stages_come_to_the_end_of_a_step_over_nccl(monkeypatch, num_stages, num_micro):
    assert Wire(monkeypatch, one_group_a_lane=False).play(num_stages, num_micro)


def test_stages_that_share_the_groups_of_lanes_stand_still(monkeypatch):
    assert not Wire(monkeypatch, one_group_a_lane=True).play(7, 8)
