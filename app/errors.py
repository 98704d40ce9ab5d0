"""The errors of Rackless, by whose fault they are.

    RacklessError
     +-- UserError            the world's fault: shown as what / where / what to do next
     |    +-- UsageError      the command or the file was written wrongly (exit code 2)
     |    +-- NodeUnreachable no connection, or it was lost during a request
     |    |    +-- NodeNotReady   connected, but the agent could not be started there
     |    |    +-- BadAnswer      an answer that violates the protocol; also an AgentBug
     |    +-- HostKeyUnknown  first contact: the user has to confirm the fingerprint
     |    +-- HostKeyChanged  the key is not the confirmed one: a hard stop
     |    +-- PcCloned        another PC has its machine id and host key
     |    +-- RunsPrograms    the SSH configuration runs a program, which the user has to allow
     |    +-- UnshippedLock   the user has to allow a build of torch without shipped hashes
     |    +-- LoginRefused    the node answers, but accepts no key of this PC
     |    +-- AdminRefused    a node's sudo refused the password, or allows nothing
     |    +-- NotAvailableYet a command of a later version
     |    +-- LockHeld        another process of this PC keeps a file locked
     |    +-- StoreLost       the database was damaged, moved or deleted while it was in use
     |    +-- LeftOutRows     many rows would be left out: the user has to accept it
     |    +-- RunStopped      the user stopped the run while a process launched or exported it
     |    +-- Interrupted     ended by Ctrl-C or a signal (exit code 130)
     +-- AgentBug             our fault on the node; carries the remote traceback

Any other exception that escapes is a bug: the window shows it once with "copy report".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar, Final

from agents.shared.files.secrets import hide_secrets


class RacklessError(Exception):
    """Root of every error that Rackless raises on purpose."""

    code: ClassVar[str] = "fault"
    """Stable name of the kind of error, printed by `--json` for programs."""


class UserError(RacklessError):
    """Raised for a fault of the world: `message` says what and where, `hint` what to do next."""

    code = "refused"
    exit_code = 1
    topic: str = ""
    """Section of the troubleshooting page with the background, if any."""

    def __init__(self, message: str, hint: str = "", *, where: str = "", topic: str = "") -> None:
        # Errors are shown, logged and stored, and may quote texts that contain a token.
        message, hint = hide_secrets(message), hide_secrets(hint)
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where
        """File, node or run that it concerns, for programs; empty: the command itself."""
        self.topic = topic or self.topic

    def reword(self, message: str, hint: str) -> None:
        """Replace the texts by those of a caller that knows more."""
        self.message, self.hint = hide_secrets(message), hide_secrets(hint)
        self.args = (self.message,)


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Set `where` in errors of the block that do not name a file, node or run themselves."""
    try:
        yield
    except UserError as error:
        error.where = error.where or where
        raise


def describe_error(error: RacklessError) -> str:
    """Return message and hint in one text.

    >>> describe_error(UserError("the disk is full", "Free some room."))
    'the disk is full. Free some room.'
    """
    message, hint = str(error), error.hint if isinstance(error, UserError) else ""
    # Messages have no full stop, unless they consist of several sentences.
    is_open = hint and not message.endswith((".", "!", "?", ":"))
    return f"{message}{'.' * bool(is_open)} {hint}".strip()


class UsageError(UserError):
    """Raised when a command line or a run file is not valid."""

    code = "usage"
    exit_code = 2


class NodeUnreachable(UserError):
    """Raised when a node cannot be reached, or the connection breaks before an answer."""

    code = topic = "node-unreachable"


class NodeNotReady(NodeUnreachable):
    """Raised when a node answers over SSH but the agent cannot be started there."""

    code = topic = "node-not-ready"


class HostKeyUnknown(UserError):
    """Raised at first contact: the caller shows `fingerprint`, asks the user, and retries."""

    code = topic = "host-key-unknown"

    def __init__(self, host: str, fingerprint: str) -> None:
        super().__init__(
            f"{host} shows the host key {fingerprint}, which is not confirmed yet.",
            "Compare it with the output of "
            "'ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub' on that PC, "
            f"then add --accept-host-key {fingerprint}",
            where=host,
        )
        self.host = host
        self.fingerprint = fingerprint


class HostKeyChanged(UserError):
    """Raised when a node shows another host key than the confirmed one."""

    code = topic = "host-key-changed"

    def __init__(self, host: str, expected: str, shown: str) -> None:
        super().__init__(
            f"{host} shows the host key {shown}, but {expected} was confirmed. "
            "Either that PC was reinstalled, or someone is intercepting the connection.",
            "If you know why it changed, remove the node and add it again: "
            "rackless nodes remove NAME, then rackless nodes add NAME",
            where=host,
        )
        self.host = host
        self.expected = expected
        self.shown = shown


class PcCloned(UserError):
    """Raised when two PCs that answer at once have one machine id and one host key."""

    code, topic = "pc-cloned", "machine-id"


class RunsPrograms(UserError):
    """Raised when ~/.ssh/config runs a program: the caller shows `command`, asks, and retries."""

    code = "runs-programs"

    def __init__(self, command: str) -> None:
        super().__init__(
            f"Your SSH configuration runs a program for this host: {command}",
            "If that is yours, add --run-ssh-config; it then runs as 'ssh' would run it",
        )
        self.command = command


class UnshippedLock(UserError):
    """Raised when a node's build of torch is not locked yet: the caller asks and retries."""

    code = topic = "unshipped-lock"

    def __init__(self, node: str, build: str, index: str) -> None:
        self.build = build
        self.question = f"Lock the build {build} of torch by the hashes that {index} names today?"
        self.advice = "Cards from RTX 20 on need no such build once their driver is 580 or newer"
        """Alternative to a yes, shown with the question."""
        super().__init__(
            f"The GPUs of {node} need the build {build} of torch, whose hashes Rackless does not "
            f"ship: they would be those that {index} names today. A file that changes later is "
            "refused, on every node",
            f"If you trust that index: rackless nodes setup {node} --accept-index. {self.advice}",
            where=node,
        )


class LoginRefused(UserError):
    """Raised when there is no usable key, or the node accepts no key."""

    code = topic = "login-refused"

    def __init__(self, message: str, hint: str = "", *, account: str = "") -> None:
        super().__init__(message, hint)
        self.account = account
        """Account `user@host:port` whose password would be accepted; empty: no password helps."""


class AdminRefused(UserError):
    """Raised when a repair on a node needs administrator rights and does not get them."""

    code = "admin-refused"

    def __init__(self, message: str, hint: str = "", *, where: str = "", again: bool) -> None:
        super().__init__(message, hint, where=where)
        self.again = again
        """True if another password may help."""


REFUSALS: Final = (HostKeyUnknown, HostKeyChanged, LoginRefused)
"""Errors before an agent could be asked, which say nothing about the node's runs."""


class NotAvailableYet(UserError):
    """Raised by commands that a later version implements."""

    code = "not-available-yet"


class LockHeld(UserError):
    """Raised when another process of this PC, which the message names, keeps a file locked."""

    code = topic = "lock-held"


class StoreLost(UserError):
    """Raised when the database is not the file any more that this process has opened."""

    code = topic = "store-lost"


class RunStopped(UserError):
    """Raised in a process that launches or exports a run, once the user has stopped the run."""

    code = topic = "run-stopped"


class LeftOutRows(UserError):
    """Raised when a run would start without many of its rows: the caller asks and retries."""

    code = "left-out-rows"

    def __init__(self, message: str, hint: str, offer: str) -> None:
        super().__init__(message, hint)
        self.offer = offer
        """Label of the button that starts without them."""


class Interrupted(UserError):
    """Raised when the user or the system ended a command that has cleaned up."""

    code = "interrupted"
    exit_code = 130


class AgentBug(RacklessError):
    """Raised when the agent answers with an internal error."""

    code = "agent-fault"

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(hide_secrets(message))
        self.traceback = hide_secrets(traceback)


class BadAnswer(NodeUnreachable, AgentBug):
    """Raised for an answer that violates the protocol; it counts like no answer.

    Its cause may be a bug or a malicious node; in either case no part of it is used.
    """

    code = topic = "node-answers-wrongly"
