"""A pasted list of PCs: every line is read, named and judged."""

from __future__ import annotations

from app.flows.node_list import NodeOutcome, parse_node_list, summarise_outcomes

TEXT = """
# the lab
big anna@192.168.1.20:2222   # the tower
gamer-pc, bob@10.0.0.3,10.0.0.4

big zoe@10.0.0.5
all eve@10.0.0.6
a b c
wrong anna@pc:x
[fe80::7]:22
"""


def test_each_line_is_read_named_and_judged() -> None:
    lines = parse_node_list(TEXT, ["node-1"])
    assert [(x.number, x.name, x.target) for x in lines] == [
        (3, "big", "anna@192.168.1.20:2222"),
        (4, "gamer-pc", "gamer-pc"),
        (4, "node-2", "bob@10.0.0.3"),
        (4, "node-3", "10.0.0.4"),
        (6, "big", "zoe@10.0.0.5"),
        (7, "all", "eve@10.0.0.6"),
        (8, "a", "a"),
        (9, "wrong", "anna@pc:x"),
        (10, "node-4", "[fe80::7]:22"),
    ]
    problems = {x.number: x.problem for x in lines if x.problem}
    assert "already exists, or stands above" in problems.pop(6)
    assert "reserved" in problems.pop(7)
    assert "too many words" in problems.pop(8)
    assert "port 'x'" in problems.pop(9)
    assert problems == {}


def test_the_summary_counts_what_waits_and_what_failed() -> None:
    line = parse_node_list("a", ())[0]
    states = ("added", "added", "confirm", "failed")
    outcomes = [NodeOutcome(line=line, state=state, message="") for state in states]
    said = "2 PCs are added, 1 fingerprint to compare, 1 could not be added."
    assert summarise_outcomes(outcomes) == said
    assert summarise_outcomes(()) == "No PC is listed."
