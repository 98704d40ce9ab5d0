"""`rackless watch --install`, `--status` and `--uninstall`, with a stand-in for each system."""

from __future__ import annotations

import configparser
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.main import run
from app.core.watch_service.logon_task import LogonTask, home_in_task, task_xml
from app.core.watch_service.service import WatchCommand
from app.core.watch_service.system import this_command
from app.core.watch_service.systemd_unit import SystemdUnit, unit_text
from app.errors import UserError

ROOT = Path(__file__).resolve().parents[4]
SYSTEMCTL = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
case "$*" in
    *{failing}*) echo "Failed to connect to bus: No medium found" >&2; exit 1 ;;
    *is-active*) echo active ;;
    *Linger*) echo Linger=no ;;
esac
"""
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systemd is of Linux")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with one node, whose name systemd would expand."""
    path = tmp_path / "my 50% home"
    monkeypatch.setenv("RACKLESS_HOME", str(path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    make_systemctl(tmp_path, monkeypatch)
    return path


def make_systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str = "nothing") -> None:
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("systemctl", "loginctl"):
        text = SYSTEMCTL.format(log=folder / "ran", failing=failing)
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")


def add_node() -> None:
    assert run(["nodes", "add", "alpha", "--local"]) == 0


def unit_file(folder: Path) -> Path:
    return folder / "config" / "systemd" / "user" / "rackless-watch.service"


def test_the_unit_is_written_started_shown_and_removed_without_a_trace(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node()
    assert run(["watch", "--install"]) == 0
    text = unit_file(tmp_path).read_text()
    out = capsys.readouterr().out
    for line in text.splitlines():
        assert line in out, "what was written is shown as it is"
    assert "loginctl enable-linger" in out
    assert run(["watch", "--status"]) == 0
    assert "the service is running" in capsys.readouterr().out
    assert run(["watch", "--install", "--json"]) == 0, "again, such as after an update"
    assert json.loads(capsys.readouterr().out)["home"] == str(home)
    assert run(["watch", "--uninstall"]) == 0
    assert not unit_file(tmp_path).exists()
    assert run(["watch", "--status"]) == 1
    ran = (tmp_path / "ran").read_text().splitlines()
    changes = [words for words in ran if "--user" in words and "show-env" not in words]
    assert [words for words in changes if "is-active" not in words] == [
        "systemctl --user daemon-reload",
        "systemctl --user enable rackless-watch.service",
        "systemctl --user restart rackless-watch.service",
        "systemctl --user daemon-reload",
        "systemctl --user enable rackless-watch.service",
        "systemctl --user restart rackless-watch.service",
        "systemctl --user disable --now rackless-watch.service",
        "systemctl --user daemon-reload",
    ]


def test_the_command_of_the_unit_runs_this_program_with_the_home_from_anywhere(
    home: Path, tmp_path: Path
) -> None:
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(unit_text(this_command(home)))
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    (variable,) = shlex.split(service["Environment"].replace("%%", "%"))
    assert variable == f"RACKLESS_HOME={home}"
    command = shlex.split(service["ExecStart"])
    assert command[0] == sys.executable, "the link of a virtual environment, not its target"
    # From the folder in the unit, with nothing of this test's environment.
    done = subprocess.run(
        [*command, "--status", "--json"],
        cwd=service["WorkingDirectory"],
        env={"PATH": f"{tmp_path / 'tools'}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["state"] == "not installed", done.stderr


@pytest.mark.parametrize("failing", ["show-environment", "restart"])
def test_where_systemd_serves_no_users_nothing_is_left_and_one_message_says_so(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
) -> None:
    add_node()
    make_systemctl(tmp_path, monkeypatch, failing=failing)
    assert run(["watch", "--install"]) == 1
    err = capsys.readouterr().err
    assert "No medium found" in err
    assert "rackless watch" in err, "what to do instead"
    assert not unit_file(tmp_path).exists()


def test_a_home_without_nodes_and_a_second_home_are_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["watch", "--install"]) == 1
    assert "no nodes yet" in capsys.readouterr().err
    add_node()
    assert run(["watch", "--install"]) == 0
    before = unit_file(tmp_path).read_text()
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "other"))
    add_node()
    assert run(["watch", "--install"]) == 1
    assert f"already watches the home {home}" in capsys.readouterr().err
    assert unit_file(tmp_path).read_text() == before


class FakeScheduler:
    """Task scheduler of Windows that keeps one task."""

    def __init__(self, refuses: str = "") -> None:
        self.xml = ""
        self._refuses = refuses

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        verb = words[1]
        if verb == self._refuses or (verb in ("/Query", "/Run") and not self.xml):
            return subprocess.CompletedProcess(words, 1, "", "ERROR: Access is denied.\n")
        if verb == "/Create":
            self.xml = Path(words[words.index("/XML") + 1]).read_text(encoding="utf-16")
        if verb == "/Delete":
            self.xml = ""
        return subprocess.CompletedProcess(words, 0, self.xml if "/XML" in words else "267009", "")


def test_a_logon_task_of_windows_is_created_found_again_and_removed(tmp_path: Path) -> None:
    command = WatchCommand(
        python=tmp_path / "python.exe", folder=tmp_path, home=Path("C:/Anna's <data> & 50%")
    )
    scheduler = FakeScheduler()
    task = LogonTask(scheduler, user="PC\\anna")
    assert task.status().state == "not installed"
    report = task.install(command)
    assert (report.state, report.text) == ("running", scheduler.xml)
    assert task.status().home == str(command.home)
    assert task.uninstall().commands[-1].startswith("schtasks /Delete")
    assert task.status().state == "not installed"
    with pytest.raises(UserError, match="Access is denied"):
        LogonTask(FakeScheduler(refuses="/Create"), user="anna").install(command)


def test_the_program_of_the_task_sets_the_home_and_runs_the_watch(tmp_path: Path) -> None:
    import xml.etree.ElementTree as ElementTree

    command = WatchCommand(python=Path(sys.executable), folder=ROOT, home=tmp_path / "50% 'home'")
    xml = task_xml(command, "anna").replace("UTF-16", "UTF-8")
    namespace = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    found = ElementTree.fromstring(xml).findtext(".//t:Arguments", namespaces=namespace)
    assert home_in_task(xml) == str(command.home)
    assert found is not None
    command.home.mkdir(mode=0o700)
    # Without nodes it ends at once, after it has opened the home.
    done = subprocess.run(
        [command.python, *shlex.split(found)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "no nodes yet" in done.stderr
    assert (command.home / "rackless.sqlite3").exists()


def test_a_path_that_would_write_another_line_into_the_unit_is_refused() -> None:
    with pytest.raises(UserError, match="control character"):
        unit_text(WatchCommand(python=Path("/p"), folder=Path("/f"), home=Path("/a\nExecStart=x")))


def test_a_unit_keeps_a_home_with_any_characters(tmp_path: Path) -> None:
    home = Path('/data/a "b" \\ 100% $HOME')
    folder = tmp_path / "units"
    folder.mkdir()

    def answer(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0, "inactive\n", "")

    unit = SystemdUnit(answer, folder, user="anna")
    unit.install(WatchCommand(python=Path("/p"), folder=Path("/f"), home=home))
    assert unit.status().home == str(home)
