"""Links as a matrix: what is fast, what is slow, what nobody has measured."""

from app.events import LinkSnapshot
from app.flows.links import ITSELF, NOT_MEASURED, describe_link, make_matrix, summarise

NAMES = ("alpha", "beta", "gamma")


def make_link(node, peer, rate=117e6, round_trip_s=0.0004):
    return LinkSnapshot(
        node=node, peer=peer, round_trip_s=round_trip_s, bytes_per_s=rate, measured_s=1000.0
    )


def test_each_direction_stands_by_itself():
    alpha, beta, _ = make_matrix(NAMES, [make_link("alpha", "beta", rate=9e6)])
    assert alpha.cells["alpha"] is ITSELF
    assert alpha.cells["beta"].text == "9 MB/s, 0.40 ms"
    assert beta.cells["alpha"] is NOT_MEASURED


def test_a_slow_rate_and_a_slow_answer_are_marked():
    assert describe_link(make_link("a", "b")).tone == "good"
    assert describe_link(make_link("a", "b", rate=29e6)).tone == "warning"
    assert describe_link(make_link("a", "b", round_trip_s=0.006)).tone == "warning"
    assert describe_link(make_link("a", "b", rate=None)).text == "0.40 ms"


def test_the_summary_says_what_to_do():
    assert "second node" in summarise(("alpha",), [], 1000.0)
    assert "No links" in summarise(NAMES, [make_link("alpha", "gone")], 1000.0)
    words = summarise(NAMES, [make_link("alpha", "beta", rate=1e6)], 1000.0)
    assert "5 links not measured" in words
    assert "1 link much slower than Gigabit Ethernet" in words
