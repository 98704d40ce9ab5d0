"""Install packages for an export format beside the training environment, in their own folder.

They are installed without dependencies, which the lock lists one by one, so that nothing in the
training environment is changed or shadowed. The folder is named by the lock's hash and is valid
once its marker is written. An interpreter that has them all already needs no folder.

Some have no wheel and are built here, by the setuptools of the training environment, which is
locked as well. A build that downloads would bring in what no hash covers, so it gets no connection.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from agents.children import Children
from agents.contract.requests.environment import PackagesBuild, PackagesReport
from agents.errors import ExpectedError, explain_os_error
from agents.node.environment import is_version, look
from agents.node.installer import run_pip
from agents.shared.files.python_child import python_variables
from agents.state import Home, locked, require_name

# pip tells a build's process by these variables; its own process, which downloads, has neither.
_FENCE = """\
import os, sys

def refuse(event, details):
    inet = event == "socket.getaddrinfo" or event == "socket.connect" and details[0].family != 1
    if inet:
        raise PermissionError("a package may not open a connection while it is built")

if {"PEP517_BUILD_BACKEND", "_PYPROJECT_HOOKS_BUILD_BACKEND"} & set(os.environ):
    sys.addaudithook(refuse)
"""


def build(
    home: Home, job: PackagesBuild, children: Children, progress: Callable[[str], None]
) -> PackagesReport:
    """Install the packages if they are missing, and return their folder.

    Raises:
        ExpectedError: the interpreter does not run, or pip failed.
    """
    # It becomes part of a path.
    require_name(job.lock_sha256, "The lock's hash")
    _, found, _ = look(job.python, job.requirements, children)
    if all(is_version(found.get(name) or "", want) for name, want in job.requirements.items()):
        return PackagesReport()
    name = hashlib.sha256(job.lock_text.encode()).hexdigest()[:16]
    folder = home.environments / f"packages-{name}"
    try:
        home.environments.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making {home.environments}") from error
    busy = "Another request installs these packages on this node."
    # Wait rather than refuse: two exports of one format may start together.
    with locked(home.environments / f"{folder.name}.lock", 600.0, busy):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _install(folder, job, children, progress)
            (folder / "complete").touch()
    return PackagesReport(path=str(folder.relative_to(home.path)))


def _install(
    folder: Path, job: PackagesBuild, children: Children, progress: Callable[[str], None]
) -> None:
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise explain_os_error(error, f"making {folder}") from error
    # Source packages must build against the environment's torch and not download another one.
    # Without bytecode: most of these modules are never imported; Python keeps that of the others.
    options = ("--no-build-isolation", "--use-pep517", "--no-compile", "--target", str(folder))
    what = "installing the packages for quantizing failed"
    try:
        environ = _fence_builds(folder)
        run_pip(
            job.python,
            folder,
            job.lock_text,
            what,
            children,
            progress,
            options=options,
            environ=environ,
        )
    except ExpectedError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _fence_builds(folder: Path) -> dict[str, str]:
    """Return variables under which no build of a package opens a connection.

    Python's own connections and git's are refused; what else a build may start is up to packages
    whose very bytes are locked.
    """
    fence = folder / ".fence"
    try:
        fence.mkdir()
        (fence / "sitecustomize.py").write_text(_FENCE, encoding="ascii")
    except OSError as error:
        raise explain_os_error(error, f"writing {fence}") from error
    return {**python_variables(str(fence)), "GIT_ALLOW_PROTOCOL": "file"}
