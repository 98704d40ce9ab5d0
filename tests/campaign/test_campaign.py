"""What the campaign draws, concludes and prints; and, by hand, one pass over its machinery."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.supervisor.process_signs import describe_state
from app.runs.journals.event_text import describe_line
from tests.campaign.__main__ import main
from tests.campaign.attack import Attack
from tests.campaign.case import Case
from tests.campaign.delays import EVERY_S, Delays
from tests.campaign.draw import Drawn, draw_faults, is_possible
from tests.campaign.faults import FAULTS
from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.history import (
    Damage,
    Step,
    compare,
    find_return_s,
    is_on_all_ranks,
    read_load_s,
    read_steps,
)
from tests.campaign.keeper import Line
from tests.campaign.parts import Tally
from tests.campaign.record import Record
from tests.campaign.report import PAGE, replace_part
from tests.campaign.site import Stuck, wait_until
from tests.campaign.table import Campaign, Session, as_markdown, as_text, count_totals, join
from tests.campaign.verdict import WENT_ON, Finding, conclude, find_name

CALM = Expectation()
KILL = Expectation(named=(("{node}",),), within_s=1.0, recovery="recovered", alarms=True)
FINDING = Finding(
    number=1,
    run=1,
    fault="rank-kill",
    detail="",
    victim="node1",
    at_step=5,
    state="done",
    detected_s=0.5,
    told="",
    back_s=7.0,
    attempts=2,
    is_on_same_ranks=True,
    damage=Damage(is_equal=True, difference=0.0, repeated=2),
)


def steps(
    attempt: int, numbers: range, begin_s: float, rank: int = 0, loss: float = 1.0
) -> list[Step]:
    return [
        Step(attempt, rank, n, begin_s + n - numbers[0], f"rows{n}", (loss / n).hex())
        for n in numbers
    ]


def test_a_seed_draws_the_same_faults_and_every_kind_before_any_comes_again() -> None:
    def draw(count: int, seed: int) -> list[tuple[object, ...]]:
        drawn = draw_faults(count, seed, num_nodes=3, steps=(5, 90))
        return [(d.fault.name, d.fault.lasts_s, d.node, d.at_step) for d in drawn]

    assert draw(40, 7) == draw(40, 7)
    assert draw(40, 7)[:20] == draw(20, 7)
    assert draw(40, 7) != draw(40, 8)
    assert {name for name, *_ in draw(len(FAULTS), 3)} == set(FAULTS)
    without_master = FAULTS["node-loss-without-master"]
    assert [is_possible(without_master, num_nodes) for num_nodes in (2, 3)] == [False, True]


def test_too_few_steps_are_refused_with_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--steps", "89"])
    assert "--steps: 89 is too few, take 90 or more" in capsys.readouterr().err


def test_a_resume_from_a_checkpoint_loses_and_doubles_nothing() -> None:
    whole = steps(1, range(1, 11), 0.0)
    resumed = [*steps(1, range(1, 8), 0.0), *steps(2, range(5, 11), 20.0)]
    found = compare(resumed, whole)
    assert found == Damage(repeated=3, difference=0.0, final_difference=0.0, is_equal=True)
    assert find_return_s(resumed, 6.5, is_new_attempt=True) == 13.5


def test_ranks_that_regroup_within_an_attempt_count_once() -> None:
    whole = steps(1, range(1, 11), 0.0)
    told = [
        *steps(1, range(1, 8), 0.0),
        *steps(1, range(7, 11), 20.0),
        *steps(1, range(1, 8), 0, 1),
    ]
    assert compare(told, whole) == Damage(
        repeated=1, difference=0.0, final_difference=0.0, is_equal=True
    )
    assert find_return_s(sorted(told, key=lambda s: s.time_s), 6.0, is_new_attempt=False) == 14.0


def test_ranks_that_went_on_without_one_are_told_from_one_that_died_late() -> None:
    both = [*steps(1, range(1, 11), 0.0), *steps(1, range(1, 11), 0.0, 1)]
    assert is_on_all_ranks(both, 2)
    assert is_on_all_ranks(both[:-1], 2)
    assert not is_on_all_ranks(both[:-5], 2)
    assert not is_on_all_ranks([*both, *steps(2, range(8, 11), 20.0)], 2)


def test_what_is_wrong_with_a_history_is_found() -> None:
    whole = steps(1, range(1, 11), 0.0)
    skipped = [*steps(1, range(1, 5), 0.0), *steps(2, range(6, 11), 20.0)]
    assert compare(skipped, whole).lost == 1
    assert compare(whole[:7], whole).lost == 3
    assert compare(whole[:7], whole, is_done=False).lost == 0
    assert compare([*whole, *steps(2, range(11, 12), 30.0)], whole).doubled == 1
    zombie = [*steps(1, range(1, 9), 0.0), *steps(2, range(6, 11), 6.5)]
    assert compare(zombie, whole).double_run
    other = compare(steps(1, range(1, 11), 0.0, loss=1.00001), whole)
    assert not other.is_equal
    assert other.difference == pytest.approx(1e-5, rel=0.01)
    torn = [replace(step, rank=1, samples="others") for step in whole[:2]]
    assert compare([*whole, *torn], whole).disagreeing == 2


def test_journals_are_read_with_a_line_that_a_full_disk_cut(tmp_path: Path) -> None:
    record = {"kind": "step", "step": 1, "time_s": 2.0, "samples": "a", "loss_hex": "0x1p+0"}
    journal = tmp_path / "attempts" / "2" / "rank-1.jsonl"
    journal.parent.mkdir(parents=True)
    lines = [json.dumps(record), '{"kind": "st', json.dumps({**record, "step": 2}), '{"kind"']
    journal.write_text("\n".join(lines))
    found = read_steps([tmp_path])
    assert [(step.attempt, step.rank, step.step) for step in found] == [(2, 1, 1), (2, 1, 2)]
    (tmp_path / "attempts/2/rank-0.jsonl").write_text('{"kind": "phase", "time_s": 0.5}\n')
    assert read_load_s([tmp_path], 2) == 1.5
    assert read_load_s([tmp_path], 1) == 0.0


@pytest.mark.parametrize(
    ("change", "expectation", "broken"),
    [
        ({}, KILL, ""),
        ({"state": "interrupted"}, KILL, "did not heal"),
        ({"detected_s": None}, KILL, "not named"),
        ({"detected_s": 4.0}, KILL, "named after 4.0 s"),
        ({"back_s": 99.0, "load_s": 9.0}, KILL, "back after 90.0 s and the load"),
        ({"back_s": 99.0, "load_s": 90.0}, KILL, ""),
        ({"orphans": ("rank",)}, KILL, "1 processes left"),
        ({"leftovers": ("port 1",)}, KILL, "left behind: port 1"),
        ({"detected_s": 4.0, "named_delay_s": 2.5}, KILL, "named after 4.0 s"),
        ({"state": WENT_ON}, KILL, ""),
        ({"damage": Damage(difference=1e-9)}, KILL, "differ on the same ranks"),
        ({"damage": Damage(difference=1e-9), "is_on_same_ranks": False}, KILL, ""),
        ({"damage": Damage(difference=1e-3), "is_on_same_ranks": False}, KILL, "losses differ"),
        (
            {"damage": Damage(difference=3e-6, final_difference=2e-6), "is_on_same_ranks": False},
            KILL,
            "the last loss differs",
        ),
        (
            {"damage": Damage(difference=3e-6, final_difference=2e-7), "is_on_same_ranks": False},
            KILL,
            "",
        ),
        ({"attempts": 2}, CALM, "restarted without need"),
        ({"attempts": 1, "alarms": ("stands still",)}, CALM, "false alarm: stands still"),
        ({"breaks": ("two runs",), "attempts": 1}, CALM, "two runs"),
    ],
)
def test_each_broken_promise_is_named(
    change: dict[str, object], expectation: Expectation, broken: str
) -> None:
    found = conclude(replace(FINDING, **change), expectation).breaks  # type: ignore[arg-type]
    assert (broken in " ".join(found)) if broken else found == ()


def test_a_time_that_waited_for_a_core_is_late_and_no_broken_promise() -> None:
    busy = replace(FINDING, detected_s=4.0, named_delay_s=3.5, back_s=24.0, back_delay_s=5.0)
    found = conclude(busy, KILL)
    assert found.breaks == ()
    assert found.late == (
        "named after 4.0 s, not 1.0 s; 3.5 s of that without a core",
        "back after 24.0 s and the load, not 20.0 s; 5.0 s of that without a core",
    )
    assert conclude(FINDING, KILL).late == ()


def test_the_wait_of_a_process_for_a_core_is_measured() -> None:
    begin_s = time.time()
    core = {min(os.sched_getaffinity(0))}
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    delays = Delays(lambda: [rival.pid for rival in rivals])
    try:
        for rival in rivals:
            os.sched_setaffinity(rival.pid, core)
        wait_until(lambda: delays.between(begin_s, time.time()) > 0.5, "a wait for the core", 10)
    finally:
        delays.stop()
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert delays.between(begin_s - 9.0, begin_s) == 0.0
    assert delays.between(begin_s, time.time()) < time.time() - begin_s + 2 * EVERY_S


def test_an_interrupted_campaign_goes_on_from_its_file(tmp_path: Path) -> None:
    path, session = tmp_path / "table.json", Session(date="today", machine="a PC", version="1")
    Record(path, {"seed": 3, "nodes": 2}, session).add([FINDING])
    later = Record(path, {"seed": 3, "nodes": 2}, replace(session, version="2"))
    assert later.findings == (FINDING,)
    later.add([replace(FINDING, number=2, late=("a",), orphans=("b",))])
    again = Record(path, {"seed": 3, "nodes": 2}, session)
    assert again.findings == later.findings
    assert [one.version for one in again.campaign.sessions] == ["1", "2", "1"]
    with pytest.raises(SystemExit, match="another campaign"):
        Record(path, {"seed": 4, "nodes": 2}, session)


def test_the_table_has_every_case_and_the_sums() -> None:
    bad = replace(FINDING, number=2, state="failed", back_s=None, breaks=("it | broke",))
    late = replace(FINDING, number=3, fault="reboot", late=("slow",))
    campaign = Campaign(
        settings={"seed": 4, "nodes": 2},
        sessions=(Session(date="2026-11-25", machine="a PC", version="1"),),
        findings=(FINDING, bad, late),
    )
    assert count_totals(campaign.findings)["healed"] == 2
    assert campaign.num_broken == 1
    assert "3 faults, seed 4: 2 healed automatically" in as_text(campaign)
    page = as_markdown(campaign)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len([row for row in rows if row.startswith(("| rank-kill | 2 ", "| reboot | 1 "))]) == 2
    assert len([row for row in rows if "it / broke" in row or "slow" in row]) == 2
    assert "version 1, in 1 runs" in page


def test_campaigns_are_joined_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (3, 12):
        session = Session(date="2026-11-25", machine="a PC", version=f"v{seed}")
        record = Record(tmp_path / f"{seed}.json", {"seed": seed, "nodes": 2}, session)
        record.add([FINDING, replace(FINDING, number=2, fault="reboot")])
    files = [str(tmp_path / "12.json"), str(tmp_path / "3.json")]
    assert main(["--table", *files]) == 0
    assert "4 faults, seed 3 and 12: 4 healed" in capsys.readouterr().out
    stored = [Campaign.from_dict(json.loads(Path(file).read_text())) for file in files]
    joined = join(stored)
    assert [one.number for one in joined.findings] == [1, 2, 3, 4]
    assert "version v12 and v3, in 2 runs" in as_markdown(joined)


def test_kills_and_starts_go_on_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "saves.json"
    drawn: list[tuple[int, float]] = []

    def once(number: int, draw: random.Random) -> str:
        drawn.append((number, draw.random()))
        return "torn" if number == 2 else ""

    Tally(path, "saves", 9).run(3, once)
    again = Tally(path, "saves", 9)
    again.run(5, once)
    assert (again.done, again.broken) == (5, ["number 2: torn"])
    whole = list(drawn)
    drawn.clear()
    Tally(None, "saves", 9).run(5, once)
    assert drawn == whole
    assert [number for number, _ in drawn] == [1, 2, 3, 4, 5]
    with pytest.raises(SystemExit, match="does not hold starts of seed 9"):
        Tally(path, "starts", 9)


@pytest.mark.parametrize("part", ["saves", "starts"])
def test_each_part_says_what_came_of_it(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--part", part, "--count", "2", "--seed", "8"]) == 0
    assert f"2 of 2 {'kills' if part == 'saves' else 'interleavings'}" in capsys.readouterr().out
    assert main(["--part", part, "--count", "2", "--minutes", "0"]) == 1


def test_a_part_is_replaced_where_its_marks_are() -> None:
    with pytest.raises(ValueError, match="no part table"):
        replace_part("nothing", "table", "text")
    for part in ("table", "saves", "starts", "hours", "torchrun"):
        assert "new text" in replace_part(PAGE.read_text(encoding="utf-8"), part, "new text")


def test_every_test_that_the_promises_name_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    promises = re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE)
    assert promises == [str(number) for number in range(1, 11)]
    assert len(named) >= len(promises)
    root = PAGE.parent
    for file, test in named:
        source = (root / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file}::{test}"


def test_every_kind_of_fault_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(FAULTS)
    for name, kind in FAULTS.items():
        assert kind.does, name
        assert importlib.import_module(kind.__module__).KINDS


@pytest.mark.campaign
@pytest.mark.netns
@pytest.mark.timeout(600)
def test_a_killed_supervisor_and_a_killed_rank_break_no_promise(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    kinds = ["--kinds", "supervisor-kill", "rank-kill"]
    assert main(["--faults", "2", "--seed", "5", *kinds, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["totals"]["healed"] == 2
    # What a supervisor left behind says less of its ranks: the next fault gets a new run.
    assert [one["run"] for one in found["findings"]] == [1, 2]


def test_parts_need_no_pytest(tmp_path: Path) -> None:
    """Those who try the campaign have installed what the app needs alone."""
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import pathlib, random\n"
        "import tests.campaign.__main__, tests.campaign.hours, tests.campaign.peer\n"
        "from tests.campaign.parts import Saves, Starts\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "Starts(folder)\n"
        "print(Saves(folder).kill(1, random.Random(1)) or 'whole')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "whole", done.stderr


@pytest.mark.parametrize(("kind", "lacks"), [("no-inodes-node", "files"), ("full-disk-node", "")])
def test_words_of_full_disks_are_those_that_the_keeper_prints(kind: str, lacks: str) -> None:
    line = {"kind": "disk", "time_s": 10.0, "lacks": lacks or "bytes"}
    entry = describe_line(line, "r1", 1, "node1", None)
    assert entry is not None
    expectation = FAULTS[kind](random.Random(1), 8.0).expectation
    victim = {"node": "node1", "rank": "0"}
    assert find_name(expectation, [(10.0, entry.event.text)], victim) is not None


@pytest.mark.parametrize("kind", ["rank-frozen", "rank-frozen-loading", "rank-stop-loading"])
def test_words_of_halted_ranks_are_those_of_their_supervisor(kind: str) -> None:
    fault = FAULTS[kind](random.Random(1), 8.0)
    state = "T" if "stop" in kind else "F"
    told = f"Rank 0 on node node1 (cpu) has stood still for 2 s.{describe_state(state)}"
    victim = {"node": "node1", "rank": "0"}
    assert find_name(fault.expectation, [(10.0, told)], victim) is not None


def test_a_line_that_comes_late_says_when_it_was_written() -> None:
    event = {"kind": "event", "text": "rank 1 stopped", "time_s": 101.0}
    assert Line(101.5, event).describe(100.0) == "1.5 s: rank 1 stopped"
    assert Line(110.4, event).describe(100.0) == "10.4 s (written at 1.0 s): rank 1 stopped"
    assert Line(4710.0, event).describe(100.0) == "4610.0 s: rank 1 stopped", "its clock was set"
    node = {"kind": "node", "node": "node2", "state": "online"}
    assert Line(102.0, node).describe(100.0) == "2.0 s: node2 online"


class Failing(Fault):
    """Fault that fails in its middle, or whose stage is never used."""

    name, does = "failing", "fails"

    def do(self, case: Case) -> None:
        case.ending.callback(self.told.append, "ended")
        raise Stuck("no rank")

    def undo(self, case: Case) -> None:
        self.told.append("undone")
        raise AttributeError("nothing was done")

    def __init__(self, told: list[str]) -> None:
        self.told = told


def test_a_fault_that_fails_leaves_nothing_for_the_next_run() -> None:
    """The second keeper of such a fault watched all later runs of its campaign."""
    told: list[str] = []
    drawn = Drawn(fault=Failing(told), node=0, at_step=1)
    site: Any = SimpleNamespace(
        nodes=[SimpleNamespace(name="node1")], wait_for_step=lambda *about: None
    )
    case = Case(site, drawn, 1)
    attack = Attack(site, 1, [])
    attack._start = lambda: "run"  # type: ignore[method-assign]
    attack._strike(case, is_first=True)
    assert told == ["undone", "ended"]
    assert case.breaks == ["Stuck: no rank"]
