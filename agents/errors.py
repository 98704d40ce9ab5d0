"""The one error of the agent that is not a bug: the world's fault, said in plain words.

On the wire it becomes a RemoteError of kind `user`; whatever else escapes a handler is a `bug`.
"""

from __future__ import annotations

import errno


class UserError(Exception):
    """The world's fault. `message` says what and where, `hint` what to do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def explain_os_error(error: OSError, doing: str) -> UserError:
    """Return what `error` means for a person, who sees that `doing` could not be done."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"The disk is full: {doing}.", "Free some room on this node and try again")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return UserError(
            f"The agent may not write there: {doing} ({error.strerror}).",
            "Give the user that Rackless logs in as the right to write to that folder",
        )
    return UserError(f"The system refused: {doing} ({error.strerror or error}).")
