"""A sleep and a clock that is set are told apart, and neither is taken for a hang."""

from __future__ import annotations

from agents.supervisor.clocks import Clocks, ClockWatch, Sleep, read_clocks
from agents.supervisor.verdict import AttemptOutcome, judge_sleep


class Pc:
    """Clocks that the test moves."""

    def __init__(self) -> None:
        self.now = Clocks(100.0, 5000.0, 1_800_000_000.0)
        self.watch = ClockWatch(lambda: self.now)

    def run(self, awake_s: float, asleep_s: float = 0.0, set_s: float = 0.0) -> None:
        old, passed_s = self.now, awake_s + asleep_s
        self.now = Clocks(
            old.monotonic_s + awake_s, old.boot_s + passed_s, old.wall_s + passed_s + set_s
        )


def test_a_sleep_of_ten_minutes_is_named_with_its_times() -> None:
    pc = Pc()
    pc.run(0.5)
    assert pc.watch.look() == (None, 0.0)
    pc.run(0.5, asleep_s=600.0)
    sleep, set_s = pc.watch.look()
    assert sleep is not None
    assert (sleep.duration_s, set_s) == (600.0, 0.0)
    assert sleep.ended_s == pc.now.wall_s
    assert pc.watch.recent_sleep == sleep
    pc.run(70.0)
    assert pc.watch.look() == (None, 0.0)
    assert pc.watch.recent_sleep is None, "what fails a minute later has another cause"


def test_a_clock_that_is_set_is_no_sleep() -> None:
    pc = Pc()
    for set_s in (3600.0, -7200.0):
        pc.run(0.5, set_s=set_s)
        assert pc.watch.look() == (None, set_s)
    pc.run(300.0, set_s=0.05)  # a stopped process, and a time server that corrects
    assert pc.watch.look() == (None, 0.0)
    assert pc.watch.recent_sleep is None


def test_a_clock_may_be_set_as_the_pc_wakes() -> None:
    pc = Pc()
    pc.run(0.5, asleep_s=600.0, set_s=-30.0)
    sleep, set_s = pc.watch.look()
    assert sleep is not None
    assert (sleep.duration_s, set_s) == (600.0, -30.0)


def test_ranks_that_lost_others_in_a_sleep_name_it() -> None:
    lost = AttemptOutcome(state="failed", message="Rank 1 lost its connection.", peer_lost=True)
    found = judge_sleep(Sleep(1_800_000_000.0, 1_800_000_600.0), "b", lost)
    assert found.message.startswith("Node b slept from ")
    assert (found.cause, found.peer_lost) == ("slept", False)


def test_this_pc_did_not_sleep_in_between() -> None:
    watch = ClockWatch()
    assert read_clocks().boot_s >= read_clocks().monotonic_s - 1.0
    assert watch.look() == (None, 0.0)
