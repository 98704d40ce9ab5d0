"""What this node can build an environment with: a Python that the locks support, and uv.

uv is taken where it is found; else the master has its wheel brought here and unpacked. It needs
neither venv nor ensurepip of the Python, and can bring a Python itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from agents.children import Children
from agents.contract.environments import (
    SUPPORTED_PYTHONS,
    EnvironmentTools,
    WheelQuery,
    this_target,
)
from agents.errors import ExpectedError, explain_os_error
from agents.node.wheels import wheel_set
from agents.shared.files.python_child import python_variables
from agents.shared.packages.wheel_store import unpack_program
from agents.state import Home

TOOLS = "tools"
"""Folder below the agent's home for programs that were brought here."""
PYTHONS = "pythons"
"""Folder below the agent's home for Pythons that uv has brought."""
OLDEST_UV = (0, 5)
"""Oldest uv that knows all options which it is called with."""
BROUGHT_PYTHON = "3.12"
_LOOK_S = 20.0
_VERSION = "import sys; print('RACKLESS', sys.implementation.name, *sys.version_info[:3])"


def find_tools(home: Home, children: Children) -> EnvironmentTools:
    """Return the interpreter and the uv to build with."""
    uv, uv_version = find_uv(home, children)
    version = ".".join(map(str, sys.version_info[:3]))
    python = None
    for candidate in _pythons(home):
        found = version if candidate == sys.executable else _version_of(candidate, children)
        if found and tuple(map(int, found.split(".")[:2])) in SUPPORTED_PYTHONS:
            python, version = candidate, found
            break
    return EnvironmentTools(
        target=this_target(version), python=python, uv=uv, uv_version=uv_version
    )


def find_uv(home: Home, children: Children) -> tuple[str | None, str]:
    """Return path and version of a uv that is new enough; None: there is none."""
    own = sorted((home.path / TOOLS).glob("uv-*/uv"))
    known = [shutil.which("uv"), *(Path.home() / place / "bin" / "uv" for place in _PLACES)]
    for path in (*map(str, own), *(str(one) for one in known if one)):
        if os.access(path, os.X_OK) and (version := _uv_version(path, children)):
            return path, version
    return None, ""


_PLACES = (".local", ".cargo")


def _uv_version(path: str, children: Children) -> str | None:
    with contextlib.suppress(ExpectedError, TimeoutError):
        _, lines = children.run([path, "--version"], timeout_s=_LOOK_S)
        found = re.match(r"uv (\d+)\.(\d+)\.(\d+)", lines[0] if lines else "")
        if found and (int(found[1]), int(found[2])) >= OLDEST_UV:
            return ".".join(found.groups())
    return None


def _pythons(home: Home) -> Iterator[str]:
    """Yield interpreters that may be built on, the agent's own first."""
    yield sys.executable
    for major, minor in SUPPORTED_PYTHONS:
        if found := shutil.which(f"python{major}.{minor}"):
            yield found
    for major, minor in SUPPORTED_PYTHONS:
        brought = f"*/bin/python{major}.{minor}"
        yield from map(str, sorted((home.path / PYTHONS).glob(brought)))


def _version_of(python: str, children: Children) -> str | None:
    with contextlib.suppress(ExpectedError, TimeoutError):
        argv = [python, "-c", _VERSION]
        _, lines = children.run(argv, environ=python_variables(), timeout_s=_LOOK_S)
        words = lines[-1].split() if lines else []
        if words[:2] == ["RACKLESS", "cpython"]:
            return ".".join(words[2:])
    return None


def unpack_uv(home: Home, query: WheelQuery, children: Children) -> EnvironmentTools:
    """Unpack uv from its wheel, which is on this node.

    Raises:
        ExpectedError: the wheel is not here or not the locked one, or the disk is full.
    """
    wheels = wheel_set(home, query)
    wheel = wheels.find("uv")
    if wheel is None:
        raise ExpectedError("The wheel of uv is not on this node, or not the locked one.")
    folder = home.path / TOOLS / f"uv-{wheels.name}"
    try:
        unpack_program(wheel, "uv", folder)
    except OSError as error:
        raise explain_os_error(error, f"unpacking uv to {folder}") from error
    return find_tools(home, children)


def bring_python(
    home: Home, children: Children, progress: Callable[[str], None]
) -> EnvironmentTools:
    """Have uv download a Python of its own into the agent's home.

    Raises:
        ExpectedError: there is no uv, or it cannot download one.
    """
    uv, _ = find_uv(home, children)
    if uv is None:
        raise _no_python("and there is no uv here that could bring one")
    progress(f"bringing Python {BROUGHT_PYTHON}, as none here is 3.11 to 3.14")
    # With the node's own settings of uv, which may name a mirror: uv knows the hashes.
    argv = [uv, "python", "install", BROUGHT_PYTHON, "--no-bin"]
    argv += ["--install-dir", str(home.path / PYTHONS), "--cache-dir", str(home.path / TOOLS)]
    code, lines = children.run(argv, environ=python_variables(), on_line=progress)
    tools = find_tools(home, children)
    if tools.python is None:
        said = lines[-1][:300] if code and lines else "it said nothing"
        raise _no_python(f"and uv could not download one: {said}")
    return tools


def _no_python(why: str) -> ExpectedError:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return ExpectedError(
        f"This node has Python {version}, the packages of training need 3.11 to 3.14, {why}.",
        "Install one there, such as: sudo apt-get install -y python3.12. Or connect the node to "
        "the internet for this one download",
    )
