"""Where files lie, settings, locks, and the examples in docstrings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.errors import UserError
from app.filelock import locked, try_locked
from app.paths import Paths, default_home, private_folder
from app.settings import SETTINGS, Settings

HOLDER = """
import sys, time
from pathlib import Path
from app.filelock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_home_is_the_variable_or_the_systems_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKLESS_HOME", "~/mine")
    assert default_home() == Path.home() / "mine"
    monkeypatch.delenv("RACKLESS_HOME")
    assert default_home().name == "rackless"
    assert default_home().is_absolute()


def test_folders_are_private_and_stay_inside_the_home(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    stream = paths.stream("run", 2, "alpha", "rank-0.log")
    assert stream == tmp_path / "runs" / "run" / "attempts" / "2" / "alpha" / "rank-0.log"
    assert private_folder(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_settings_have_defaults_that_pass_their_own_check() -> None:
    assert len({setting.key for setting in SETTINGS}) == len(SETTINGS)
    for setting in SETTINGS:
        assert setting.checked(setting.default) == setting.default
        assert setting.description


def test_settings_keep_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    settings = Settings(path)
    settings.set("theme", "dark")
    settings.set("stop_grace_s", 30)
    settings.set("stop_grace_s", 120)
    assert json.loads(path.read_text()) == {"theme": "dark"}
    assert Settings(path).get("theme") == "dark"
    assert Settings(path).number("stop_grace_s") == 120.0


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("theme", "pink", "one of system, dark, light"),
        ("stop_grace_s", 0, "a number from 1.0 to 3600.0"),
        ("stop_grace_s", True, "a number"),
        ("lost_after_s", "soon", "a number from 3.0 to 600.0"),
    ],
)
def test_value_that_is_not_allowed_is_named(
    tmp_path: Path, key: str, value: object, limit: str
) -> None:
    with pytest.raises(UserError, match=key) as refused:
        Settings(tmp_path / "settings.json").set(key, value)
    assert limit in refused.value.message


@pytest.mark.parametrize("text", ["{", "[]", '{"theme": 3}'])
def test_broken_settings_file_means_defaults_and_a_problem(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    settings = Settings(path)
    assert settings.get("theme") == "system"
    assert str(path) in settings.problem


def test_a_node_may_have_a_value_of_its_own_until_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    settings = Settings(path)
    settings.set("when_hot", "limit")
    settings.set_of_node("alpha", "when_hot", "warn")  # the default, which beta has not
    settings = Settings(path)
    assert [settings.get("when_hot", node) for node in ("alpha", "beta", "")] == [
        "warn", "limit", "limit",
    ]  # fmt: skip
    assert settings.of_nodes("when_hot") == {"alpha": "warn"}
    with pytest.raises(UserError, match="theme is the same for all nodes"):
        settings.set_of_node("alpha", "theme", "dark")
    with pytest.raises(UserError, match="when_hot is 'freeze'"):
        settings.set_of_node("alpha", "when_hot", "freeze")
    settings.set_of_node("beta", "when_hot", "wait")
    settings.set_of_node("beta", "when_hot", None)
    settings.forget_node("alpha")
    assert "nodes" not in json.loads(path.read_text())


def test_settings_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        Settings(tmp_path / "absent" / "settings.json").set("theme", "dark")


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert try_locked(lock) is None
    holder.kill()
    holder.communicate()
    began_s = time.monotonic()
    with locked(lock):
        assert time.monotonic() - began_s < 5
    handle = try_locked(lock)
    assert handle is not None
    os.close(handle)
