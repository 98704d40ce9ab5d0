"""The one error of the agent that is not a bug: a fault outside our code, in plain words.

On the wire it becomes a RemoteError of kind `user`, which the app raises as its own UserError.
Any other exception that escapes a handler is sent as a `bug`, with its traceback.
"""

from __future__ import annotations

import errno

from agents.shared.files.folder_files import ForeignFile
from agents.shared.files.secrets import hide_secrets


class ExpectedError(Exception):
    """A failure outside our control. `message` says what and where, `hint` what to do next."""

    topic: str = ""
    """Section of the troubleshooting page with the background; empty: there is none."""

    def __init__(self, message: str, hint: str = "", *, topic: str = "") -> None:
        # Errors are sent, logged and kept in journals, and quote what libraries wrote.
        message, hint = hide_secrets(message), hide_secrets(hint)
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.topic = topic or self.topic


class Diverged(ExpectedError):
    """A training whose loss or gradients are no longer finite."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without a full stop, or its kind.

    >>> first_line(ValueError("No such layer.\\nIn layer 3")), first_line(MemoryError())
    ('No such layer', 'MemoryError')
    """
    return str(error).strip().split("\n", 1)[0][:300].rstrip(".") or type(error).__name__


def explain_os_error(error: OSError, doing: str) -> ExpectedError:
    """Return `error` in plain words; `doing` names the operation that it interrupted."""
    if isinstance(error, ForeignFile):
        return ExpectedError(f"{error.message}.", error.hint)
    # A quota that is used up looks like a full disk to the user, and is mended in the same way.
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ExpectedError(
            f"The disk is full: {doing}.",
            "Free some space on this node and try again",
            topic="disk-full",
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ExpectedError(
            f"The agent has no permission to write: {doing} ({error.strerror}).",
            "Allow the user that Rackless logs in as to write to that folder",
        )
    return ExpectedError(f"The system refused: {doing} ({error.strerror or error}).")
