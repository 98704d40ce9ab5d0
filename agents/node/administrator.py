"""Run commands with administrator rights: as root or through sudo.

The password arrives on this process's stdin and is passed only to sudo's stdin, never in an
argument, the environment, a file or a message. With `-k`, sudo ignores cached credentials, so it
reads the password each time and never leaves it for the command to read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence

from agents.children import Children
from agents.contract.repair import AdminWay
from agents.errors import ExpectedError
from agents.shared.files.secrets import HIDDEN, hide_secrets

# sudo uses these folders itself; the PATH of root or of a user may lack them.
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ASK_S = 30.0
# Time for a command to end after SIGTERM before it is killed, in seconds.
_KILL_S = 5.0
# Extra time for sudo itself, in seconds: it may look up users on other PCs.
_SPARE_S = 30.0
# Exit code of `timeout` after it ended the command.
_TIMED_OUT = 124
# sudo has no exit codes for these refusals; the locale is set to English below.
_REFUSALS = ("not in the sudoers", "not allowed to", "may not run sudo", "I'm sorry")


class NoAdmin(ExpectedError):
    """Raised when administrator rights are required and not available."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again
        """True if another password may help."""


class Administrator:
    """Runner of commands as root; `password` is passed to sudo."""

    def __init__(self, children: Children, password: bytes = b"") -> None:
        self._children = children
        self._password = password
        self.way: AdminWay = self._find_way()
        """Method that works on this node."""

    def require(self) -> None:
        """Ensure that commands can be run as root.

        Raises:
            NoAdmin: sudo is missing, does not permit it, or refuses the password.
        """
        if self.way == "none":
            raise NoAdmin("There is no sudo on this node, and Rackless does not log in as root.")
        if self.way != "password":
            return
        try:
            code, lines = self.run(["true"], as_root=True, timeout_s=_ASK_S)
        except TimeoutError as error:
            raise NoAdmin("sudo on this node does not answer.") from error
        said = " ".join(lines)
        if code == 0:
            return
        if any(words in said for words in _REFUSALS):
            raise NoAdmin("The user that Rackless logs in as may not use sudo on this node.")
        raise NoAdmin("sudo on this node did not take the password.", again=True)

    def run(
        self,
        argv: Sequence[str],
        *,
        as_root: bool,
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
    ) -> tuple[int, list[str]]:
        """Run a command to its end; return its exit code and the last lines of its output.

        The lines may contain secrets: use `clean` before they are shown or stored.

        Raises:
            ExpectedError: the command cannot be started.
            TimeoutError: it ran longer than `timeout_s`.
        """
        if not as_root or self.way == "root":
            return self._start(argv, timeout_s, on_line, subprocess.DEVNULL)
        # `timeout` runs as root, because this process may not signal a process of root.
        limited = ["timeout", "-k", f"{_KILL_S:g}", f"{timeout_s:g}", *argv]
        if self.way != "password":
            code, lines = self._start(
                ["sudo", "-k", "-n", *limited], timeout_s + _SPARE_S, on_line, subprocess.DEVNULL
            )
        else:
            code, lines = self._with_password(limited, timeout_s + _SPARE_S, on_line)
        if code == _TIMED_OUT:
            raise TimeoutError(f"no end after {timeout_s:g} s")
        return code, lines

    def _with_password(
        self, argv: Sequence[str], timeout_s: float, on_line: Callable[[str], None] | None
    ) -> tuple[int, list[str]]:
        # A pipe buffers the password, so that the write does not wait for sudo to read it.
        ours, theirs = os.pipe()
        try:
            os.write(theirs, self._password + b"\n")
            os.close(theirs)
            return self._start(["sudo", "-k", "-S", "-p", "", *argv], timeout_s, on_line, ours)
        finally:
            os.close(ours)

    def _start(
        self,
        argv: Sequence[str],
        timeout_s: float,
        on_line: Callable[[str], None] | None,
        stdin: int,
    ) -> tuple[int, list[str]]:
        path = f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
        return self._children.run(
            argv,
            # The messages of sudo are parsed, so they must not be translated.
            environ={"PATH": path, "LC_ALL": "C.UTF-8", "LANGUAGE": "C"},
            timeout_s=timeout_s,
            on_line=on_line,
            stdin=stdin,
        )

    def clean(self, text: str) -> str:
        """Return output with the password and other secrets removed."""
        word = self._password.decode("utf-8", "replace")
        return hide_secrets(text.replace(word, HIDDEN) if word else text)

    def _find_way(self) -> AdminWay:
        if os.geteuid() == 0:
            return "root"
        if shutil.which("sudo") is None:
            return "none"
        try:
            code, _ = self._start(
                ["sudo", "-k", "-n", "timeout", f"{_ASK_S:g}", "true"],
                _ASK_S + _SPARE_S,
                None,
                subprocess.DEVNULL,
            )
        except TimeoutError:
            return "none"  # it waits for something other than a password
        return "passwordless" if code == 0 else "password"
