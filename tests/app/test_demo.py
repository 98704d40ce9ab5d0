"""The demo tells its whole story, tells it again after a kill, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.demo import NAMES, QUESTION, Demo
from app.errors import UserError
from app.nodes.transport.loopback import find_processes, power_cut

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    for name in NAMES:
        power_cut(node_home(tmp_path / "home", name))


def node_home(home: Path, name: str) -> Path:
    return home / "demo" / "nodes" / name


def left_over(home: Path) -> list[int]:
    return [pid for name in NAMES for pid in find_processes(node_home(home, name))]


def start_demo(home: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "app", "demo", "--headless", "--nodes", "2", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "RACKLESS_HOME": str(home)},
        # Whoever starts the tests in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    assert process.stderr is not None
    pytest.fail(f"the demo ended before it said {text!r}: {process.stderr.read()}")


def test_question_is_one_that_the_training_teaches() -> None:
    lines = (ROOT / "resources" / "demo" / "train.jsonl").read_text().splitlines()
    assert QUESTION in {json.loads(line)["messages"][0]["content"] for line in lines}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_demo_is_cleaned_up_by_the_next_which_tells_the_whole_story(home: Path) -> None:
    with start_demo(home) as killed:
        read_until(killed, "Set up")
        assert left_over(home)
        killed.kill()
        killed.communicate()

    with start_demo(home) as demo:
        output, errors = demo.communicate(timeout=240)

    assert demo.returncode == 0, errors
    assert "\x1b" not in output
    for title in Demo.TITLES:
        assert f"\n{title}: " in f"\n{output}", title
    assert "beta was lost at step" in output or "beta lost its part at step" in output
    assert "beta was lost during the run, which continued by itself, and rejoined it" in output
    assert "  Rejoined: beta trains again; cost " in output
    assert "The loss fell from" in output
    assert f"Question:         {QUESTION}" in output
    assert left_over(home) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "sign",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.skipif("os.name != 'posix'")),
    ],
)
def test_demo_that_is_broken_off_ends_everything(home: Path, sign: signal.Signals) -> None:
    with start_demo(home) as demo:
        read_until(demo, "Check")
        demo.send_signal(sign)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130, errors
    assert "cancelled" in errors
    assert "Traceback" not in errors
    assert left_over(home) == []


def test_two_demos_in_one_folder_are_refused(tmp_path: Path) -> None:
    first, second = Demo(tmp_path / "demo"), Demo(tmp_path / "demo")
    first.prepare()
    with pytest.raises(UserError, match="running already"):
        second.prepare()
    first.close()
    second.prepare()
    second.close()


def test_prepare_empties_only_what_is_the_demos_own(tmp_path: Path) -> None:
    demo = Demo(tmp_path / "demo")
    (tmp_path / "demo" / "master").mkdir(parents=True)
    (tmp_path / "demo" / "mine.txt").write_text("precious")
    began_s = time.monotonic()
    demo.prepare()
    demo.close()
    assert time.monotonic() - began_s < 10
    assert not (tmp_path / "demo" / "master").exists()
    assert (tmp_path / "demo" / "mine.txt").read_text() == "precious"
