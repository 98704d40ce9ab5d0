"""Write the lock files: every package in one version, with the hash of every file that may be it.

    python installers/lock.py              the versions of today, hashes read again
    python installers/lock.py --upgrade    newest versions that are at least a week old
    python installers/lock.py --check      write nothing; fail where a lock would change

Names after the option (`train torch-cpu`) restrict it to those locks. It needs uv
(`python -I -m pip install uv`), and asks the index that UV_DEFAULT_INDEX names, else
PyPI; PyTorch's own index has the builds that are not on PyPI. Direct needs stand in
pyproject.toml. A lock whose index cannot be reached stays as it is, and is named at the end.

uv resolves for all systems at once. `app/provisioning/lock_text.py` cuts that down to what Rackless
supports; so it runs where Rackless is installed, as `installers/setup.sh` does it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib
from packaging.utils import canonicalize_name

from app.provisioning import resolver
from app.provisioning.lock_text import COOLING_OFF, NoWheel, lock_text
from app.provisioning.resolver import Unreachable, Unresolvable
from app.provisioning.torch_build import PYTORCH_INDEX

ROOT = Path(__file__).resolve().parent.parent
NODES = ROOT / "resources" / "environments"
OF_TORCH = re.compile(r"torch|triton|(cuda|nvidia)-.*")
"""Packages that depend on the build of torch, and so stand in its lock."""
MADE_BY = "Made by `python installers/lock.py` (see CONTRIBUTING.md); not edited by hand."


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    path: Path
    about: str
    """Sentence about the lock, for its head."""
    needs: str
    """Direct needs: `project`, an extra, a dependency group, or `torch`."""
    beside: tuple[str, ...] = ()
    """Locks whose packages are there already, so that this one leaves them out."""
    agrees_with: tuple[str, ...] = ()
    """Locks whose versions this one keeps."""
    windows: bool = False
    complete: bool = False
    """Whether `needs` lists the dependencies, too; else they are resolved."""
    build: str = ""
    """Local part of torch's version, which names its index as well; empty: the build on PyPI."""


LOCKS = {
    lock.path.stem: lock
    for lock in (
        Lock(
            path=NODES / "train.lock",
            about="Training, on every node and on this PC; beside it goes one torch-*.lock.",
            needs="train",
        ),
        Lock(
            path=NODES / "torch-cu130.lock",
            about="PyTorch with CUDA 13.0, for NVIDIA drivers from 580 on: the build on PyPI.",
            needs="torch",
            beside=("train",),
        ),
        Lock(
            path=NODES / "torch-cu126.lock",
            about="PyTorch with CUDA 12.6, for older NVIDIA drivers and cards.",
            needs="torch",
            beside=("train",),
            build="cu126",
        ),
        Lock(
            path=NODES / "torch-cpu.lock",
            about="PyTorch without CUDA, for PCs without an NVIDIA GPU.",
            needs="torch",
            beside=("train",),
            build="cpu",
        ),
        Lock(
            path=NODES / "uv.lock",
            about="What builds environments of nodes, and locks a build of torch at first need.",
            needs="uv",
            windows=True,
        ),
        Lock(
            path=NODES / "pip.lock",
            about="What installs packages of exports, and all packages where uv does not run.",
            needs="pip",
            beside=("train",),
        ),
        Lock(
            path=ROOT / "installers" / "app.lock",
            about="The window and the command line.",
            needs="project",
            agrees_with=("train",),
            windows=True,
        ),
        Lock(
            path=ROOT / "installers" / "bundle.lock",
            about="What builds the desktop bundle, beside the window's own packages.",
            needs="bundle",
            beside=("app",),
            windows=True,
        ),
        Lock(
            path=ROOT / "installers" / "test.lock",
            about="What the tests need beside the other locks.",
            needs="test",
            beside=("train", "torch-cu130", "app"),
        ),
        Lock(
            path=NODES / "gguf.lock",
            about="Making and proving GGUF files, beside training.",
            needs="gguf",
            beside=("train",),
            agrees_with=("test",),
            complete=True,
        ),
        Lock(
            path=NODES / "gptqmodel.lock",
            about="Making, loading and proving AWQ and GPTQ models, beside training.",
            needs="gptqmodel",
            beside=("train",),
            agrees_with=("test",),
            complete=True,
        ),
        Lock(
            path=NODES / "autoawq.lock",
            about="Making AWQ with AutoAWQ, and loading and proving it, beside training.",
            needs="autoawq",
            beside=("train",),
            agrees_with=("test", "gptqmodel"),
            complete=True,
        ),
    )
}


# ---------------------------------------------------------------- direct needs and pins


def direct_needs(lock: Lock) -> list[str]:
    """Return the requirements that pyproject.toml states for a lock."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    if lock.needs == "project":
        return list(project["dependencies"])
    if lock.needs == "torch":
        (torch,) = (need for need in extras["train"] if need.startswith("torch=="))
        return [f"{torch}+{lock.build}" if lock.build else torch]
    if lock.needs in extras:
        return extras[lock.needs]
    return group_needs(pyproject["dependency-groups"], lock.needs)


def group_needs(groups: dict[str, list[Any]], name: str) -> list[str]:
    """Return the requirements of a dependency group and of those that it includes.

    >>> group_needs({"a": ["x"], "b": [{"include-group": "a"}, "y"]}, "b")
    ['x', 'y']
    """
    needs: list[str] = []
    for need in groups[name]:
        if isinstance(need, dict):
            needs += group_needs(groups, need["include-group"])
        else:
            needs.append(need)
    return needs


def pinned(path: Path) -> dict[str, str]:
    """Return the version of each package in a lock; none where there is no such file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def pins_for(lock: Lock, upgrade: bool) -> dict[str, str]:
    """Return the versions that a lock keeps: those of its neighbours, and its own of today."""
    pins = {} if upgrade else pinned(lock.path)
    for name in (*lock.beside, *lock.agrees_with):
        pins |= pinned(LOCKS[name].path)
    if lock.needs == "torch":
        pins.pop("torch", None)  # its own need says which build
    return pins


# ---------------------------------------------------------------- resolving


def packages_of(lock: Lock, upgrade: bool) -> list[dict[str, Any]]:
    """Return the packages that uv finds for a lock, in PEP 751's form.

    Raises:
        Unreachable: the index does not answer.
    """
    options = ["--no-deps"] if lock.complete else ["--only-binary", ":all:"]
    options += ["--exclude-newer", f"{COOLING_OFF.days} days"] if upgrade else []
    options += ["--index", PYTORCH_INDEX + lock.build] if lock.build else []
    pins = pins_for(lock, upgrade)
    try:
        return resolver.resolve("uv", direct_needs(lock), pins, options, environ=os.environ)
    except Unresolvable as error:
        raise SystemExit(f"uv cannot resolve {lock.path.name}: {error}") from error


# ---------------------------------------------------------------- writing


def names_elsewhere(lock: Lock) -> Callable[[str], bool]:
    """Return a test for names of packages that another lock brings."""
    known = set().union(*(pinned(LOCKS[name].path) for name in lock.beside))
    if lock.needs != "train":
        return lambda name: name in known
    own = {canonicalize_name(re.split(r"[^\w.-]", need)[0]) for need in direct_needs(lock)}
    return lambda name: bool(OF_TORCH.fullmatch(name)) and (name == "torch" or name not in own)


def text_of(lock: Lock, packages: Iterable[dict[str, Any]]) -> str:
    """Return the text of a lock file."""
    about = (lock.about, "", MADE_BY)
    try:
        return lock_text(about, packages, windows=lock.windows, elsewhere=names_elsewhere(lock))
    except NoWheel as error:
        raise SystemExit(f"{lock.path.name}: {error}") from error


def renew(names: Sequence[str], *, upgrade: bool, check: bool) -> int:
    """Write or check locks; return 1 if one differs or could not be made."""
    failed = False
    for name in names:
        lock = LOCKS[name]
        try:
            text = text_of(lock, packages_of(lock, upgrade))
        except Unreachable as error:
            print(f"{name}: left as it is, its index cannot be reached ({error})", file=sys.stderr)
            failed = True
            continue
        same = lock.path.exists() and lock.path.read_text(encoding="utf-8") == text
        failed |= check and not same
        print(f"{name}: {'as it was' if same else 'differs' if check else 'written'}")
        if not check:
            lock.path.write_text(text, encoding="utf-8")
    return int(failed)


def main() -> int:
    """Read the command line and renew the locks that it names."""
    parser = argparse.ArgumentParser(description="Write the lock files.")
    parser.add_argument("names", nargs="*", metavar="LOCK", help=", ".join(LOCKS))
    parser.add_argument("--upgrade", action="store_true", help="take newer versions")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(LOCKS))
    if unknown:
        parser.error(f"there is no lock {unknown[0]}; there are {', '.join(LOCKS)}")
    return renew(options.names or list(LOCKS), upgrade=options.upgrade, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
