"""One window per home: a second process finds the first, and nobody is locked out after a crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.gui.shell.single_instance import LOCK_NAME, SOCKET_NAME, SingleInstance, server_name
from tests.gui.stage import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
SECOND = """
import sys
from pathlib import Path
from PySide6.QtCore import QCoreApplication
from app.gui.shell.single_instance import SingleInstance
application = QCoreApplication([])
instance = SingleInstance(Path(sys.argv[1]))
instance.listen()
print(instance.is_first, instance.is_first or instance.show_first(float(sys.argv[2])), flush=True)
"""
CRASH = SECOND + "import os; os.kill(os.getpid(), 9)\n"


def start(home, script=SECOND, patience_s=5.0):
    return subprocess.Popen(
        [sys.executable, "-c", script, str(home), str(patience_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer_of(application, process):
    """Serve the first instance until the second is done."""
    polls = 0
    while process.poll() is None:
        application.processEvents()
        polls += 1
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            assert polls < PATIENCE_S / 0.02
    return process.communicate()[0].split()


@pytest.fixture
def first(application, tmp_path):
    instance = SingleInstance(tmp_path / "home")
    instance.listen()
    yield instance
    instance.end()


def test_a_second_start_brings_the_first_forward(application, first, tmp_path):
    wanted = []
    first.wanted.connect(lambda: wanted.append(1))
    assert first.is_first
    assert answer_of(application, start(tmp_path / "home")) == ["False", "True"]
    assert wanted == [1]
    assert answer_of(application, start(tmp_path / "home")) == ["False", "True"]


def test_another_home_has_a_window_of_its_own(application, first, tmp_path):
    assert answer_of(application, start(tmp_path / "other")) == ["True", "True"]


def test_after_a_crash_the_next_start_is_the_first(application, tmp_path):
    home = tmp_path / "home"
    crashed = start(home, CRASH)
    assert crashed.communicate()[0].split() == ["True", "True"]
    assert crashed.returncode == -9
    assert (home / LOCK_NAME).exists()
    assert (home / SOCKET_NAME).exists()
    instance = SingleInstance(home)
    assert instance.is_first
    instance.listen()
    assert answer_of(application, start(home)) == ["False", "True"]
    instance.end()
    again = SingleInstance(home)
    assert again.is_first
    again.end()


def test_a_first_that_does_not_answer_locks_nobody_out(application, tmp_path):
    home = tmp_path / "home"
    silent = SingleInstance(home)  # it never listens
    assert answer_of(application, start(home, patience_s=0.2)) == ["False", "False"]
    silent.end()


def test_a_long_path_gets_a_short_name(tmp_path):
    deep = tmp_path / ("x" * 120)
    assert len(server_name(deep)) < 40
    assert server_name(deep) != server_name(deep / "y")
    assert server_name(Path("/home/anna/.local/share/rackless")).endswith(SOCKET_NAME)


def test_the_real_program_ends_at_once_when_it_is_open_already(application, first, tmp_path):
    environ = {**os.environ, "RACKLESS_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        [sys.executable, "-m", "app"], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    )
    assert answer_of(application, process) == []
    assert process.returncode == 0
