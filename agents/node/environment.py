"""Inspect, adopt or build the training environment of a node from the lock file.

Packages are listed by running the interpreter, never guessed from its folders. A built
environment lies in a folder named by the lock's hash and counts only once its marker is written; a
broken-off build is continued. A version may carry a local part (`2.13.0+cu130`) that the lock does
not name.

pip gets no freedom: it installs what the lock names and nothing that this asks for, and refuses a
file whose hash the lock does not name before anything is installed. Only wheels are taken, since a
source package runs code while it is built; a lock lists its exceptions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agents.children import Children
from agents.contract.lock import Lock, read_lock_text
from agents.contract.node import EnvironmentBuild, EnvironmentQuery, EnvironmentReport
from agents.contract.python_child import python_variables
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.state import Home, locked, read_json, require_name, write_json

LOOK_TIMEOUT_S = 60.0
VENV_TIMEOUT_S = 600.0
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
PIP_PROBLEMS = (
    (r"No space left on device", "the disk is full", "Free about 10 GB on this node"),
    (
        r"Temporary failure in name resolution|Name or service not known|NewConnectionError|"
        r"Network is unreachable|Connection refused|Failed to establish a new connection|"
        r"Max retries exceeded|timed out",
        "this node cannot reach the package index",
        "Check its internet connection, or set a mirror: pip config set global.index-url URL",
    ),
    (
        r"may not open a connection while it is built",
        "a source package wanted to download more than the lock names",
        "Install what it lacks, so that it need not: "
        "sudo apt-get install -y build-essential python3-dev libpcre2-dev",
    ),
)
_NO_FILE = re.compile(r"No matching distribution found for (\S+)")
_WRONG_FILE = re.compile(r"DO NOT MATCH THE HASHES.*?\n\s*(\S+==\S+)(?: from (\S+))?", re.DOTALL)
_EXPECTED = re.compile(r"Expected (?:sha256|\s+or) +([0-9a-f]{64})")
_GOT = re.compile(r"Got +([0-9a-f]{64})")


class MissingPackage(ExpectedError):
    """No index that pip asked has a file of a locked package for this PC."""


class WrongPackage(ExpectedError):
    """A file is not the one that the lock names."""


def read_adopted(home: Home) -> EnvironmentReport | None:
    """Return the adopted environment, as it was then; None: there is none."""
    try:
        return from_wire(EnvironmentReport, read_json(home.environment_file))
    except WireError:
        return None


def find(home: Home, query: EnvironmentQuery, children: Children) -> EnvironmentReport:
    """Compare an interpreter's packages with the lock; adopt it if requested and it fits.

    Raises:
        ExpectedError: the named interpreter does not run.
    """
    adopted = read_adopted(home)
    python = query.python or (adopted.python if adopted else None)
    if python is None:
        return EnvironmentReport(missing=tuple(sorted(query.requirements)))
    python = os.path.abspath(os.path.expanduser(python))
    version, found, headers = look(python, query.requirements, children)
    report = replace(compare(python, version, found, query), headers=headers)
    # A check of another interpreter must not replace the adopted one.
    if report.fits and (query.adopt or (adopted and adopted.python == python)):
        write_json(home.environment_file, to_wire(report))
    return report


def compare(
    python: str, version: str, found: dict[str, str | None], query: EnvironmentQuery
) -> EnvironmentReport:
    """Return the report on packages `found` for what `query` requires."""
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
    """Return whether the versions are equal, except for a local part that only `found` has.

    >>> is_version("2.13.0+cu130", "2.13.0"), is_version("2.13.0", "2.13.0+cpu")
    (True, False)
    """
    return found == wanted or ("+" not in wanted and found.partition("+")[0] == wanted)


def look(
    python: str, requirements: dict[str, str], children: Children
) -> tuple[str, dict[str, str | None], bool]:
    """Return the versions of an interpreter and of each distribution (None: not installed), and
    whether the interpreter's C headers are installed.

    Raises:
        ExpectedError: there is no such file, it is no Python, or it does not answer.
    """
    if not os.path.exists(python):
        raise ExpectedError(
            f"There is no interpreter at {python} on this node.",
            "Name another one, or leave it out to build an environment",
        )
    argv = [python, "-c", ASK_VERSIONS, *requirements]
    try:
        _, lines = children.run(argv, environ=python_variables(), timeout_s=LOOK_TIMEOUT_S)
    except TimeoutError as error:
        raise ExpectedError(f"{python} did not answer within {LOOK_TIMEOUT_S:g} s.") from error
    for line in lines:
        if line.startswith("RACKLESS "):
            answer = json.loads(line.partition(" ")[2])
            return answer["version"], answer["found"], answer["headers"]
    said = lines[-1] if lines else "nothing"
    raise ExpectedError(f"{python} does not work as a Python interpreter; it said: {said[:300]}")


def build(
    home: Home, job: EnvironmentBuild, children: Children, progress: Callable[[str], None]
) -> EnvironmentReport:
    """Make a virtual environment from the lock, adopt it, and report on it.

    Raises:
        ExpectedError: venv or pip failed; the message says which and why.
    """
    require_name(job.lock_sha256, "The lock's hash")
    for text in (job.lock_text, job.fallback_text):
        _read_lock(text, "no environment was begun")
    # By all of its text: the same versions with other hashes are another environment.
    folder = home.environments / hashlib.sha256(job.lock_text.encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    query = EnvironmentQuery(
        lock_sha256=job.lock_sha256,
        requirements=job.requirements,
        python=str(python),
        adopt=True,
    )
    try:
        home.environments.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making {home.environments}") from error
    busy = "Another build of the training environment runs on this node."
    with locked(home.environments / f"{folder.name}.lock", 1.0, busy):
        if not (folder / "complete").exists():
            _make_venv(folder, children, progress)
            _install(folder, python, job, children, progress)
            # Last: without the marker the next build continues this folder.
            (folder / "complete").touch()
        report = find(home, query, children)
        if not report.fits:
            # Otherwise the next build would skip pip and fail in the same way.
            (folder / "complete").unlink()
            wrong = ", ".join((*report.missing, *report.different))
            raise ExpectedError(f"The built environment {folder} does not match the lock: {wrong}.")
    return report


def _make_venv(folder: Path, children: Children, progress: Callable[[str], None]) -> None:
    # venv makes pip last, so a folder with pip has a whole venv.
    if (folder / "bin" / "python").exists() and (folder / "bin" / "pip").exists():
        progress("continuing the environment that was begun before")
        return
    progress("making a virtual environment")
    shutil.rmtree(folder, ignore_errors=True)
    argv = [sys.executable, "-m", "venv", str(folder)]
    code, lines = children.run(argv, environ=python_variables(), timeout_s=VENV_TIMEOUT_S)
    if code == 0:
        return
    shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join(lines)
    # Debian and Ubuntu split ensurepip off python3 into a package of its own.
    if "ensurepip" in text or "No module named venv" in text:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise ExpectedError(
            "python3-venv is missing on this node, so no environment can be built.",
            f"sudo apt-get install -y python{version}-venv",
        )
    raise _explain("making the virtual environment failed", lines)


def _install(
    folder: Path,
    python: Path,
    job: EnvironmentBuild,
    children: Children,
    progress: Callable[[str], None],
) -> None:
    """Install from the first of the order's sources that has all packages."""
    # A package in the user's site would satisfy pip here but is not the locked one.
    environ = {"PYTHONNOUSERSITE": "1", "PIP_REQUIRE_VIRTUALENV": "1"}
    what = "installing the packages failed"
    tries: list[tuple[str, tuple[str, ...]]] = [(job.lock_text, ())]
    if job.index_url:
        tries.append((job.lock_text, ("--extra-index-url", job.index_url)))
    if job.fallback_text:
        tries.append((job.fallback_text, ()))
    for number, (text, options) in enumerate(tries, 1):
        try:
            run_pip(
                str(python),
                folder,
                text,
                what,
                children,
                progress,
                options=options,
                environ=environ,
            )
            return
        except MissingPackage as missing:
            if number == len(tries):
                raise
            progress(f"{missing.message} Trying elsewhere.")
        except WrongPackage:
            # Nothing of this build is kept: whoever served a wrong file may have served others.
            shutil.rmtree(folder, ignore_errors=True)
            raise


def run_pip(
    python: str,
    folder: Path,
    lock_text: str,
    what: str,
    children: Children,
    progress: Callable[[str], None],
    *,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> None:
    """Install what a lock names and nothing else, and keep the lock in `folder`.

    Args:
        python: interpreter whose pip is used.
        what: beginning of the error message.
        options: more options for pip.
        environ: variables for pip, added to a clean environment.

    Raises:
        WrongPackage: a file does not have a hash that the lock names for it.
        MissingPackage: no index has a file of a package that fits this PC.
        ExpectedError: the lock is not one, or pip failed; the message says why.
    """
    locked = _read_lock(lock_text, what)
    lock = folder / "requirements.txt"
    try:
        lock.write_text(locked.text, encoding="utf-8")
    except OSError as error:
        raise explain_os_error(error, f"writing {lock}") from error
    argv = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    argv += ["--progress-bar", "off", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    argv += [*options, "-r", str(lock)]
    code, lines = children.run(
        argv, environ={**python_variables(), **(environ or {})}, on_line=progress
    )
    if code != 0:
        raise _explain(what, lines)


def _read_lock(text: str, what: str) -> Lock:
    try:
        return read_lock_text(text)
    except ValueError as error:
        raise ExpectedError(
            f"On this node {what}: {error}.", "Update Rackless on the PC that sent this lock"
        ) from error


def _explain(what: str, lines: list[str]) -> ExpectedError:
    """Return the error that the last lines of pip or venv describe."""
    text = "\n".join(lines)
    # First: a wrong file may come with any other trouble, and matters more.
    wrong = _WRONG_FILE.search(text)
    if wrong is not None:
        return _explain_wrong_file(what, wrong[1], wrong[2], text[wrong.start() :])
    for pattern, cause, hint in PIP_PROBLEMS:
        if re.search(pattern, text):
            return ExpectedError(f"On this node {what}: {cause}.", hint)
    missing = _NO_FILE.search(text)
    if missing is not None:
        return MissingPackage(
            f"On this node {what}: there is no package {missing[1]} for this Python or this kind "
            "of PC, ready-built as the lock wants it.",
            "Install a Python that the packages support: 3.11 to 3.14, 64 bit",
        )
    # pip prints notices after the error, so the last line alone is often not the cause.
    errors = [line for line in lines if "error" in line.lower()] or lines
    return ExpectedError(
        f"On this node {what}: {errors[-1][:400] if errors else 'no reason given'}"
    )


def _explain_wrong_file(what: str, package: str, source: str | None, text: str) -> WrongPackage:
    """Return the error for a file with another hash than the lock's."""
    expected, got = _EXPECTED.findall(text), _GOT.search(text)
    wanted = expected[0] if len(expected) == 1 else f"one of the lock's {len(expected)}"
    place = f" from {source.partition('#')[0]}" if source else ""
    return WrongPackage(
        f"On this node {what}: {package}{place} is not the file that the lock names. Expected "
        f"sha256 {wanted}, got {got[1] if got else 'another'}. It was not installed.",
        "Try again, in case the download was damaged. If it is the same again, the package index "
        "or a proxy of this node serves another file than the one that was checked: see there "
        "with `pip config list`, and do not install it by hand",
    )
