"""Install what a lock names into a folder: by uv, or by pip where there is none.

Neither gets any freedom: it installs what the lock names and nothing that this asks for, and
refuses a file whose hash the lock does not name before anything is installed. Only wheels are
taken, since a source package runs code while it is built; a lock lists its exceptions. A training
environment is installed from wheels that are on the node, without any network.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agents.children import Children
from agents.errors import ExpectedError, explain_os_error
from agents.shared.files.python_child import python_variables
from agents.shared.packages.lock import Lock, read_lock_text
from agents.shared.packages.wheel_store import WheelSet

VENV_TIMEOUT_S = 600.0
PIP_PROBLEMS = (
    (
        r"No space left on device",
        "the disk is full",
        "Free about 10 GB on this node, or delete files there if df -i shows no free inodes",
    ),
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


# uv: "Hash mismatch for `tiny-thing==1.5`", then the lists "Expected:" and "Computed:".
_UV_WRONG_FILE = re.compile(r"Hash mismatch for `([^`]+)`")
_UV_COMPUTED = re.compile(r"Computed:\s+sha256:([0-9a-f]{64})")
_UV_EXPECTED = re.compile(r"sha256:([0-9a-f]{64})")


class WrongPackage(ExpectedError):
    """A file is not the one that the lock names."""

    topic = "package-differs"


def install_with_uv(
    uv: str,
    base_python: str,
    folder: Path,
    wheels: WheelSet,
    children: Children,
    progress: Callable[[str], None],
) -> None:
    """Make a virtual environment on `base_python` and install a set of wheels into it.

    Raises:
        WrongPackage: a file is not the locked one.
        ExpectedError: uv failed; the message says why.
    """
    progress("making a virtual environment with uv")
    # Beside the environment, so that its files can be hard links; they outlive it.
    cache = folder.with_name(f".uv-{folder.name}")
    command = [*uv_command(uv), "--offline", "--cache-dir", str(cache)]
    what = "making the virtual environment failed"
    argv = [*command, "venv", "--python", base_python, "--no-project", str(folder)]
    try:
        _run_uv(argv, what, children)
        progress(f"installing {len(wheels.packages)} packages with uv")
        lock = _write_lock(folder, wheels.lock)
        argv = [*command, "pip", "install", "--python", str(folder / "bin" / "python")]
        argv += ["--no-index", "--find-links", str(wheels.folder), "--require-hashes", "--no-deps"]
        argv += ["--only-binary", ":all:", "-r", str(lock)]
        _run_uv(argv, "installing the packages failed", children)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def uv_command(uv: str) -> list[str]:
    """Return the argv of uv, without any setting of this node that could loosen a lock."""
    told = sorted(name for name in os.environ if name.startswith("UV_"))
    return ["env", *(word for name in told for word in ("-u", name)), uv, "--no-config"]


def _run_uv(argv: list[str], what: str, children: Children) -> None:
    code, lines = children.run(argv, environ={**python_variables(), "UV_NO_PROGRESS": "1"})
    if code != 0:
        raise _explain_uv(what, lines)


def _explain_uv(what: str, lines: list[str]) -> ExpectedError:
    text = "\n".join(lines)
    wrong = _UV_WRONG_FILE.search(text)
    if wrong is not None:
        after = text[wrong.end() :]
        got, named = _UV_COMPUTED.search(after), _UV_EXPECTED.findall(after.split("Computed")[0])
        return wrong_package(what, wrong[1], "", named, got[1] if got else "another")
    for pattern, cause, hint in PIP_PROBLEMS:
        if re.search(pattern, text):
            return ExpectedError(f"On this node {what}: {cause}.", hint)
    said = " ".join(line.strip(" x|-") for line in lines if line.strip())
    return ExpectedError(f"On this node {what}; uv said: {said[:400] or 'nothing'}")


def install_with_pip(
    base_python: str,
    folder: Path,
    wheels: WheelSet,
    children: Children,
    progress: Callable[[str], None],
) -> None:
    """Do the same with pip, which the set brings: the Python needs neither pip nor ensurepip.

    Raises:
        WrongPackage: a file is not the locked one.
        ExpectedError: venv or pip failed; the message says why.
    """
    pip = wheels.find("pip")
    if pip is None:
        raise ExpectedError("There is no uv on this node, and its packages bring no pip.")
    progress("making a virtual environment; there is no uv, so pip builds it")
    argv = [base_python, "-m", "venv", "--without-pip", str(folder)]
    code, lines = children.run(argv, environ=python_variables(), timeout_s=VENV_TIMEOUT_S)
    if code != 0:
        shutil.rmtree(folder, ignore_errors=True)
        raise _explain("making the virtual environment failed", lines)
    packages = folder / "lib" / f"python3.{wheels.target.minor}" / "site-packages"
    try:
        with zipfile.ZipFile(pip) as packed:
            packed.extractall(packages)
    except OSError as error:
        raise explain_os_error(error, f"unpacking pip to {packages}") from error
    run_pip(
        str(folder / "bin" / "python"),
        folder,
        wheels.lock.text,
        "installing the packages failed",
        children,
        progress,
        options=("--no-index", "--find-links", str(wheels.folder)),
        # A package in the user's site would satisfy pip here but is not the locked one.
        environ={"PYTHONNOUSERSITE": "1", "PIP_REQUIRE_VIRTUALENV": "1"},
    )


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
        ExpectedError: the lock is not one, or pip failed; the message says why.
    """
    lock = _write_lock(folder, _read_lock(lock_text, what))
    argv = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    argv += ["--progress-bar", "off", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    argv += [*options, "-r", str(lock)]
    code, lines = children.run(
        argv, environ={**python_variables(), **(environ or {})}, on_line=progress
    )
    if code != 0:
        raise _explain(what, lines)


def _write_lock(folder: Path, lock: Lock) -> Path:
    file = folder / "requirements.txt"
    try:
        file.write_text(lock.text, encoding="utf-8")
    except OSError as error:
        raise explain_os_error(error, f"writing {file}") from error
    return file


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
        return ExpectedError(
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
    """Return the error for a file with another hash than the lock's, from pip's words."""
    got = _GOT.search(text)
    place = f" from {source.partition('#')[0]}" if source else ""
    return wrong_package(
        what, package, place, _EXPECTED.findall(text), got[1] if got else "another"
    )


def wrong_package(
    what: str, package: str, place: str, expected: Sequence[str], got: str
) -> WrongPackage:
    """Return the error for a file with another hash than the lock's."""
    wanted = expected[0] if len(expected) == 1 else f"one of the lock's {len(expected)}"
    return WrongPackage(
        f"On this node {what}: {package}{place} is not the file that the lock names. Expected "
        f"sha256 {wanted}, got {got}. It was not installed.",
        "Try again, in case the download was damaged. If it is the same again, the package index "
        "or a proxy of this node serves another file than the one that was checked: see there "
        "with `pip config list`, and do not install it by hand",
    )
