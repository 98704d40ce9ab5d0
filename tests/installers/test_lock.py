"""The locks: complete, in step with pyproject.toml and with each other; and how they are made."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agents.shared.packages.lock import Lock, read_lock_text

ROOT = Path(__file__).resolve().parents[2]
PATHS = {
    path.stem: path
    for folder in ("installers", "resources/environments")
    for path in sorted((ROOT / folder).glob("*.lock"))
}
LOCKS: dict[str, Lock] = {name: read_lock_text(path.read_text()) for name, path in PATHS.items()}
NOT_SHIPPED = {"torch-cu126"}
"""Their index cannot be reached from everywhere: a master makes them at first need."""
TORCH = "torch-cpu" if importlib.metadata.version("torch").endswith("+cpu") else "torch-cu130"
HERE = ("app", "train", TORCH, "test")
"""Locks that this environment was installed from."""


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    """Return installers/lock.py as a module."""
    spec = importlib.util.spec_from_file_location("lock_maker", ROOT / "installers" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def versions(*names: str) -> dict[str, str]:
    return {canonicalize_name(p.name): p.version for name in names for p in LOCKS[name].packages}


def versions_here(*names: str) -> dict[str, str]:
    """Return the versions of what the locks name for this system and this Python."""
    packages = [p for name in names for p in LOCKS[name].packages]
    mine = [p for p in packages if not p.marker or Marker(p.marker).evaluate()]
    return {canonicalize_name(p.name): p.version for p in mine}


def test_every_lock_that_is_described_is_there(maker: ModuleType) -> None:
    assert set(maker.LOCKS) - NOT_SHIPPED == set(PATHS)
    assert {lock.path for lock in maker.LOCKS.values()} >= set(PATHS.values())


@pytest.mark.parametrize("name", PATHS)
def test_a_lock_names_no_address_and_a_hash_for_every_package(name: str) -> None:
    text = PATHS[name].read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links|\s@\s", text)
    assert all(package.hashes for package in LOCKS[name].packages)
    assert len(LOCKS[name].packages) == len(re.findall(r"^\S+==", text, re.MULTILINE))


@pytest.mark.parametrize("name", PATHS)
def test_a_lock_holds_all_direct_needs_in_versions_that_they_allow(
    name: str, maker: ModuleType
) -> None:
    lock = maker.LOCKS[name]
    brought = versions(name, *lock.beside, *(["torch-cpu"] if name == "train" else []))
    for need in map(Requirement, maker.direct_needs(lock)):
        version = brought[canonicalize_name(need.name)]
        assert need.specifier.contains(version, prereleases=True), f"{need} is {version}"


def test_all_locks_agree_on_a_version() -> None:
    found: dict[str, set[str]] = {}
    for name in PATHS:
        for package, version in versions(name).items():
            found.setdefault(package, set()).add(version.partition("+")[0])
    assert {package: all_ for package, all_ in found.items() if len(all_) > 1} == {}


def test_the_hashes_of_a_package_are_the_same_in_all_locks_of_a_system(maker: ModuleType) -> None:
    for name in ("gguf", "gptqmodel", "autoawq", "test"):
        for package in LOCKS[name].packages:
            others = (p for n in ("gptqmodel", "test", "gguf") for p in LOCKS[n].packages)
            same = {p.hashes for p in others if p.name == package.name} | {package.hashes}
            assert len(same) == 1, package.name


def test_what_is_installed_together_is_complete() -> None:
    """The set-up installs without dependencies: what a package asks for has to be in a lock."""
    brought = versions_here(*HERE)
    for name in sorted(brought):
        for text in importlib.metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            version = brought.get(canonicalize_name(need.name))
            assert version is not None, f"{name} needs {need}"
            assert need.specifier.contains(version, prereleases=True), f"{name} needs {need}"


def test_what_runs_here_is_what_the_locks_name() -> None:
    brought = versions_here(*HERE)
    here = {name: importlib.metadata.version(name).partition("+")[0] for name in brought}
    assert here == {name: version.partition("+")[0] for name, version in brought.items()}


def test_export_packages_never_hide_what_trains() -> None:
    train = set(versions("train", "torch-cpu", "torch-cu130"))
    for name in ("gguf", "gptqmodel", "autoawq"):
        assert not train & set(versions(name))


def test_only_packages_without_any_wheel_are_built_from_source() -> None:
    assert {name: lock.sources for name, lock in LOCKS.items() if lock.sources} == {
        "gptqmodel": ("defuser", "device-smi", "gptqmodel", "logbar", "pypcre", "tokenicer"),
        "autoawq": (
            "autoawq",
            "defuser",
            "device-smi",
            "gptqmodel",
            "logbar",
            "pypcre",
            "tokenicer",
        ),
    }


# ---------------------------------------------------------------- making them


FAKE_UV = """#!{python}
import sys
if "--index" in sys.argv:
    sys.exit("error: Failed to fetch: dns error")
out = sys.argv[sys.argv.index("--output-file") + 1]
pins = open(sys.argv[sys.argv.index("--constraints") + 1]).read()
assert "safetensors==" in pins or "--exclude-newer" in sys.argv
wheel = "https://index.example/safetensors-9-py3-none-any.whl"
package = 'name = "safetensors"\\nversion = "9"\\n'
package += 'wheels = [{{url = "%s", hashes = {{sha256 = "%s"}}}}]\\n' % (wheel, 64 * "a")
open(out, "w").write("[[packages]]\\n" + package)
"""


def test_a_lock_is_written_checked_or_left_as_it_is(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from dataclasses import replace

    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(FAKE_UV.format(python=sys.executable))
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    old = "safetensors==8\n"
    locks = {
        name: replace(maker.LOCKS[name], path=tmp_path / f"{name}.lock", beside=())
        for name in ("train", "torch-cpu")
    }
    for lock in locks.values():
        lock.path.write_text(old)
    monkeypatch.setattr(maker, "LOCKS", locks)
    assert maker.renew(["train"], upgrade=False, check=True) == 1
    assert locks["train"].path.read_text() == old
    assert maker.renew(["train"], upgrade=True, check=False) == 0
    made = read_lock_text(locks["train"].path.read_text())
    assert [p.version for p in made.packages] == ["9"]
    assert maker.renew(["train"], upgrade=False, check=True) == 0
    assert maker.renew(["torch-cpu"], upgrade=False, check=False) == 1
    assert locks["torch-cpu"].path.read_text() == old
    assert "torch-cpu: left as it is, its index cannot be reached" in capsys.readouterr().err
