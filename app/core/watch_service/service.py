"""Parts that the services of all operating systems share: the command, the report, running a tool.

A service runs without a window and restarts after a fault. Its report lists each command that was
run and each file that was written, so that the user can undo them by hand.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agents.shared.files.python_child import SAFE_FOLDER, own_folders, python_environ
from app.errors import UserError

COMMAND_TIMEOUT_S = 60.0
BY_HAND = "Keep it running another way, such as in a terminal: rackless watch"


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchCommand:
    """How a service starts `rackless watch`."""

    python: Path
    """Interpreter of the environment that Rackless runs in."""
    folder: Path
    """Folder with the package `app`: a checkout, or where packages are installed."""
    home: Path
    """`$RACKLESS_HOME` of the service."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceReport:
    """Result of a change of a service, or its current state."""

    state: str
    """`running`, `installed` (it does not run now) or `not installed`."""
    file: str = ""
    """File of the service; empty: none."""
    text: str = ""
    """Whole text of that file."""
    commands: tuple[str, ...] = ()
    """Commands that were run, in order."""
    home: str = ""
    """Home that the service watches; empty: not known."""
    advice: str = ""
    """Further steps for the user; empty: none."""


class UserService(Protocol):
    """A service of one user on one operating system."""

    def install(self, command: WatchCommand) -> ServiceReport:
        """Write the service, start it now and at each start, and report what was written.

        Raises:
            UserError: it cannot be installed; nothing is left behind.
        """

    def uninstall(self) -> ServiceReport:
        """End the service and remove all that `install` wrote.

        Raises:
            UserError: it cannot be removed.
        """

    def status(self) -> ServiceReport:
        """Report whether it is installed and runs."""


class Run(Protocol):
    """Runs a command to its end."""

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]: ...


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output; one that is missing exits with 127, as in a shell."""
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env=python_environ(os.environ, *own_folders(os.environ)),
            cwd=SAFE_FOLDER,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, 127, "", f"there is no {words[0]} on this PC")
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 126, "", str(error))


def require_same_home(installed: str, wanted: str) -> None:
    """Refuse to replace the service of another home, whose runs would no longer be watched.

    Raises:
        UserError: the service watches another home.
    """
    if installed and installed != wanted:
        raise UserError(
            f"a service already watches the home {installed}",
            "Remove that one first: rackless watch --uninstall",
        )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line in which a command says why it failed."""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}"
