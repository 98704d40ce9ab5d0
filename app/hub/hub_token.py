"""Find, store and delete the hub's token on this PC.

It is stored in the keyring of the operating system, or without one in the file of the hub's own
tools (`hf auth login`), which only this user can read. A token that those tools stored is used as
well. The token is never shown or logged, is sent only to the hub and the user's nodes, and is
removed from error messages.
https://huggingface.co/docs/huggingface_hub/package_reference/authentication
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

from agents.contract.hub import read_file
from app.errors import UserError
from app.hub.token_keyring import delete_token, store_token, stored_token

TokenPlace = Literal["none", "kept", "keyring", "environment"]
"""Source of the token; `kept`: the file of the hub's tools; `environment`: HF_TOKEN, which
overrides a stored one."""

PAGE = "https://huggingface.co/settings/tokens"
"""Page on which the user creates tokens."""


def find_token() -> TokenPlace:
    """Return the source of this PC's token; does not contact the hub."""
    return _find()[0]


def describe_place() -> str:
    """Return the location of this PC's token, as part of a sentence; empty: no token."""
    from huggingface_hub import constants

    place, _, keyring = _find()
    if place == "keyring":
        return f"in this PC's keyring ({keyring})"
    if place == "environment":
        return "in the environment variable HF_TOKEN"
    path = Path(constants.HF_TOKEN_PATH)
    return f"in {path}, {_describe_mode(path)}" if place == "kept" else ""


def _describe_mode(path: Path) -> str:
    if os.name != "posix":
        return "a file that only you can read"
    mode = path.stat().st_mode & 0o777
    others = ", which other users of this PC can read" if mode & 0o077 else ""
    return f"mode {mode:04o}{others}"


def _find() -> tuple[TokenPlace, str, str]:
    """Return the source of the token, the token, and the name of its keyring."""
    from huggingface_hub.utils import get_token

    kept = _kept_token()
    token = get_token() or ""
    # The hub's tools prefer HF_TOKEN to their file.
    if token and token != kept:
        return "environment", token, ""
    stored, keyring = stored_token()
    if stored:
        return "keyring", stored, keyring
    return ("kept", token, "") if token else ("none", "", "")


def read_stored_token() -> str:
    """Return the token of this PC; empty: no token."""
    return _find()[1]


def read_token() -> str:
    """Return the token of this PC.

    Raises:
        UserError: this PC has no token.
    """
    token = read_stored_token()
    if not token:
        raise UserError(
            "This PC has no token of the hub",
            f"Make one at {PAGE}, and keep it here in the window's settings",
        )
    return token


def keep_token(token: str) -> str:
    """Validate a token with the hub, store it, and return the name of its owner.

    Raises:
        UserError: the hub does not accept it or cannot be reached; nothing is stored.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.hf_api import whoami

    token = token.strip()
    if not token.startswith("hf_") or len(token) < 10 or len(token.split()) > 1:
        raise UserError("That is no token of the hub", f"They begin with hf_; make one at {PAGE}")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would print advice about git
    try:
        # Validated before it is stored, so that a refused token leaves no trace.
        owner = str(whoami(token)["name"])
        if not store_token(token):
            _write_file(token)
    except HfHubHTTPError as error:
        if getattr(error.response, "status_code", None) == 401:
            raise UserError("The hub does not know this token", f"Make one at {PAGE}") from None
        raise _unreached(error, token) from None
    except (HTTPError, OSError, ValueError) as error:
        raise _unreached(error, token) from None
    return owner


def forget_token() -> None:
    """Delete the token that is stored on this PC; other tokens of the hub's tools stay.

    Raises:
        UserError: no token is stored on this PC.
    """
    from huggingface_hub import constants, logout
    from huggingface_hub.utils import get_stored_tokens

    token = _kept_token()
    if delete_token():
        return
    if not token:
        raise UserError("No token is kept on this PC", "Unset HF_TOKEN to remove one set there.")
    # The active token is a copy: the hub's tools also store it by name in a second file.
    Path(constants.HF_TOKEN_PATH).unlink(missing_ok=True)
    for name in [name for name, stored in get_stored_tokens().items() if stored == token]:
        try:
            logout(name)
        except OSError:
            continue  # raised after the deletion, because HF_TOKEN is also set


def _write_file(token: str) -> None:
    from huggingface_hub import constants, login

    login(token)
    if os.name == "posix":
        Path(constants.HF_TOKEN_PATH).chmod(0o600)


def _kept_token() -> str:
    """Return the token in the file of the hub's own tools; empty: no token."""
    from huggingface_hub import constants

    return read_file(Path(constants.HF_TOKEN_PATH))


def _unreached(error: Exception, token: str) -> UserError:
    lines = str(error).replace(token, "***").strip().splitlines() or [type(error).__name__]
    return UserError(f"The hub could not check the token: {lines[0][:200]}", "Try again later.")
