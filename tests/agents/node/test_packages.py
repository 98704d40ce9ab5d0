"""Packages are put beside an environment once, and not at all where it has them."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from agents.children import Children
from agents.contract.requests.environment import PackagesBuild
from agents.errors import ExpectedError
from agents.node import packages
from agents.state import Home
from tests.fakes.packages import lock_line, lock_of, make_sdist, make_wheel


@pytest.fixture
def home(tmp_path):
    path = tmp_path / "home"
    path.mkdir()
    return Home(path)


def job(text, **requirements):
    return PackagesBuild(
        python=sys.executable, lock_sha256="ab" * 32, lock_text=text, requirements=requirements
    )


def test_an_environment_that_has_them_needs_no_folder(home):
    version = importlib.metadata.version("packaging")
    report = packages.build(home, job("", packaging=version), Children(), print)
    assert report.path is None
    assert not home.environments.exists()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return a folder in which pip looks for packages, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_they_are_installed_once_beside_it(home, index):
    wheel = make_wheel(index)
    told = []
    wanted = job(lock_of(wheel), tiny_thing="1.5")
    report = packages.build(home, wanted, Children(), told.append)
    assert report.path is not None
    folder = home.path / report.path
    assert (folder / "tiny_thing.py").read_text() == "VALUE = 7\n"
    assert told
    wheel.unlink()
    assert packages.build(home, wanted, Children(), told.append) == report


def test_a_package_without_a_wheel_is_built_from_the_locked_source(home, index):
    source = make_sdist(index)
    wanted = job(f"--no-binary tiny_thing\n{lock_of(source)}", tiny_thing="1.5")
    report = packages.build(home, wanted, Children(), lambda line: None)
    assert (home.path / report.path / "tiny_thing-1.5.dist-info").is_dir()


def test_a_failure_says_why_and_leaves_nothing(home, index):
    wanted = job(lock_line("nothing", "1"), nothing="1")
    with pytest.raises(ExpectedError, match="installing the packages for quantizing failed"):
        packages.build(home, wanted, Children(), lambda line: None)
    assert not [path for path in home.environments.iterdir() if path.is_dir()]
