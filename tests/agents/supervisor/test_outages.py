"""A network that is away for a while is waited out; a node that stays away is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.supervisor.outages import OutageWatch
from tests.agents.supervisor.conftest import Node


class Network:
    """Answers of the other nodes, on a clock of the test's own."""

    def __init__(self, node: Node, outage_s: float) -> None:
        intent = replace(node.intent("train", elsewhere=1), addresses={"b": "127.0.0.9"})
        self.silent: tuple[str, ...] = ()
        self.num_asked = 0
        self.watch = OutageWatch(replace(intent, outage_s=outage_s), self._ask)

    def _ask(self, intent: object) -> tuple[str, ...]:
        self.num_asked += 1
        return self.silent

    def wait(self, since_s: float, until_s: float) -> float:
        """Look each half second; return when the wait was no longer excused, else `until_s`."""
        now_s, was_excused = since_s, False
        while now_s < until_s:
            self.watch.look(now_s, now_s)
            if self.watch._thread is not None:
                self.watch._thread.join()
            if was_excused and not self.watch.excuses(now_s, now_s):
                return now_s
            was_excused = self.watch.excuses(now_s, now_s)
            now_s += 0.5
        return until_s


def test_ranks_wait_for_a_silent_node_as_long_as_chosen(node: Node) -> None:
    network = Network(node, outage_s=60.0)
    network.silent = ("b",)
    assert network.wait(0.0, 300.0) == 60.0
    assert network.watch.silent == ("b",)


def test_whether_nodes_answer_is_known_only_once_a_probe_has_ended(node: Node) -> None:
    network = Network(node, outage_s=60.0)
    network.silent = ("b",)
    for now_s in (4.5, 5.0):
        network.watch.look(now_s, now_s)
        assert not network.watch.is_known
    assert network.watch._thread is not None
    network.watch._thread.join()
    network.watch.look(5.5, 5.5)
    assert (network.watch.is_known, network.watch.silent) == (True, ("b",))
    network.watch.look(0.0, 6.0)
    assert not network.watch.is_known, "the next wait needs a probe of its own"
    alone = OutageWatch(node.intent("train", elsewhere=1))
    assert alone.is_known, "a master of an earlier version named no addresses"


def test_after_an_outage_ranks_get_as_long_again_to_go_on(node: Node) -> None:
    network = Network(node, outage_s=60.0)
    network.silent = ("b",)
    assert network.wait(0.0, 50.0) == 50.0
    network.silent = ()
    ended_s = network.wait(50.0, 300.0)
    assert 95.0 < ended_s < 110.0
    assert network.watch.silent == ()


@pytest.mark.parametrize(("outage_s", "waits_s"), [(60.0, 0.0), (60.0, 4.5), (8.0, 3.5)])
def test_nobody_is_asked_while_ranks_train(node: Node, outage_s: float, waits_s: float) -> None:
    network = Network(node, outage_s=outage_s)
    for now_s in range(100):
        network.watch.look(waits_s, float(now_s))
    assert network.num_asked == 0


def test_a_rank_that_hangs_beside_a_sound_network_is_not_excused(node: Node) -> None:
    network = Network(node, outage_s=60.0)
    network.wait(0.0, 100.0)
    assert network.num_asked > 10
    assert not network.watch.excuses(70.0, 100.0)


def test_a_node_that_is_lost_while_ranks_load_is_known_though_no_rank_waits_yet(node: Node) -> None:
    network = Network(node, outage_s=30.0)

    def look(now_s: float, *, waits_s: float = 0.0) -> float:
        network.watch.look(waits_s, now_s, is_loading=True)
        if network.watch._thread is not None:
            network.watch._thread.join()
        return network.watch.measure(now_s)

    assert [look(float(now_s)) for now_s in range(0, 600, 2)] == [0.0] * 300
    network.silent = ("b",)
    away_s = [look(float(now_s)) for now_s in range(600, 640, 2)]
    assert away_s[-1] >= 36.0
    # A rank that had waited for a slow node for long before gives it as long to come back.
    assert network.watch.excuses(630.0, 610.0)
    assert not network.watch.excuses(630.0, 638.0)
    network.watch.forgive(638.0)
    assert look(640.0) == 2.0
    network.silent = ()
    look(642.0)
    assert look(644.0) == 0.0
