"""The agent's error for faults outside our code, with a message for the user.

On the wire it becomes a RemoteError of kind `user`, which the app raises as its own UserError. Any
other exception that escapes a handler is sent as a `bug`, with its traceback.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from agents.shared.files.folder_files import ForeignFile
from agents.shared.files.full_disk import describe_full
from agents.shared.files.secrets import hide_secrets


class ExpectedError(Exception):
    """A failure outside our control. `message` says what and where, `hint` what to do next."""

    topic: str = ""
    """Section of the troubleshooting page, or an empty string."""

    def __init__(self, message: str, hint: str = "", *, topic: str = "") -> None:
        # Errors are sent, logged and kept in journals, and may quote output of libraries.
        message, hint = hide_secrets(message), hide_secrets(hint)
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.topic = topic or self.topic


class Diverged(ExpectedError):
    """A training whose loss or gradients are no longer finite."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text without a full stop, or the name of its class.

    >>> first_line(ValueError("No such layer.\\nIn layer 3")), first_line(MemoryError())
    ('No such layer', 'MemoryError')
    """
    return str(error).strip().split("\n", 1)[0][:300].rstrip(".") or type(error).__name__


def explain_os_error(error: OSError, doing: str, place: Path | None = None) -> ExpectedError:
    """Return an error of the system as a message for the user.

    Args:
        error: error to explain.
        doing: the interrupted operation.
        place: path on the disk; None: the error names it, if it created a file.
    """
    if isinstance(error, ForeignFile):
        return ExpectedError(f"{error.message}.", error.hint)
    # To the user, an exceeded quota looks like a full disk and has the same remedy.
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = place or Path(error.filename if isinstance(error.filename, str) else os.devnull)
        lack, advice = describe_full(where, "on this node")
        return ExpectedError(f"{lack}: {doing}.", f"{advice} and try again", topic="disk-full")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ExpectedError(
            f"The agent has no permission to write: {doing} ({error.strerror}).",
            "Give the user that Rackless logs in as write access to that folder",
        )
    return ExpectedError(f"The system refused: {doing} ({error.strerror or error}).")
