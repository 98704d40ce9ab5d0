"""Choose the service manager of this operating system, and the command that it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from app.core.watch_service.logon_task import LogonTask
from app.core.watch_service.service import BY_HAND, UserService, WatchCommand, run_command
from app.core.watch_service.systemd_unit import SystemdUnit
from app.errors import UserError


def this_command(home: Path) -> WatchCommand:
    """Return the command that runs this very program, from a checkout or an installed package."""
    # Not resolved: the interpreter of a virtual environment is a link that must stay one.
    python = Path(os.path.abspath(sys.executable))
    return WatchCommand(python=python, folder=Path(__file__).resolve().parents[3], home=home)


def user_service() -> UserService:
    """Return the service manager of this operating system.

    Raises:
        UserError: Rackless supports no service manager of this system.
    """
    if sys.platform == "win32":
        return LogonTask(run_command)
    elif sys.platform.startswith("linux"):
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return SystemdUnit(run_command, Path(config) / "systemd" / "user")
    else:
        raise UserError(f"there is no service for this operating system ({sys.platform})", BY_HAND)
