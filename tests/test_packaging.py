"""An installed wheel is complete: it builds the same agent archive and holds every resource."""

from __future__ import annotations

import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

from agents.contract.environments import SUPPORTED_PYTHONS
from app.nodes.archive import build_archive
from tests.test_layers import ROOT, project_files

PACKAGES = ("app", "agents", "resources")
ARCHIVE_SHA256 = "from app.nodes.archive import build_archive; print(build_archive().sha256)"


def run_python(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def packaged_files(root: Path) -> set[str]:
    """Return the files below the packages that git tracks or would track."""
    names = (file.relative_to(root) for file in project_files(root))
    return {name.as_posix() for name in names if name.parts[0] in PACKAGES}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked wheel, built from a copy so that the tree stays clean."""
    work = tmp_path_factory.mktemp("packaging")
    source = work / "source"
    for name in [*packaged_files(ROOT), "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    offline = ["--no-deps", "--no-index", "--quiet"]
    build = ["-m", "pip", "wheel", "--no-build-isolation", *offline, "-w", str(work), str(source)]
    run_python(*build, folder=work)
    (wheel,) = work.glob("rackless-*.whl")
    target = work / "installed"
    run_python("-m", "pip", "install", *offline, "--target", str(target), str(wheel), folder=work)
    return target


def test_the_wheel_holds_every_file_of_the_packages(installed: Path) -> None:
    here = {
        file.relative_to(installed).as_posix()
        for package in PACKAGES
        for file in (installed / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert here == packaged_files(ROOT)


def test_the_wheel_builds_the_same_agent(installed: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); {ARCHIVE_SHA256}"
    assert run_python("-I", "-c", code, folder=installed).strip() == build_archive().sha256


def test_the_metadata_names_what_the_locks_support(installed: Path) -> None:
    (metadata,) = installed.glob("rackless-*.dist-info/METADATA")
    fields = Parser().parsestr(metadata.read_text(encoding="utf-8"))
    kinds = fields.get_all("Classifier") or []
    pythons = {kind.rpartition(" :: ")[2] for kind in kinds if ":: Python :: 3." in kind}
    assert pythons == {f"{major}.{minor}" for major, minor in SUPPORTED_PYTHONS}
    assert "fine-tuning" in (fields["Keywords"] or "").split(",")
    assert fields["License-Expression"] == "Apache-2.0"
