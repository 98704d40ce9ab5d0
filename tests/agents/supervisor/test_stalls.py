"""Which rank is called stalled, and when: on heartbeats of a clock of the test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.state import Identity, boot_id
from agents.supervisor import process_signs, stalls
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.process_signs import Usage, is_frozen, read_process_state, read_usage
from agents.supervisor.ranks import RankProcess
from agents.supervisor.stalls import StallWatch
from agents.supervisor.verdict import describe_stall, judge_stall
from tests.agents.supervisor.conftest import Node


class Ranks:
    """Two ranks whose heartbeats the test writes; their processes only sleep."""

    def __init__(self, attempt: AttemptFolder) -> None:
        self.folder = attempt.folder
        self.folder.mkdir(parents=True)
        self.processes = [
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            for _ in range(2)
        ]
        self.all = [
            RankProcess(
                rank=n,
                device="cpu",
                identity=Identity(p.pid, 0, boot_id()),
                attempt=attempt,
                started_s=1000.0,
                process=p,
            )
            for n, p in enumerate(self.processes)
        ]

    def beat(
        self, at_s: float, steps: tuple[int, int], phase: str = "training", **more: float
    ) -> None:
        for rank, step in enumerate(steps):
            beat = {"step": step, "phase": phase, "monotonic_s": at_s, **more}
            (self.folder / f"rank-{rank}.heartbeat").write_text(json.dumps(beat))


@pytest.fixture
def ranks(node: Node) -> Iterator[Ranks]:
    made = Ranks(AttemptFolder(node.home, "run-1", 1))
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def look_on(watch: StallWatch, begin_s: float, end_s: float) -> float | None:
    """Look twice a second; return when a stall was first seen."""
    now_s = begin_s
    while now_s < end_s:
        if watch.check(now_s) is not None:
            return now_s
        now_s += 0.5
    return None


def test_training_may_stand_still_for_a_minute(node: Node, ranks: Ranks) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    ranks.beat(1010.0, (5, 5))
    assert look_on(watch, 1010.0, 1300.0) == 1070.5


def test_first_step_may_take_ten_times_what_the_rank_foresees(node: Node, ranks: Ranks) -> None:
    """A CPU may need minutes for it, and no step before it tells so."""
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    ranks.beat(1010.0, (0, 0), foreseen_step_s=30.0)
    assert look_on(watch, 1010.0, 1500.0) == 1310.5
    for step in (1, 2, 3):
        ranks.beat(1310.0 + step, (step, step), foreseen_step_s=30.0)
        assert look_on(watch, 1310.5 + step, 1311.0 + step) is None
    assert look_on(watch, 1313.5, 2000.0) == 1373.5, "steps that were seen count more"


def test_slow_steps_may_take_ten_times_their_median(node: Node, ranks: Ranks) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    now_s = 1000.0
    for step in range(1, 12):
        ranks.beat(now_s, (step, step))
        assert look_on(watch, now_s, now_s + 30.0) is None
        now_s += 30.0
    assert look_on(watch, now_s, now_s + 1000.0) == now_s - 30.0 + 300.5


def test_a_step_ends_with_a_short_part_and_the_next_may_begin_with_a_long_one(
    node: Node, ranks: Ranks
) -> None:
    """A rank tells between micro-batches that it is alive, and the last one is what is left."""
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    now_s, step = 1010.0, 0
    ranks.beat(now_s, (0, 0), foreseen_step_s=180.0)
    for part_s in (90.0, 90.0, 3.0, 90.0, 90.0, 3.0, 90.0):
        assert look_on(watch, now_s, now_s + part_s) is None
        now_s += part_s
        step += part_s < 60.0
        ranks.beat(now_s, (step, step), foreseen_step_s=180.0)
    assert look_on(watch, now_s, now_s + 2000.0) == now_s + 900.5


def test_usual_silence_is_known_after_five_steps_of_one_look(node: Node, ranks: Ranks) -> None:
    """Quick steps come several to a look; a cable may be cut seconds after the first of them."""
    watch = StallWatch(ranks.all, node.intent("train", "train", elsewhere=1))
    for at_s, step in ((1010.0, 0), (1010.5, 9)):
        ranks.beat(at_s, (step, step))
        assert watch.check(at_s) is None
    assert watch.find_standstill(1011.0, is_cut=True) is None
    found = watch.find_standstill(1012.0, is_cut=True)
    assert found is not None
    assert found.maybe_remote


class Kernel:
    """What the kernel says of all ranks; each reading adds what they use per reading."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_s = self.io_bytes = self.disk_bytes = 0
        self.states = "S"
        self._sums = [0.0, 0, 0]
        monkeypatch.setattr(stalls, "read_usage", self._read)

    def _read(self, pid: int) -> Usage:
        used = (self.cpu_s, self.io_bytes, self.disk_bytes)
        self._sums = [one + more for one, more in zip(self._sums, used, strict=True)]
        cpu_s, io_bytes, disk_bytes = self._sums
        return Usage(
            cpu_s=cpu_s,
            io_bytes=int(io_bytes),
            disk_bytes=int(disk_bytes),
            states=frozenset(self.states),
        )


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.mark.parametrize("phase", ["saving", "evaluating"])
def test_loading_and_saving_may_take_ten_minutes(
    node: Node, ranks: Ranks, kernel: Kernel, phase: str
) -> None:
    kernel.io_bytes = 1 << 20  # no thread may write the heartbeat while a library is mapped
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    assert look_on(watch, 1000.0, 1599.0) is None  # no heartbeat at all yet
    ranks.beat(1600.0, (9, 9), phase)
    assert look_on(watch, 1599.5, 2500.0) == 2200.5


def test_rank_furthest_behind_is_the_culprit(node: Node, ranks: Ranks) -> None:
    intent = node.intent("train", "train")
    watch = StallWatch(ranks.all, intent)
    ranks.beat(1010.0, (8, 7))
    look_on(watch, 1010.0, 1069.0)
    stall = watch.check(1075.0)
    assert stall is not None
    assert (stall.rank.rank, stall.step, stall.phase) == (1, 7, "training")
    verdict = judge_stall(stall, intent)
    assert verdict.message == (
        "Rank 1 on node a (cpu) stood still for 65 s in phase training after step 7."
    )
    assert not verdict.peer_lost


def test_ranks_elsewhere_get_the_benefit_of_the_doubt(node: Node, ranks: Ranks) -> None:
    intent = node.intent("train", "train", elsewhere=1)
    watch = StallWatch(ranks.all, intent)
    ranks.beat(1010.0, (5, 5))
    assert look_on(watch, 1010.0, 1300.0) == 1075.0
    stall = watch.check(1076.0)
    assert stall is not None
    verdict = judge_stall(stall, intent)
    assert verdict.peer_lost
    assert verdict.message.endswith(
        "It may be waiting for a rank on another node: check that one too."
    )


def test_paused_pc_is_no_stall(node: Node, ranks: Ranks) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    ranks.beat(1010.0, (5, 5))
    assert look_on(watch, 1010.0, 1020.0) is None
    assert watch.check(2000.0) is None  # this process was held up as well
    assert look_on(watch, 2000.5, 2300.0) == 2060.5


def test_ended_rank_cannot_stall(node: Node, ranks: Ranks) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    ranks.beat(1010.0, (5, 5))
    for rank in ranks.all:
        rank.note_end(0)
    assert look_on(watch, 1010.0, 1300.0) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "x"}', '{"monotonic_s": "1e9"}'])
def test_broken_heartbeat_counts_as_none(
    node: Node, ranks: Ranks, kernel: Kernel, text: str
) -> None:
    kernel.states = "R"
    for rank in range(2):
        (ranks.folder / f"rank-{rank}.heartbeat").write_text(text)
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    assert look_on(watch, 1000.0, 1700.0) == 1600.5


def train_steadily(watch: StallWatch, ranks: Ranks, num_steps: int = 8) -> float:
    """Let both ranks take a step each second; return the time of the last one."""
    for step in range(1, num_steps + 1):
        ranks.beat(1000.0 + step, (step, step))
        assert look_on(watch, 1000.0 + step, 1001.0 + step) is None
        assert watch.find_standstill(1000.5 + step) is None
    return 1000.0 + num_steps


def test_idle_rank_of_steady_steps_is_named_and_ended_after_ten_seconds(
    node: Node, ranks: Ranks
) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    last_s = train_steadily(watch, ranks)
    assert look_on(watch, last_s + 1.0, last_s + 10.5) is None
    assert watch.find_standstill(last_s + 10.0) is None
    watch.check(last_s + 10.5)
    assert watch.find_standstill(last_s + 10.5) is not None
    assert look_on(watch, last_s + 11.0, last_s + 100.0) == last_s + 12.5


def test_rank_that_computes_gets_a_minute(
    node: Node, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may compile in the middle of the training."""
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    last_s = train_steadily(watch, ranks)
    used = iter(range(1000))
    monkeypatch.setattr(stalls, "read_usage", lambda pid: Usage(cpu_s=float(next(used))))
    assert look_on(watch, last_s + 1.0, last_s + 100.0) == last_s + 60.5
    assert watch.find_standstill(last_s + 60.5) is not None


def test_rank_that_may_wait_for_another_node_is_named_and_gets_a_minute(
    node: Node, ranks: Ranks
) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train", elsewhere=1))
    last_s = train_steadily(watch, ranks)
    assert look_on(watch, last_s + 1.0, last_s + 30.0) is None
    assert watch.find_standstill(last_s + 30.0) is not None
    assert look_on(watch, last_s + 30.0, last_s + 100.0) == last_s + 65.0


@pytest.mark.parametrize("phase", ["training", "evaluating", "saving", "cooling"])
def test_a_rank_that_waits_for_a_node_that_does_not_answer_is_named_in_any_phase(
    node: Node, ranks: Ranks, phase: str
) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train", elsewhere=1))
    last_s = train_steadily(watch, ranks)
    for now_s in range(int(last_s) + 1, int(last_s) + 10):
        # The thread of a rank that saves goes on beating; the others are silent.
        is_beating = phase in ("saving", "cooling")
        ranks.beat(float(now_s) if is_beating else last_s + 1, (8, 8), phase,
                   waits_since_s=last_s + 1)  # fmt: skip
        assert watch.check(float(now_s)) is None
    assert watch.measure_wait(last_s + 9.0) == 8.0
    assert watch.find_standstill(last_s + 9.0) is None, "others may need that long"
    stall = watch.find_standstill(last_s + 9.0, is_cut=True)
    assert stall is not None
    assert (stall.age_s, stall.maybe_remote) == (8.0, True)


def test_slow_steps_are_no_wait_for_a_node_that_does_not_answer(node: Node, ranks: Ranks) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train", elsewhere=1))
    for step in range(1, 8):
        ranks.beat(1000.0 + 30.0 * step, (step, step))
        watch.check(1000.0 + 30.0 * step)
    assert watch.find_standstill(1210.0 + 59.0, is_cut=True) is None
    assert watch.find_standstill(1210.0 + 61.0, is_cut=True) is not None


def test_stop_does_not_wait_for_what_stands_still(node: Node, ranks: Ranks) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train", elsewhere=1))
    last_s = train_steadily(watch, ranks)
    assert look_on(watch, last_s + 1.0, last_s + 20.0) is None
    assert watch.check(last_s + 20.0, is_stopping=True) is not None


def test_long_step_among_the_last_ones_gives_more_time(node: Node, ranks: Ranks) -> None:
    """Shapes are recorded, or layers compiled, when rows of another length come."""
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    last_s = train_steadily(watch, ranks)
    assert look_on(watch, last_s + 1.0, last_s + 9.0) is None
    ranks.beat(last_s + 9.0, (9, 9))
    assert look_on(watch, last_s + 9.0, last_s + 100.0) == last_s + 9.0 + 20.5


def test_cpu_time_of_a_rank_counts_what_its_children_use() -> None:
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time; e = time.process_time() + 0.5\\n"
        "while time.process_time() < e: pass\\nprint(1, flush=True); time.sleep(30)'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert read_usage(process.pid).cpu_s >= 0.2
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


PHASES = ["loading", "tokenizing", "weights", "compiling", "warmup", "saving", "evaluating"]


def load(
    watch: StallWatch, ranks: Ranks, phase: str, begin_s: int, end_s: int, **more: float
) -> None:
    """Let a thread of both ranks write heartbeats in a phase, as the clock moves on."""
    for at_s in range(begin_s, end_s):
        ranks.beat(float(at_s), (3, 3), phase, **more)
        assert watch.check(float(at_s)) is None, at_s
        assert watch.check(at_s + 0.5) is None, at_s


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_without_a_sign_of_work_is_named_in_any_phase_though_its_thread_beats(
    node: Node, ranks: Ranks, kernel: Kernel, phase: str
) -> None:
    intent = node.intent("train", "train", elsewhere=1)
    watch = StallWatch(ranks.all, intent)
    load(watch, ranks, phase, 1010, 1020)
    assert watch.find_standstill(1019.5) is None
    load(watch, ranks, phase, 1020, 1023)
    stall = watch.find_standstill(1022.5)
    assert stall is not None
    assert describe_stall(stall, intent, ("b",), has_ended=False) == (
        f"Rank 0 on node a (cpu) has stood still for 12 s in phase {phase} after step 3. "
        "It neither computes nor reads or writes."
    )
    load(watch, ranks, phase, 1023, 1070)
    ranks.beat(1070.5, (3, 3), phase)
    ended = watch.check(1070.5)
    assert ended is not None
    assert not judge_stall(ended, intent).peer_lost, "no other node is to blame"


@pytest.mark.parametrize(
    "works",
    [
        {"cpu_s": 0.2},
        {"io_bytes": 100 << 10},
        {"states": "RS"},
        {"states": "DS", "disk_bytes": 100 << 10},
    ],
    ids=["computes", "slow disk", "busy PC", "syncs"],
)
def test_slow_work_is_no_hang(
    node: Node, ranks: Ranks, kernel: Kernel, works: dict[str, object]
) -> None:
    for name, value in works.items():
        setattr(kernel, name, value)
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    load(watch, ranks, "weights", 1010, 1510)
    assert watch.find_standstill(1509.5) is None


@pytest.mark.parametrize(("states", "disk_bytes"), [("DS", 0), ("D", 1 << 30)])
def test_a_disk_that_does_not_answer_is_named_though_other_programs_use_theirs(
    node: Node, ranks: Ranks, kernel: Kernel, states: str, disk_bytes: int
) -> None:
    kernel.states, kernel.disk_bytes = states, disk_bytes
    intent = node.intent("train", "train", elsewhere=1)
    watch = StallWatch(ranks.all, intent)
    load(watch, ranks, "saving", 1010, 1023)
    stall = watch.find_standstill(1022.5)
    assert stall is not None
    assert "disk or the GPU driver does not answer" in describe_stall(stall, intent)


@pytest.mark.parametrize(
    ("phase", "more"),
    [("loading", {"waits_since_s": 1000.0}), ("evaluating", {"waits_since_s": 1000.0}),
     ("cooling", {}), ("paused", {})],
)  # fmt: skip
def test_a_rank_that_waits_for_others_is_no_hang(
    node: Node, ranks: Ranks, kernel: Kernel, phase: str, more: dict[str, float]
) -> None:
    watch = StallWatch(ranks.all, node.intent("train", "train", elsewhere=1))
    load(watch, ranks, phase, 1010, 1510, **more)
    assert watch.find_standstill(1509.5) is None
    assert (watch.measure_wait(1509.5) > 500.0) == bool(more)


def test_work_that_says_so_needs_no_resources(node: Node, ranks: Ranks, kernel: Kernel) -> None:
    """It may wait for a lock that another run holds, or for its GPU."""
    watch = StallWatch(ranks.all, node.intent("train", "train"))
    for sign in range(100):
        at_s = 1010.0 + 5 * sign
        ranks.beat(at_s, (0, 0), "loading", num_signs=sign)
        assert look_on(watch, at_s, at_s + 5.0) is None
        assert watch.find_standstill(at_s + 5.0) is None


@pytest.mark.parametrize("phase", ["starting", *PHASES, "training"])
def test_stopped_rank_is_named_within_two_seconds_in_any_phase(
    node: Node, ranks: Ranks, kernel: Kernel, phase: str
) -> None:
    kernel.cpu_s = 1  # a process of its session may still work
    intent = node.intent("train", "train", elsewhere=1)
    watch = StallWatch(ranks.all, intent)
    ranks.beat(1010.0, (0, 0), phase)
    assert watch.check(1010.0) is None
    ranks.processes[1].send_signal(signal.SIGSTOP)
    while read_process_state(ranks.processes[1].pid) != "T":
        pass
    for at_s in (1010.5, 1011.0, 1011.5):
        assert watch.check(at_s) is None
    stall = watch.find_standstill(1011.5)
    assert stall is not None
    assert (stall.rank.rank, stall.process_state, stall.maybe_remote) == (1, "T", False)
    ended_s = look_on(watch, 1012.0, 1100.0)
    assert ended_s is not None
    assert ended_s <= 1021.0


@pytest.mark.parametrize(
    ("listed", "file", "text"),
    [
        ("0::/user/rank", "user/rank/cgroup.events", "populated 1\nfrozen 1\n"),
        ("0::/rank", "unified/rank/cgroup.events", "frozen 1\n"),
        ("7:freezer:/rank", "freezer/rank/freezer.state", "FROZEN\n"),
    ],
)
def test_frozen_control_group_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, file: str, text: str
) -> None:
    monkeypatch.setattr(process_signs, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(process_signs, "CGROUPS", tmp_path / "cgroup")
    process, group = tmp_path / "proc" / "5", (tmp_path / "cgroup" / file)
    for folder in (process, group.parent):
        folder.mkdir(parents=True)
    (process / "cgroup").write_text(f"4:memory:/x\n{listed}\n")
    (process / "stat").write_text("5 (python (x)) S 1 5 5 0")
    group.write_text(text)
    assert is_frozen(5)
    assert read_process_state(5) == "F"
    group.write_text(text.replace("frozen 1", "frozen 0").replace("FROZEN", "THAWED"))
    assert read_process_state(5) == "S"


def test_frozen_rank_is_named_and_ended_like_a_stopped_one(
    node: Node, ranks: Ranks, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = ranks.processes[1].pid
    states = {frozen: "F"}
    monkeypatch.setattr(stalls, "read_process_state", lambda pid: states.get(pid, "S"))
    intent = node.intent("train", "train", elsewhere=1)
    watch = StallWatch(ranks.all, intent)
    ranks.beat(1010.0, (0, 0), "loading")
    for at_s in (1010.0, 1010.5, 1011.0):
        assert watch.check(at_s) is None
    stall = watch.find_standstill(1011.0)
    assert stall is not None
    assert describe_stall(stall, intent).endswith(
        "in phase loading after step 0. The process is frozen: its control group was paused."
    )
    assert look_on(watch, 1011.5, 1100.0) == 1020.5
