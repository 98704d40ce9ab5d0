"""Install packages for an export format beside the training environment, in their own folder.

They are installed without dependencies, which the lock lists one by one, so that nothing in the
training environment is changed or shadowed. The folder is named by the lock's hash and is valid
once its marker is written. An interpreter that has them all already needs no folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from agents.children import Children
from agents.contract.artifacts import PackagesBuild, PackagesReport
from agents.errors import ExpectedError, explain_os_error
from agents.node.environment import is_version, look, run_pip
from agents.state import Home, locked, require_name


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
    folder = home.environments / f"packages-{job.lock_sha256[:16]}"
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
    options = ("--no-deps", "--no-build-isolation", "--target", str(folder))
    what = "installing the packages for quantizing failed"
    try:
        run_pip(job.python, folder, job.lock_text, what, children, progress, options=options)
    except ExpectedError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
