"""Kills by the kernel for lack of memory are told from others, by what it counts and logs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.supervisor import rank_group as memory_kills
from agents.supervisor.rank_group import MemoryKills


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group of version 2 whose counters the test writes."""
    monkeypatch.setattr(memory_kills, "_find_counters", lambda: [tmp_path / "memory.events"])
    (tmp_path / "memory.events").write_text("low 0\noom 0\noom_kill 3\noom_group_kill 0\n")
    return tmp_path / "memory.events"


def test_kill_that_the_control_group_counts_is_of_the_kernel(counters: Path) -> None:
    kills = MemoryKills()
    assert kills.explain(1).startswith("not by the kernel")
    counters.write_text("oom 1\noom_kill 4\n")
    assert kills.explain(1) == (
        "the kernel killed it because the memory of its control group ran out"
    )


@pytest.mark.parametrize("text", ["", "oom_kill", "oom_kill many", "oom_killer 3"])
def test_counters_that_cannot_be_read_prove_nothing(counters: Path, text: str) -> None:
    counters.write_text(text)
    kills = MemoryKills()
    counters.write_text("oom_kill 9")
    assert "control group" not in kills.explain(1)


def test_log_of_the_kernel_names_the_process(
    counters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = MemoryKills()
    line = "Memory cgroup out of memory: Killed process 77 (python3) total-vm:1kB, anon-rss:1kB"
    monkeypatch.setattr(kills, "_read_log", lambda: ["usb 1-1: new device", line])
    assert kills.explain(77) == f"the kernel killed it because memory ran out: {line}"
    assert "memory ran out" not in kills.explain(7)


def test_log_of_the_kernel_names_all_processes_of_one_moment(
    counters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = MemoryKills()
    lines = [f"Out of memory: Killed process {pid} (python3)" for pid in (77, 78)]
    unread = [lines, []]
    monkeypatch.setattr(kills, "_read_log", lambda: unread.pop(0))
    for pid, line in zip((77, 78), lines, strict=True):
        assert kills.explain(pid) == f"the kernel killed it because memory ran out: {line}"


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of version 1 or 2 that may use 64 MiB."""
    for parent, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        group = Path("/sys/fs/cgroup") / parent / f"rackless-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(64 << 20))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_real_kill_for_lack_of_memory_is_recognised(small_group: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from agents.supervisor.rank_group import MemoryKills\n"
        "kills = MemoryKills(); child = os.fork()\n"
        "if not child: Path('/proc/self/oom_score_adj').write_text('1000'); b'x' * (256 << 20)\n"
        "print(os.waitpid(child, 0)[1], kills.explain(child))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(small_group)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    status, _, cause = done.stdout.partition(" ")
    assert int(status) == signal.SIGKILL
    assert cause.startswith("the kernel killed it because ")
