"""Training environments: looked at, adopted, built for real from a lock, and why they fail."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agents.children import Children
from agents.contract.environments import EnvironmentTrial, WheelQuery, WheelReport, this_target
from agents.contract.requests.environment import EnvironmentBuild, EnvironmentQuery
from agents.errors import ExpectedError
from agents.node import environment
from agents.node.environment import build, compare, find, is_version, keep_trial, read_adopted
from agents.node.kept_environments import list_kept
from agents.node.wheels import fetch_wheels
from agents.state import Home
from tests.fakes.package_site import put_pip
from tests.fakes.packages import lock_of, make_wheel

LOCK_SHA256 = "ab" * 32
QUERY = EnvironmentQuery(
    lock_sha256=LOCK_SHA256, requirements={"pytest": "0.0.1", "no-such-package": "1.0"}
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end_all()


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_no_environment_yet_misses_everything(home: Home, children: Children) -> None:
    report = find(home, QUERY, children)
    assert report.python is None
    assert not report.fits
    assert report.missing == ("no-such-package", "pytest")


def test_interpreter_is_compared_by_running_it(home: Home, children: Children) -> None:
    report = find(home, replace(QUERY, python=sys.executable, adopt=True), children)
    assert report.python == sys.executable
    assert report.python_version == ".".join(map(str, sys.version_info[:3]))
    assert report.missing == ("no-such-package",)
    assert report.different == (f"pytest {pytest.__version__} instead of 0.0.1",)
    assert not report.fits
    assert report.lock_sha256 is None
    assert read_adopted(home) is None
    include = Path(sysconfig.get_path("include"))
    assert report.headers is (include / "Python.h").exists()


def test_fitting_interpreter_is_adopted_only_when_asked(home: Home, children: Children) -> None:
    fits = replace(QUERY, requirements={"pytest": pytest.__version__}, python=sys.executable)
    assert find(home, fits, children).fits
    assert read_adopted(home) is None
    report = find(home, replace(fits, adopt=True), children)
    assert report.lock_sha256 == LOCK_SHA256
    assert read_adopted(home) == report
    assert find(home, replace(fits, python=None), children) == report


@pytest.mark.parametrize(
    ("found", "wanted", "equal"),
    [
        ("2.13.0", "2.13.0", True),
        ("2.13.0+cu130", "2.13.0", True),
        ("2.13.0", "2.13.0+cu130", False),
        ("2.13.0+cpu", "2.13.0+cu130", False),
        ("2.13.1", "2.13.0", False),
        ("2.13.0.post1", "2.13.0", False),
    ],
)
def test_versions(found: str, wanted: str, equal: bool) -> None:
    assert is_version(found, wanted) is equal


def test_old_python_does_not_fit() -> None:
    report = compare("/usr/bin/python3.8", "3.8.10", {}, replace(QUERY, requirements={}))
    assert report.different == ("python 3.8.10 instead of 3.10 or newer",)
    assert not report.fits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "There is no interpreter at "),
        ("#!/bin/sh\necho hello\n", "does not work as a Python interpreter; it said: hello"),
        ("#!/bin/sh\nexit 3\n", "it said: nothing"),
        ("#!/no/such/shell\n", "The system refused: starting "),
    ],
)
def test_what_is_no_interpreter_is_said_so(
    home: Home, children: Children, tmp_path: Path, text: str | None, message: str
) -> None:
    path = str(tmp_path / "python") if text is None else script(tmp_path / "python", text)
    with pytest.raises(ExpectedError, match=message):
        find(home, replace(QUERY, python=path), children)


def test_interpreter_that_hangs_is_ended(
    home: Home, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "LOOK_TIMEOUT_S", 0.3)
    path = script(tmp_path / "python", "#!/bin/sh\nsleep 60\n")
    with pytest.raises(ExpectedError, match=r"did not answer within 0\.3 s"):
        find(home, replace(QUERY, python=path), children)


# ---------------------------------------------------------------- building


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which wheels are looked for, and nowhere else; pip is there."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    put_pip(folder)
    return folder


@pytest.fixture
def no_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_uv", lambda home, children: (None, ""))


def folder_of(home: Home, lock_text: str) -> Path:
    return home.environments / hashlib.sha256(lock_text.encode()).hexdigest()[:16]


TARGET = this_target(".".join(map(str, sys.version_info[:3])))


def job(lock_text: str, **requirements: str) -> EnvironmentBuild:
    return EnvironmentBuild(
        lock_sha256=LOCK_SHA256,
        lock_text=lock_text,
        requirements=requirements,
        target=TARGET,
        python=sys.executable,
    )


def fetch(home: Home, lock_text: str, children: Children) -> WheelReport:
    query = WheelQuery(lock_text=lock_text, target=TARGET)
    return fetch_wheels(home, query, children, lambda line: None)


@pytest.mark.slow
@pytest.mark.usefixtures("no_uv")
def test_pip_builds_where_there_is_no_uv_and_nothing_is_built_twice(
    home: Home, children: Children, index: Path
) -> None:
    lines: list[str] = []
    text = lock_of(make_wheel(index, "rackless_probe", "1.2.3"), *index.glob("pip-*"))
    assert fetch(home, text, children).is_complete
    order = job(text, **{"rackless-probe": "1.2.3"})
    report = build(home, order, children, lines.append)
    assert report.fits
    assert report.python == str(folder_of(home, text) / "bin" / "python")
    assert report.built_with == "pip"
    assert os.access(report.python, os.X_OK)
    assert read_adopted(home) == report
    assert any("Successfully installed rackless" in line for line in lines)
    again: list[str] = []
    assert build(home, order, children, again.append) == report
    assert again == []
    # Packages of exports come by it.
    assert children.run([str(report.python), "-m", "pip", "--version"])[0] == 0
    wrong = replace(order, requirements={"rackless-probe": "9.9.9"})
    with pytest.raises(ExpectedError, match=r"rackless-probe 1\.2\.3 instead of 9\.9\.9"):
        build(home, wrong, children, again.append)
    # The Python that it was built on is gone.
    Path(report.python).unlink()
    Path(report.python).symlink_to("/no/such/python")
    assert build(home, order, children, again.append) == report
    (kept,) = (one for one in list_kept(home) if one.kind == "environment")
    assert kept.needed_by == "training"


def test_an_environment_is_not_begun_before_its_packages_are_here(
    home: Home, children: Children, index: Path
) -> None:
    text = lock_of(make_wheel(index), make_wheel(index, "aaa"))
    (index / "aaa-1.5-py3-none-any.whl").unlink()
    report = fetch(home, text, children)
    assert (report.trouble, report.num_present, report.num_packages) == ("missing", 0, 2)
    with pytest.raises(ExpectedError, match="2 of the 2 packages"):
        build(home, job(text), children, lambda line: None)
    assert not folder_of(home, text).exists()


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        ("ERROR: [Errno 28] No space left on device", "the disk is full", "Free about 10 GB"),
        ("ERROR: something else", "something else", ""),
    ],
)
@pytest.mark.usefixtures("no_uv")
def test_failures_of_pip_and_venv_are_explained(
    home: Home, children: Children, tmp_path: Path, index: Path, said: str, message: str, hint: str
) -> None:
    text = lock_of(*index.glob("pip-*"))
    fetch(home, text, children)
    fake = script(tmp_path / "python", f"#!/bin/sh\necho '{said}'\nexit 1\n")
    lines: list[str] = []
    with pytest.raises(ExpectedError) as caught:
        build(home, replace(job(text), python=fake), children, lines.append)
    assert "making the virtual environment failed" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert lines == ["making a virtual environment; there is no uv, so pip builds it"]
    assert not folder_of(home, text).exists()


def test_hash_of_a_lock_cannot_be_a_path(home: Home, children: Children) -> None:
    with pytest.raises(ExpectedError, match="The lock's hash"):
        build(home, replace(job(""), lock_sha256="../../x"), children, lambda line: None)


def test_a_trial_is_kept_until_another_interpreter_is_adopted(
    home: Home, children: Children
) -> None:
    fits = replace(QUERY, requirements={"pytest": pytest.__version__}, python=sys.executable)
    find(home, replace(fits, adopt=True), children)
    trial = EnvironmentTrial(import_s=1.0, torch="2.13.0", devices=())
    assert keep_trial(home, trial).trial == trial
    assert find(home, replace(fits, python=None), children).trial == trial
    assert find(home, replace(fits, lock_sha256="cd" * 32), children).trial is None
