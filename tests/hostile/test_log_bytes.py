"""Logs of nodes: they act on no terminal, and reach a file or a program byte by byte."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.contract.run import RankPlacement
from agents.contract.spec import DataSpec, RunSpec
from app.paths import Paths
from app.storage.database import open_database
from app.storage.runs import AttemptRecord, RunRecord, RunStore

Attack = Callable[..., None]
REPOSITORY = Path(__file__).resolve().parents[2]
LOG = b"\x1b[2J\x1b]52;c;QQ==\x07\xc2\x9b31m \xe2\x80\xae 12 %\r13 %\r\nend\xff\xfe\x00\n"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a terminal of POSIX")


@pytest.fixture
def logs(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """A command that prints the log of a stored run, and its environment."""
    paths = Paths(tmp_path / "home")
    store = RunStore(open_database(paths.database))
    spec = RunSpec(model="m", data=DataSpec(train="x.jsonl"), name="poems")
    run = RunRecord(
        run_id="r-1", name="poems", state="done", spec=spec, attempt=1, nodes=("pc",), created_s=1e9
    )
    store.add(run)
    place = RankPlacement(rank=0, local_rank=0, node="pc", device="cpu")
    store.save_attempt(
        AttemptRecord(run_id="r-1", attempt=1, placements=(place,), launched_s=1.7e9)
    )
    file = paths.stream("r-1", 1, "pc", "rank-0.log")
    file.parent.mkdir(parents=True)
    file.write_bytes(LOG)
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RACKLESS_HOME": str(paths.home)}
    return [sys.executable, "-m", "app", "runs", "logs", "r-1"], environ


def test_a_log_reaches_a_file_or_a_program_byte_by_byte(
    logs: tuple[list[str], dict[str, str]], attack: Attack
) -> None:
    command, environ = logs
    said = subprocess.check_output(command, env=environ, stderr=subprocess.DEVNULL, timeout=60)
    attack(given="a log of escapes and odd bytes", tried="pipe it", happened=ascii(said))
    assert said == LOG


def test_a_log_does_not_act_on_a_terminal(
    logs: tuple[list[str], dict[str, str]], attack: Attack
) -> None:
    command, environ = logs
    import pty  # which Windows lacks

    ours, theirs = pty.openpty()
    subprocess.run(command, env=environ, stdout=theirs, stderr=subprocess.DEVNULL, timeout=60)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    attack(given="a log of escapes and odd bytes", tried="print it", happened=ascii(said))
    assert "\\x1b[2J" in said
    assert "13 %\r\nend" in said
    assert not set(said) & set("\x1b\x07\x9b\u202e\0")


def test_a_log_that_does_not_fit_on_the_disk_is_an_error_of_the_world(
    logs: tuple[list[str], dict[str, str]],
) -> None:
    command, environ = logs
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert "the output cannot be written" in done.stderr


@pytest.mark.parametrize("planted", ["a link", "a pipe", "a link in place of the run", "a loop"])
def test_a_file_that_is_not_our_mirror_is_no_log(
    logs: tuple[list[str], dict[str, str]], tmp_path: Path, attack: Attack, planted: str
) -> None:
    command, environ = logs
    letter = tmp_path / "letter.log"
    letter.write_text("dear anna")
    run = tmp_path / "home" / "runs" / "r-1"
    file = run / "attempts" / "1" / "pc" / "rank-0.log"
    file.unlink()
    if planted == "a pipe":
        os.mkfifo(file)
    elif planted == "a link in place of the run":
        file.symlink_to(letter)
        run.rename(tmp_path / "elsewhere")
        run.symlink_to(tmp_path / "elsewhere")
    else:
        file.symlink_to(letter if planted == "a link" else file)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    attack(given=planted, tried="print it as a log", happened=done.stdout or "nothing is printed")
    assert (done.returncode, done.stdout) == (0, "")
    deleted = [*command[:-2], "delete", "r-1"]
    done = subprocess.run(deleted, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not os.path.lexists(run)
    assert letter.read_text() == "dear anna"
