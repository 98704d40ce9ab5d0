"""The hub's token in the keyring of the operating system, if one runs.

GNOME Keyring and KWallet (by the Secret Service), the Keychain of macOS and the Credential Manager
of Windows encrypt it with the user's login. Other backends of the `keyring` package are refused,
since some store plain text and some store nothing. A keyring may wait for the user to unlock it, or
its bus may hang, so each call has a time limit, after which the keyring counts as absent.
https://keyring.readthedocs.io
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from app.errors import UserError
from app.paths import default_home, open_private, private_folder

SERVICE, ACCOUNT = "rackless", "huggingface.co"
READ_S = 3.0
"""Maximum wait for an answer without the user, in seconds."""
UNLOCK_S = 60.0
"""Maximum wait for the user to unlock the keyring, in seconds."""
_BACKENDS = {
    "keyring.backends.SecretService": "GNOME Keyring or another Secret Service",
    "keyring.backends.libsecret": "GNOME Keyring or another Secret Service",
    "keyring.backends.kwallet": "KWallet",
    "keyring.backends.macOS": "Keychain",
    "keyring.backends.Windows": "Windows Credential Manager",
}
T = TypeVar("T")


class TokenKeyring:
    """One backend of the operating system."""

    def __init__(self, backend: Any, name: str) -> None:
        self._backend = backend
        self.name = name

    def read(self) -> str:
        """Return the token; empty: no token, or the keyring stays locked."""
        return _within(READ_S, lambda: self._backend.get_password(SERVICE, ACCOUNT)) or ""

    def write(self, token: str) -> bool:
        """Store the token; return whether it can be read back."""

        def store() -> bool:
            self._backend.set_password(SERVICE, ACCOUNT, token)
            return bool(self._backend.get_password(SERVICE, ACCOUNT) == token)

        return bool(_within(UNLOCK_S, store))

    def delete(self) -> None:
        """Delete the token.

        Raises:
            UserError: the keyring still has it.
        """
        _within(UNLOCK_S, lambda: self._backend.delete_password(SERVICE, ACCOUNT))
        if self.read():
            raise UserError(
                f"{self.name} did not delete the token",
                f"Unlock it and try again, or delete the entry '{SERVICE}' there.",
            )


def _mark(home: Path) -> Path:
    """Return the marker file that exists if the keyring has a token."""
    # It saves asking the keyring, which is slow, if no token was stored.
    return home / "token-in-keyring"


def store_token(token: str) -> bool:
    """Store a token in the keyring; return False if no keyring accepts it."""
    keyring = find_keyring()
    if keyring is None or not keyring.write(token):
        return False
    open_private(_mark(private_folder(default_home())), "w").close()
    return True


def stored_token(home: Path | None = None) -> tuple[str, str]:
    """Return the token in the keyring and the keyring's name; both empty: no token."""
    if not _mark(home or default_home()).exists():
        return "", ""
    keyring = find_keyring()
    token = keyring.read() if keyring is not None else ""
    return (token, keyring.name) if keyring is not None and token else ("", "")


def delete_token() -> bool:
    """Delete the token from the keyring; return whether there was one.

    Raises:
        UserError: the keyring still has it, or is locked.
    """
    if not _mark(default_home()).exists():
        return False
    keyring = find_keyring()
    if keyring is None or not keyring.read():
        raise UserError(
            "The token is in the keyring of this PC, which cannot be read now",
            f"Unlock the keyring and try again, or delete the entry '{SERVICE}' there.",
        )
    keyring.delete()
    _mark(default_home()).unlink(missing_ok=True)
    return True


def environ_with_token(home: Path) -> dict[str, str]:
    """Return the environment for programs on this PC that download from the hub themselves."""
    # Such programs read a token from a file or HF_TOKEN, never from a keyring.
    environ: Mapping[str, str] = os.environ
    if environ.get("HF_TOKEN"):
        return dict(environ)
    token, _ = stored_token(home)
    return {**environ, "HF_TOKEN": token} if token else dict(environ)


def find_keyring() -> TokenKeyring | None:
    """Return the keyring of the operating system, or None if it is absent or does not answer."""
    return _within(READ_S, _find)


def _find() -> TokenKeyring | None:
    # Imported on use, since the package searches all backends, which is slow.
    keyring: Any = importlib.import_module("keyring")
    backend: Any = keyring.get_keyring()
    # The default backend is a chain of all usable ones, the best first.
    for candidate in getattr(backend, "backends", None) or (backend,):
        name = _BACKENDS.get(type(candidate).__module__)
        if name is not None:
            return TokenKeyring(candidate, name)
    return None


def _within(limit_s: float, call: Callable[[], T]) -> T | None:
    """Return the result of a call, or None if it fails or does not return in time."""
    results: list[T] = []

    def run() -> None:
        # Backends raise many kinds of errors: from D-Bus, C libraries or a missing package.
        with contextlib.suppress(Exception):
            results.append(call())

    # A daemon thread, since a hanging call cannot be ended and must not keep the program alive.
    thread = threading.Thread(target=run, daemon=True, name="keyring")
    thread.start()
    thread.join(limit_s)
    return results[0] if results else None
