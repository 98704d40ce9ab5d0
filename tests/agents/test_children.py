"""Programs run for a request end with it, and their grandchildren too."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agents.children import Children
from agents.errors import ExpectedError

FORKING = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def comes_to_an_end(pid: int) -> bool:
    """A killed process takes a moment to die, longer on a busy PC."""
    deadline = time.monotonic() + 10
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_gone(pid)


def test_lines_come_as_they_are_written() -> None:
    lines: list[tuple[str, float]] = []
    code = (
        "import time; print('a', flush=True); time.sleep(0.4); print('b\\rc'); raise SystemExit(5)"
    )
    began_s = time.monotonic()
    result = Children().run(
        [sys.executable, "-c", code], on_line=lambda s: lines.append((s, time.monotonic()))
    )
    assert result == (5, ["a", "b", "c"])
    assert lines[1][1] - lines[0][1] > 0.2
    assert lines[0][1] - began_s < 5


def test_a_line_is_whole_though_a_library_logs_meanwhile() -> None:
    code = (
        "import os; os.write(2, b'loading '); os.write(1, b'{\"kind\": ');"
        "os.write(2, b'tensors\\n'); os.write(1, b'\"opened\"}\\n'); os.write(2, b'end')"
    )
    code_and_lines = Children().run([sys.executable, "-c", code])
    assert (code_and_lines[0], sorted(code_and_lines[1])) == (
        0, ["end", "loading tensors", '{"kind": "opened"}']
    )  # fmt: skip


def test_deadline_ends_the_whole_group() -> None:
    lines: list[str] = []
    code = f"{FORKING}; import time; time.sleep(60)"
    with pytest.raises(TimeoutError):
        Children().run([sys.executable, "-c", code], timeout_s=1.0, on_line=lines.append)
    assert comes_to_an_end(int(lines[0]))


def test_end_all_ends_what_runs_and_starts_nothing_more() -> None:
    children = Children()
    lines: list[str] = []
    started = threading.Event()

    def run() -> None:
        def take(line: str) -> None:
            lines.append(line)
            started.set()

        children.run([sys.executable, "-c", f"{FORKING}; p.wait()"], on_line=take)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    children.end_all()
    thread.join(5)
    assert not thread.is_alive()
    assert comes_to_an_end(int(lines[0]))
    with pytest.raises(ExpectedError, match="is shutting down"):
        children.run(["/bin/true"])


def test_a_program_whose_start_has_not_returned_counts_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children, popen, starting = Children(), subprocess.Popen, threading.Event()

    def start_slowly(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = popen(*args, **options)
        starting.set()
        time.sleep(0.3)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_slowly)
    runner = threading.Thread(target=lambda: children.run(["sleep", "60"]))
    runner.start()
    assert starting.wait(10)
    assert children.is_busy
    children.end_all()
    runner.join(10)
    assert not children.is_busy


def test_program_that_is_not_there() -> None:
    with pytest.raises(ExpectedError, match="starting /no/such/program"):
        Children().run(["/no/such/program"])


def test_endless_line_is_bounded() -> None:
    code = "import sys; sys.stdout.write('x' * 5_000_000)"
    _, lines = Children().run([sys.executable, "-c", code])
    assert len(lines) == 1
    assert len(lines[0]) <= 1 << 17


def test_a_look_at_a_silent_program_may_end_it() -> None:
    children, seen = Children(), []

    def look(pid: int) -> None:
        seen.append(pid)
        if len(seen) == 2:
            raise ExpectedError("It hangs.")

    with pytest.raises(ExpectedError, match="It hangs"):
        children.run([sys.executable, "-c", "import time; time.sleep(60)"], on_look=look)
    assert seen[0] == seen[1]
    assert comes_to_an_end(seen[0])
    assert not children.is_busy
