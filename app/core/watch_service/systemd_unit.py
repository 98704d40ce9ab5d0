"""Run `rackless watch` as a unit of the user's own systemd."""

from __future__ import annotations

import getpass
from dataclasses import dataclass, field
from pathlib import Path

from agents.shared.files.full_disk import name_disk_error
from app.core.watch_service import service
from app.errors import UserError
from app.paths import HOME_VARIABLE, private_folder, replace_text
from app.shell_words import posix_command

UNIT_NAME = "rackless-watch.service"


def unit_text(command: service.WatchCommand) -> str:
    """Return the systemd unit that runs a command.

    Raises:
        UserError: a path cannot be written into a unit.
    """
    for path in (command.python, command.folder, command.home):
        if any(ord(char) < 32 for char in str(path)):
            raise UserError(f"{str(path)!a} has a control character in it", "Rename it.")
    home = _quoted(f"{HOME_VARIABLE}={command.home}")
    python = _quoted(str(command.python)).replace("$", "$$")
    return "\n".join(
        (
            "[Unit]",
            "Description=Rackless: watch runs and resume those that lost a rank or node",
            "",
            "[Service]",
            f"Environment={home}",
            # The whole line is the path: systemd reads no quotes here.
            f"WorkingDirectory={str(command.folder).replace('%', '%%')}",
            f"ExecStart={python} -m app watch",
            "Restart=on-failure",
            "RestartSec=10",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        )
    )


def _quoted(text: str) -> str:
    """Return a word of a unit file.

    >>> _quoted('A=/my "home"/50%')
    '"A=/my \\\\"home\\\\"/50%%"'
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    """A unit of the user's own systemd."""

    run: service.Run
    folder: Path
    """Where units of the user lie."""
    user: str = field(default_factory=getpass.getuser)

    @property
    def file(self) -> Path:
        return self.folder / UNIT_NAME

    def install(self, command: service.WatchCommand) -> service.ServiceReport:
        """Write, enable and start the unit."""
        text, before = unit_text(command), self._read()
        self._require_systemd()
        if before is not None:
            service.require_same_home(_home_in_unit(before), str(command.home))
        try:
            private_folder(self.folder)
            replace_text(self.file, text)
        except OSError as error:
            raise UserError(f"{self.file} cannot be written: {name_disk_error(error)}") from error
        commands = (
            ("systemctl", "--user", "daemon-reload"),
            ("systemctl", "--user", "enable", UNIT_NAME),
            # Not `start`, which would leave a running service with its old unit.
            ("systemctl", "--user", "restart", UNIT_NAME),
        )
        for words in commands:
            done = self.run(*words)
            if done.returncode:
                self._undo(before)
                raise UserError(
                    f"{' '.join(words)} failed: {service.last_line(done)}", service.BY_HAND
                )
        return service.ServiceReport(
            state=self._state(),
            file=str(self.file),
            text=text,
            commands=tuple(" ".join(words) for words in commands),
            home=str(command.home),
            advice=self._linger_advice(),
        )

    def uninstall(self) -> service.ServiceReport:
        """Stop and disable the unit and delete its file."""
        if self._read() is None:
            return service.ServiceReport(state="not installed")
        disable = ("systemctl", "--user", "disable", "--now", UNIT_NAME)
        done = self.run(*disable)
        if done.returncode:
            raise UserError(
                f"{' '.join(disable)} failed: {service.last_line(done)}",
                f"Log in as this user and try again, or delete {self.file} by hand.",
            )
        self._delete()
        reload = ("systemctl", "--user", "daemon-reload")
        self.run(*reload)
        return service.ServiceReport(
            state="not installed",
            file=str(self.file),
            commands=(" ".join(disable), " ".join(reload)),
        )

    def status(self) -> service.ServiceReport:
        """Report the unit as its file and systemd have it."""
        text = self._read()
        if text is None:
            return service.ServiceReport(state="not installed")
        return service.ServiceReport(
            state=self._state(),
            file=str(self.file),
            text=text,
            home=_home_in_unit(text),
            advice=self._linger_advice(),
        )

    def _state(self) -> str:
        done = self.run("systemctl", "--user", "is-active", UNIT_NAME)
        # `activating`: systemd waits to restart it after a fault.
        return "running" if done.stdout.strip() in ("active", "activating") else "installed"

    def _require_systemd(self) -> None:
        # Fails without a user's bus, as after `su`, or in WSL without systemd.
        done = self.run("systemctl", "--user", "show-environment")
        if done.returncode:
            raise UserError(
                f"systemd does not run services for {self.user} here: {service.last_line(done)}",
                f"Log in as {self.user} directly, not through su or sudo; in WSL set systemd=true "
                f"below [boot] in /etc/wsl.conf. {service.BY_HAND}",
            )

    def _linger_advice(self) -> str:
        """Return how to keep the service running while the user is not logged in."""
        done = self.run("loginctl", "show-user", self.user, "--property=Linger")
        if done.stdout.strip() == "Linger=yes":
            return ""
        return (
            f"It runs while {self.user} is logged in. To run it from the start of this PC on: "
            + posix_command("loginctl", "enable-linger", self.user)
        )

    def _read(self) -> str | None:
        try:
            return self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.file} cannot be read: {error}") from error

    def _undo(self, before: str | None) -> None:
        if before is None:
            self.run("systemctl", "--user", "disable", "--now", UNIT_NAME)
            self._delete()
        else:
            replace_text(self.file, before)
        self.run("systemctl", "--user", "daemon-reload")

    def _delete(self) -> None:
        try:
            self.file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.file} cannot be deleted: {error.strerror}") from error


def _home_in_unit(text: str) -> str:
    begin = f'Environment="{HOME_VARIABLE}='
    for line in text.splitlines():
        if line.startswith(begin) and line.endswith('"'):
            value = line[len(begin) : -1]
            # The reverse of `_quoted`.
            return value.replace("%%", "%").replace('\\"', '"').replace("\\\\", "\\")
    return ""
