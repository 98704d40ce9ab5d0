"""Who may go on: of every partition of two to five nodes one group at most, and one node of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from agents.contract.election import NodeState, decide_election, is_majority

NAMES = ("a", "b", "c", "d", "e")


def partitions(nodes: tuple[str, ...]) -> Iterator[list[tuple[str, ...]]]:
    """Yield every way to divide the nodes into groups."""
    if not nodes:
        yield []
        return
    first, rest = nodes[0], nodes[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(node for node in rest if node not in others)
            yield from ([(first, *others), *found] for found in partitions(left))


def lost(node: str, **changes: object) -> NodeState:
    fields: dict[str, object] = {"part": "lost", "is_free": True, **changes}
    return NodeState(node=node, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_of_every_partition_one_group_goes_on_if_any_and_one_node_of_it_decides(count: int) -> None:
    nodes, num_partitions = NAMES[:count], 0
    for groups in partitions(nodes):
        num_partitions += 1
        deciding = {
            node: found.members
            for group in groups
            for node in group
            if (found := decide_election(node, nodes, {n: lost(n) for n in group})).act == "propose"
        }
        may = [group for group in groups if is_majority(group, nodes)]
        assert len(may) <= 1
        assert deciding == ({may[0][0]: may[0]} if may else {})
        if 2 * max(map(len, groups)) > count:
            assert may, "a majority goes on"
    assert num_partitions == {2: 2, 3: 5, 4: 15, 5: 52}[count], "Bell's numbers"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_two_majorities_always_have_a_node_in_common(count: int) -> None:
    nodes = NAMES[:count]
    groups = [set(g) for n in range(count + 1) for g in itertools.combinations(nodes, n)]
    deciding = [group for group in groups if is_majority(group, nodes)]
    assert all(one & other for one in deciding for other in deciding)


def test_of_two_nodes_the_one_with_rank_0_decides() -> None:
    nodes = ("b", "a")
    assert decide_election("b", nodes, {"b": lost("b")}).act == "propose"
    assert decide_election("a", nodes, {"a": lost("a")}).act == "wait"


@pytest.mark.parametrize(
    ("other", "act"),
    [
        (lost("b"), "propose"),
        (lost("b", part="active"), "wait"),
        (lost("b", is_free=False), "wait"),
        (lost("b", part="closed", reason="a person stopped it"), "close"),
    ],
)
def test_a_node_that_trains_has_a_master_or_was_stopped_holds_all_back(
    other: NodeState, act: str
) -> None:
    found = decide_election("a", NAMES[:3], {"a": lost("a"), "b": other})
    assert found.act == act
    assert found.members == (("a", "b") if act == "propose" else ())
