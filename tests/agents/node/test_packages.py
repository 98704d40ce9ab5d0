"""Packages are put beside an environment once, and not at all where it has them."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from agents.children import Children
from agents.contract.artifacts import PackagesBuild
from agents.errors import ExpectedError
from agents.node import packages
from agents.state import Home


def make_wheel(folder, name="tiny_thing", version="1.5"):
    import zipfile

    about = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 7\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", kind)
        wheel.writestr(f"{about}/RECORD", "")
    return path


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


def test_they_are_installed_once_beside_it(home, tmp_path):
    wheel = make_wheel(tmp_path)
    told = []
    wanted = job(f"{wheel}\n", tiny_thing="1.5")
    report = packages.build(home, wanted, Children(), told.append)
    assert report.path is not None
    folder = home.path / report.path
    assert (folder / "tiny_thing.py").read_text() == "VALUE = 7\n"
    assert told
    wheel.unlink()
    assert packages.build(home, wanted, Children(), told.append) == report


def test_a_failure_says_why_and_leaves_nothing(home, tmp_path):
    wanted = job(f"{tmp_path / 'nothing-1-py3-none-any.whl'}\n", nothing="1")
    with pytest.raises(ExpectedError, match="installing the packages for quantizing failed"):
        packages.build(home, wanted, Children(), lambda line: None)
    assert not [path for path in home.environments.iterdir() if path.is_dir()]
