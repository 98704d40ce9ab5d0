"""Inspect, adopt or build the training environment of a node from the lock file.

Packages are listed by running the interpreter, not by reading its folders. A built environment is
in a folder named by the lock's hash, and is valid only once its marker is written; an interrupted
build starts again, from wheels that are kept (wheels.py). A version may have a local part
(`2.13.0+cu130`) that is not in the lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agents.children import Children
from agents.contract.environments import EnvironmentTrial, WheelQuery
from agents.contract.node import EnvironmentReport
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.node.build_tools import find_uv
from agents.node.installer import WrongPackage, install_with_pip, install_with_uv
from agents.node.wheels import wheel_set
from agents.shared.files.python_child import python_variables
from agents.shared.packages.wheel_store import WheelSet
from agents.state import Home, locked, read_json, require_name, write_json

if TYPE_CHECKING:  # the facts, which are asked for first, need neither
    from agents.contract.requests.environment import EnvironmentBuild, EnvironmentQuery

COMPLETE = "complete"
"""Marker file of a complete environment; it names the tool that built it and the wheels."""
LOOK_TIMEOUT_S = 60.0
ASK_VERSIONS = """
import importlib.metadata, json, os.path, sys, sysconfig
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
version = ".".join(map(str, sys.version_info[:3]))
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print("RACKLESS " + json.dumps({"version": version, "found": found, "headers": headers}))
"""


def read_adopted(home: Home) -> EnvironmentReport | None:
    """Return the report of the adopted environment from its adoption, or None."""
    try:
        return from_wire(EnvironmentReport, read_json(home.environment_file))
    except WireError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """Content of the marker of a built environment."""

    built_with: str
    """`uv 0.13.9` or `pip`; empty without a marker, or if an older version wrote it."""
    wheels: str
    """Name of the set of wheels from which it was built."""


def read_marker(folder: Path) -> Marker:
    """Return the content of the marker in an environment's folder."""
    lines: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = (folder / COMPLETE).read_text(encoding="ascii")[:200].splitlines()
    tool, wheels, *_ = (*lines, "", "")
    return Marker(built_with=tool, wheels=wheels)


def find(home: Home, query: EnvironmentQuery, children: Children) -> EnvironmentReport:
    """Compare an interpreter's packages with the lock; adopt it if it fits and `query` asks for it.

    Raises:
        ExpectedError: the named interpreter does not run.
    """
    adopted = read_adopted(home)
    python = query.python or (adopted.python if adopted else None)
    if python is None:
        return EnvironmentReport(missing=tuple(sorted(query.requirements)))
    # Not resolved: the link bin/python is what makes an interpreter that of its environment.
    python = os.path.abspath(os.path.expanduser(python))
    version, found, headers = look(python, query.requirements, children)
    report = replace(
        compare(python, version, found, query),
        headers=headers,
        built_with=read_marker(Path(python).parent.parent).built_with or None,
    )
    # The trial stays valid as long as interpreter and lock are the same.
    if adopted and (adopted.python, adopted.lock_sha256) == (python, report.lock_sha256):
        report = replace(report, trial=adopted.trial)
    # A check of another interpreter must not replace the adopted one.
    if report.fits and (query.adopt or (adopted and adopted.python == python)):
        write_json(home.environment_file, to_wire(report))
    return report


def compare(
    python: str, version: str, found: dict[str, str | None], query: EnvironmentQuery
) -> EnvironmentReport:
    """Compare the packages `found` with the requirements of `query`."""
    missing = [name for name in query.requirements if found.get(name) is None]
    different = [
        f"{name} {found[name]} instead of {wanted}"
        for name, wanted in query.requirements.items()
        if found.get(name) and not is_version(str(found[name]), wanted)
    ]
    old_python = tuple(map(int, version.split(".")[:2])) < (3, 10)
    if old_python:
        different.append(f"python {version} instead of 3.10 or newer")
    fits = not missing and not different
    return EnvironmentReport(
        python=python,
        python_version=version,
        lock_sha256=query.lock_sha256 if fits else None,
        fits=fits,
        missing=tuple(sorted(missing)),
        different=tuple(sorted(different)),
    )


def is_version(found: str, wanted: str) -> bool:
    """Return whether the versions are equal, ignoring a local part that only `found` has.

    >>> is_version("2.13.0+cu130", "2.13.0"), is_version("2.13.0", "2.13.0+cpu")
    (True, False)
    """
    return found == wanted or ("+" not in wanted and found.partition("+")[0] == wanted)


def look(
    python: str, requirements: dict[str, str], children: Children
) -> tuple[str, dict[str, str | None], bool]:
    """Inspect an interpreter.

    Returns:
        Its version, the version of each distribution (None if not installed), and whether its C
        headers are installed.

    Raises:
        ExpectedError: the file does not exist, is not a Python, or does not answer.
    """
    if not os.path.exists(python):
        raise ExpectedError(
            f"There is no interpreter at {python} on this node.",
            "Name another interpreter, or none to build an environment",
        )
    argv = [python, "-c", ASK_VERSIONS, *requirements]
    try:
        _, lines = children.run(argv, environ=python_variables(), timeout_s=LOOK_TIMEOUT_S)
    except TimeoutError as error:
        raise ExpectedError(f"{python} did not answer within {LOOK_TIMEOUT_S:g} s.") from error
    # Packages may print on import, so the answer has a prefix.
    for line in lines:
        if line.startswith("RACKLESS "):
            answer = json.loads(line.partition(" ")[2])
            return answer["version"], answer["found"], answer["headers"]
    said = lines[-1] if lines else "nothing"
    raise ExpectedError(f"{python} does not work as a Python interpreter; it said: {said[:300]}")


def build(
    home: Home, job: EnvironmentBuild, children: Children, progress: Callable[[str], None]
) -> EnvironmentReport:
    """Build a virtual environment from the lock's wheels on this node, adopt it, and report it.

    Raises:
        ExpectedError: a wheel is missing or wrong, or uv or pip failed; the message says which.
    """
    from agents.contract.requests.environment import EnvironmentQuery

    require_name(job.lock_sha256, "The lock's hash")
    wheels = wheel_set(home, WheelQuery(lock_text=job.lock_text, target=job.target))
    # The hash of the whole text: the same versions with other hashes are another environment.
    folder = home.environments / hashlib.sha256(job.lock_text.encode()).hexdigest()[:16]
    query = EnvironmentQuery(
        lock_sha256=job.lock_sha256,
        requirements=job.requirements,
        python=str(folder / "bin" / "python"),
        adopt=True,
    )
    try:
        home.environments.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making {home.environments}") from error
    busy = "Another build of the training environment is running on this node."
    with locked(home.environments / f"{folder.name}.lock", 1.0, busy):
        if not _is_built(folder, children):
            _install(home, folder, wheels, job, children, progress)
        # The installer's success is not enough: the interpreter itself has to list the packages.
        report = find(home, query, children)
        if not report.fits:
            # Otherwise the next build would skip the installation and fail in the same way.
            (folder / COMPLETE).unlink()
            wrong = ", ".join((*report.missing, *report.different))
            raise ExpectedError(f"The built environment {folder} does not match the lock: {wrong}.")
    return report


def _is_built(folder: Path, children: Children) -> bool:
    if not (folder / COMPLETE).exists():
        return False
    # A system update may have removed the Python on which it was built.
    with contextlib.suppress(ExpectedError):
        return bool(look(str(folder / "bin" / "python"), {}, children)[0])
    return False


def _install(
    home: Home,
    folder: Path,
    wheels: WheelSet,
    job: EnvironmentBuild,
    children: Children,
    progress: Callable[[str], None],
) -> None:
    """Rebuild the folder from wheels on this node, which takes seconds."""
    if not wheels.is_complete:
        lacking = len(wheels.packages) - len(wheels.present())
        raise ExpectedError(
            f"{lacking} of the {len(wheels.packages)} packages of the environment are not on this "
            "node.",
            "Set it up again: rackless nodes setup",
        )
    # The remains of an interrupted build have no marker.
    shutil.rmtree(folder, ignore_errors=True)
    uv, version = find_uv(home, children)
    try:
        if uv is not None:
            tool = f"uv {version}"
            install_with_uv(uv, job.python, folder, wheels, children, progress)
        else:
            tool = "pip"
            install_with_pip(job.python, folder, wheels, children, progress)
    except WrongPackage:
        # All wheels are deleted, because they may come from the same source as the wrong one.
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(wheels.folder, ignore_errors=True)
        raise
    # Last, because the marker makes the environment valid.
    try:
        (folder / COMPLETE).write_text(f"{tool}\n{wheels.name}\n", encoding="ascii")
    except OSError as error:
        raise explain_os_error(error, f"writing {folder / COMPLETE}") from error


def keep_trial(home: Home, trial: EnvironmentTrial) -> EnvironmentReport:
    """Store the result of a trial of the adopted environment, and return its report."""
    report = replace(read_adopted(home) or EnvironmentReport(), trial=trial)
    write_json(home.environment_file, to_wire(report))
    return report
