"""Store the host keys that the user has confirmed, in a file of our own.

The file has one line per host and port, `[host]:port type base64`, as OpenSSH writes them, so that
the user can read and compare them; `~/.ssh/known_hosts` is neither read nor written. The port is
always part of the name: Windows and a WSL distro share one address and differ in port and key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import asyncssh

from agents.shared.files.full_disk import advise_room, name_disk_error
from app.errors import UserError
from app.filelock import locked
from app.nodes.node import SshAddress
from app.paths import replace_file
from app.shell_words import command_here

FILE_NAME = "known_hosts"


class HostKeys:
    """Confirmed keys below one home folder. Reads the file at each call, since another process may
    change it.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    def find(self, address: SshAddress) -> asyncssh.SSHKey | None:
        """Return the confirmed key of `address`, or None.

        Raises:
            UserError: the file cannot be read, or a line of it is damaged.
        """
        name = address.known_as
        for number, line in enumerate(self._lines(), 1):
            host, _, key = line.partition(" ")
            if host == name:
                return self._parse(key, number)
        return None

    def confirm(self, address: SshAddress, key: asyncssh.SSHKey) -> None:
        """Store `key` as the only key of `address`."""
        public = key.export_public_key("openssh").decode("ascii").split()
        line = " ".join((address.known_as, *public[:2]))
        self._rewrite(lambda lines: [*_without(lines, address), line])

    def forget(self, address: SshAddress) -> None:
        """Remove the key of `address`, if there is one."""
        if any(line.startswith(address.known_as + " ") for line in self._lines()):
            self._rewrite(lambda lines: _without(lines, address))

    def _lines(self) -> list[str]:
        try:
            return self._path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"The confirmed host keys in {self._path} cannot be read: {error}",
                f"Give yourself access to it: {command_here('chmod', '600', self._path)}",
            ) from error

    def _parse(self, key: str, number: int) -> asyncssh.SSHKey:
        try:
            return asyncssh.import_public_key(key)
        except asyncssh.KeyImportError as error:
            raise UserError(
                f"Line {number} of {self._path} is damaged: {error}",
                "Remove that line and add the node again; its key will be shown for comparison",
            ) from error

    def _rewrite(self, change: Callable[[list[str]], list[str]]) -> None:
        # A new file, renamed under a lock: neither a crash nor a second master loses a line.
        temporary = self._path.with_name(f".{FILE_NAME}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._path.with_name(f"{FILE_NAME}.lock")):
                # Read again under the lock: another master may have changed the file meanwhile.
                _write_durably(temporary, "".join(f"{x}\n" for x in change(self._lines())))
                replace_file(temporary, self._path)
        except OSError as error:
            raise UserError(
                f"The host key cannot be stored in {self._path}: {name_disk_error(error)}",
                f"{advise_room(error)}, or give yourself write access to that folder",
            ) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def fingerprint_of(key: asyncssh.SSHKey) -> str:
    """Return the fingerprint as `ssh-keygen -l` shows it, such as `SHA256:mVPw...`."""
    return str(key.get_fingerprint("sha256"))


def _without(lines: list[str], address: SshAddress) -> list[str]:
    # With the space, or port 22 would match port 2222 as well.
    return [line for line in lines if not line.startswith(address.known_as + " ")]


def _write_durably(path: Path, text: str) -> None:
    # O_EXCL: a link that another user placed under this name is not followed.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
