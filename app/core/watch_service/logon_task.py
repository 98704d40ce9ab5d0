"""Run `rackless watch` as a task of Windows that starts when the user logs on.

Through schtasks, which every Windows has. The task is given as XML, because only that form can
restart it after a fault, lift the limit of three days, and belong to a user without administrator
rights. A task has no environment of its own, so the home is set by the program's first line.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape, unescape

from app.core.watch_service.service import (
    BY_HAND,
    Run,
    ServiceReport,
    WatchCommand,
    last_line,
    require_same_home,
)
from app.errors import UserError
from app.paths import HOME_VARIABLE

TASK_NAME = "Rackless watch"
_RUNNING = "0x41301"
"""Result of a task that runs now (SCHED_S_TASK_RUNNING); words are translated, this is not."""
_HOME = re.compile(rf"os\.environ\['{HOME_VARIABLE}'\] = bytes\.fromhex\('([0-9a-f]*)'\)")


def task_xml(command: WatchCommand, user: str) -> str:
    """Return the task that runs a command at each logon of a user."""
    # pythonw.exe opens no console window.
    windowless = command.python.with_name("pythonw.exe")
    python = windowless if windowless.exists() else command.python
    arguments = subprocess.list2cmdline(["-c", _program(command.home)])
    return f"""<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>Watches runs of Rackless and resumes those that lost a rank or node.</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger><UserId>{escape(user)}</UserId></LogonTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{escape(user)}</UserId>
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>999</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{escape(str(python))}</Command>
      <Arguments>{escape(arguments)}</Arguments>
      <WorkingDirectory>{escape(str(command.folder))}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
"""


def _program(home: Path) -> str:
    # In hexadecimal digits, so that no quoting of Windows can change the path.
    path = str(home).encode().hex()
    return (
        f"import os, sys; os.environ['{HOME_VARIABLE}'] = bytes.fromhex('{path}').decode(); "
        "sys.argv[1:] = ['watch']; from app.__main__ import main; sys.exit(main())"
    )


def home_in_task(xml: str) -> str:
    """Return the home that a task watches; empty: not known."""
    found = _HOME.search(unescape(xml, {"&apos;": "'", "&quot;": '"'}))
    return bytes.fromhex(found[1]).decode(errors="replace") if found else ""


def _user() -> str:
    domain = os.environ.get("USERDOMAIN")
    return f"{domain}\\{getpass.getuser()}" if domain else getpass.getuser()


@dataclass(frozen=True, slots=True)
class LogonTask:
    """A task of the Windows task scheduler."""

    run: Run
    user: str = field(default_factory=_user)

    def install(self, command: WatchCommand) -> ServiceReport:
        """Create the task and start it."""
        require_same_home(self.status().home, str(command.home))
        text = task_xml(command, self.user)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "task.xml"
            file.write_text(text, encoding="utf-16")  # as the XML declares
            create = ("schtasks", "/Create", "/TN", TASK_NAME, "/XML", str(file), "/F")
            self._require(*create)
        start = ("schtasks", "/Run", "/TN", TASK_NAME)
        try:
            self._require(*start)
        except UserError:
            # `install` leaves nothing behind if it fails.
            self.run("schtasks", "/Delete", "/TN", TASK_NAME, "/F")
            raise
        commands = tuple(subprocess.list2cmdline(words) for words in (create, start))
        return ServiceReport(
            state=self._state(),
            file=f"task {TASK_NAME}",
            text=text,
            commands=commands,
            home=str(command.home),
            advice=f"It runs while {self.user} is logged on.",
        )

    def uninstall(self) -> ServiceReport:
        """End and delete the task."""
        if self.status().state == "not installed":
            return ServiceReport(state="not installed")
        end = ("schtasks", "/End", "/TN", TASK_NAME)
        delete = ("schtasks", "/Delete", "/TN", TASK_NAME, "/F")
        # It may not be running.
        with contextlib.suppress(UserError):
            self._require(*end)
        self._require(*delete)
        commands = tuple(subprocess.list2cmdline(words) for words in (end, delete))
        return ServiceReport(state="not installed", file=f"task {TASK_NAME}", commands=commands)

    def status(self) -> ServiceReport:
        """Report the task as the scheduler has it."""
        found = self.run("schtasks", "/Query", "/TN", TASK_NAME, "/XML")
        if found.returncode:
            return ServiceReport(state="not installed")
        return ServiceReport(
            state=self._state(),
            file=f"task {TASK_NAME}",
            text=found.stdout,
            home=home_in_task(found.stdout),
        )

    def _state(self) -> str:
        done = self.run("schtasks", "/Query", "/TN", TASK_NAME, "/V", "/FO", "CSV", "/NH")
        # The result may be printed in hexadecimal or in decimal digits.
        is_running = _RUNNING in done.stdout or str(int(_RUNNING, 16)) in done.stdout
        return "running" if is_running else "installed"

    def _require(self, *words: str) -> None:
        done = self.run(*words)
        if done.returncode:
            raise UserError(
                f"{' '.join(words[:2])} failed: {last_line(done)}",
                BY_HAND,
            )
