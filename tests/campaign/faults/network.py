"""Faults of cables: cut, cut one way, cut for data or control alone, and slow."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.site import LOST_AFTER_S
from tests.cluster.namespaces import Node, run_tool

if TYPE_CHECKING:
    from tests.campaign.case import Case

NOBODY = "02:00:00:00:00:01"
"""Hardware address that no card has: what is sent there is lost."""
SHORT_S = LOST_AFTER_S / 2
LONG_S = LOST_AFTER_S + 12.0


def lose(sender: Node, receiver: Node) -> None:
    """Let everything that `sender` sends to `receiver` get lost."""
    neighbour = ["neigh", "replace", receiver.address, "lladdr", NOBODY, "dev", "eth0"]
    run_tool("ip", "-n", sender.namespace, *neighbour, "nud", "permanent")


def find_again(sender: Node, receiver: Node) -> None:
    neighbour = ["neigh", "del", receiver.address, "dev", "eth0"]
    run_tool("ip", "-n", sender.namespace, *neighbour, check=False)


class Cut(Fault):
    name = "cable-cut-short"
    does = "cable of a node cut for less than the patience"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(1.0, min(SHORT_S, max_cut_s))

    @property
    def expectation(self) -> Expectation:
        return Expectation(recovery="untouched", alarms=True)

    def do(self, case: Case) -> None:
        case.site.cluster.cut(case.node)

    def undo(self, case: Case) -> None:
        case.site.cluster.heal(case.node)


class LongCut(Cut):
    name = "cable-cut-long"
    does = "cable of a node cut for more than the patience"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(LONG_S, max(LONG_S, max_cut_s))

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            named=(("{node}", "was lost"),),
            within_s=LOST_AFTER_S + 5.0,
            recovery="recovered",
            back_s=LOST_AFTER_S + 20.0,
            alarms=True,
        )


class OneWay(LongCut):
    name = "cable-one-way"
    does = "what a node sends is lost, what it receives is not"

    def do(self, case: Case) -> None:
        for other in (case.site.cluster.master, *case.site.nodes):
            if other is not case.node:
                lose(case.node, other)

    def undo(self, case: Case) -> None:
        for other in (case.site.cluster.master, *case.site.nodes):
            if other is not case.node:
                find_again(case.node, other)


class ControlCut(Fault):
    name = "control-cut"
    does = "cable of the master cut"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(1.0, max(LONG_S, max_cut_s))

    @property
    def expectation(self) -> Expectation:
        return Expectation(recovery="untouched")

    def do(self, case: Case) -> None:
        case.site.cluster.cut(case.site.cluster.master)

    def undo(self, case: Case) -> None:
        case.site.cluster.heal(case.site.cluster.master)


class DataCut(Cut):
    name = "data-cut-short"
    does = "nodes lose each other for a while, the master reaches both"

    def do(self, case: Case) -> None:
        for other in case.others:
            lose(case.node, other)
            lose(other, case.node)

    def undo(self, case: Case) -> None:
        for other in case.others:
            find_again(case.node, other)
            find_again(other, case.node)


class SwitchOff(Cut):
    name = "switch-off-short"
    does = "the switch of all PCs off for less than the patience"

    def do(self, case: Case) -> None:
        cluster = case.site.cluster
        for pc in (cluster.master, *case.site.nodes):
            cluster.cut(pc)

    def undo(self, case: Case) -> None:
        cluster = case.site.cluster
        for pc in (cluster.master, *case.site.nodes):
            cluster.heal(pc)


class LongSwitchOff(SwitchOff):
    name = "switch-off-long"
    does = "the switch of all PCs off for more than the patience"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(LONG_S, max(LONG_S, max_cut_s))

    @property
    def expectation(self) -> Expectation:
        # Nobody can say which node was lost, and nothing can go on before the switch is back.
        return Expectation(recovery="recovered", back_s=self.lasts_s + 20.0, alarms=True)


class SlowLink(Fault):
    name = "slow-link"
    does = "link of a node at 2 Mbit/s"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(5.0, 15.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation(recovery="untouched")

    def do(self, case: Case) -> None:
        self._shape(case.node, "2mbit")

    def undo(self, case: Case) -> None:
        self._shape(case.node, "1gbit")

    def _shape(self, node: Node, rate: str) -> None:
        shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "200ms"]
        run_tool("tc", "-n", node.namespace, "qdisc", "replace", "dev", "eth0", *shape)


KINDS = (Cut, LongCut, OneWay, ControlCut, DataCut, SwitchOff, LongSwitchOff, SlowLink)
