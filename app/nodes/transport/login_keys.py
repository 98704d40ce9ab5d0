"""Collect the private keys to log in with, and their names for messages.

A key file that the user names is the only one used. Otherwise the SSH agent's keys come first, then
the files of `~/.ssh/config`, else the default files in `~/.ssh`. There is no passphrase prompt: a
locked key works if the agent holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from agents.shared.files.folder_files import require_regular
from app.errors import LoginRefused
from app.nodes.node import SshAddress
from app.shell_words import command_here

DEFAULT_KEY_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")
_WINDOWS_AGENT = r"\\.\pipe\openssh-ssh-agent"
# An SSH agent may wait for a hardware key; the login continues without it after this many seconds.
_AGENT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class LoginKeys:
    """Keys for one login; call `close` when the login is over."""

    pairs: list[asyncssh.SSHKeyPair] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Name of each pair, such as `~/.ssh/id_ed25519` or `anna@pc (from the SSH agent)`."""
    locked: list[str] = field(default_factory=list)
    """Default key files that are skipped because they need a passphrase."""
    agent: asyncssh.SSHAgentClient | None = None

    async def close(self) -> None:
        if self.agent is not None:
            self.agent.close()
            await self.agent.wait_closed()


async def load_login_keys(address: SshAddress) -> LoginKeys:
    """Return the keys to try, best first.

    Raises:
        LoginRefused: the named file is missing, unreadable, locked, or not a private key.
    """
    keys = LoginKeys()
    await _ask_agent(keys, address.agent)
    if address.key is not None:
        await _use_only(keys, expand(address.key))
        return keys
    files = address.identity_files or tuple(Path("~/.ssh", name) for name in DEFAULT_KEY_NAMES)
    files = tuple(map(expand, files))
    if address.identity_files or address.only_identity_files:
        # A server allows few tries, so the keys of these files come before the agent's others.
        await asyncio.to_thread(_sort, keys, files, address.only_identity_files)
    for path in files:
        await _add_default(keys, path)
    return keys


def _sort(keys: LoginKeys, files: Sequence[Path], is_limited: bool) -> None:
    """Put the agent's keys of these files first; if `is_limited`, drop all others."""
    wanted = {data for data in map(_public_data, files) if data is not None}
    held = list(zip(keys.pairs, keys.names, strict=True))
    first = [one for one in held if one[0].public_data in wanted]
    rest = [] if is_limited else [one for one in held if one[0].public_data not in wanted]
    keys.pairs = [pair for pair, _ in first + rest]
    keys.names = [name for _, name in first + rest]


def expand(path: Path) -> Path:
    """Return the path with the home folder in place of a leading `~`."""
    return Path(os.path.expanduser(path))


async def _ask_agent(keys: LoginKeys, agent_socket: str | None) -> None:
    if agent_socket == "none":
        return
    path = agent_socket or os.environ.get("SSH_AUTH_SOCK", "")
    if sys.platform == "win32":
        # An MSYS path in SSH_AUTH_SOCK cannot be opened from Windows Python.
        path = path if path.startswith("\\\\") else _WINDOWS_AGENT
    if not path:
        return
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        agent = await asyncio.wait_for(asyncssh.connect_agent(path), _AGENT_TIMEOUT_S)
        keys.agent = agent
        pairs = await asyncio.wait_for(agent.get_keys(), _AGENT_TIMEOUT_S)
        keys.pairs += pairs
        keys.names += [f"{_comment_of(pair)} (from the SSH agent)" for pair in pairs]


async def _use_only(keys: LoginKeys, path: Path) -> None:
    from_agent = list(keys.pairs)
    keys.pairs, keys.names = [], [str(path)]
    try:
        keys.pairs = await asyncio.to_thread(_load, path)
    except OSError as error:
        raise LoginRefused(
            f"The key file {path} cannot be read: {error.strerror or error}",
            "Name the private key with --key, or make a new one: "
            + command_here("ssh-keygen", "-t", "ed25519", "-f", path)
            if isinstance(error, FileNotFoundError)
            else f"Give yourself access to it: {command_here('chmod', '600', path)}",
        ) from error
    except asyncssh.KeyImportError as error:
        # The agent may hold the same key unlocked; the .pub file next to it identifies the key.
        keys.pairs = [pair for pair in from_agent if pair.public_data == _public_data(path)]
        if not keys.pairs:
            raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> LoginRefused:
    if _is_locked(error):
        return LoginRefused(
            f"The key file {path} is locked with a passphrase, and no SSH agent holds it",
            f"Unlock it once for this login session: {command_here('ssh-add', path)}",
        )
    if path.suffix == ".pub":
        return LoginRefused(
            f"{path} is a public key; logging in needs the private one",
            f"Name the file without .pub: {command_here('--key', path.with_suffix(''))}",
        )
    return LoginRefused(
        f"{path} is not a private key that can be used: {error}",
        "Make a new one: "
        + command_here("ssh-keygen", "-t", "ed25519", "-f", path.with_name("id_rackless")),
    )


async def _add_default(keys: LoginKeys, path: Path) -> None:
    held = {pair.public_data for pair in keys.pairs}
    try:
        pairs = await asyncio.to_thread(_load, path)
    except OSError:
        return
    except asyncssh.KeyImportError as error:
        # A locked key is no error here: the agent may hold it, or another key may be accepted.
        if _is_locked(error) and _public_data(path) not in held:
            keys.locked.append(str(path))
        return
    new = [pair for pair in pairs if pair.public_data not in held]
    keys.pairs += new
    keys.names += [str(path)] * len(new)


def _load(path: Path) -> list[asyncssh.SSHKeyPair]:
    require_regular(path)
    try:
        return list(asyncssh.load_keypairs(str(path)))
    except asyncssh.KeyEncryptionError as error:
        raise asyncssh.KeyImportError(f"Passphrase: {error}") from error


def _is_locked(error: Exception) -> bool:
    return "passphrase" in str(error).lower()


def _public_data(path: Path) -> bytes | None:
    # IdentityFile may name the public file of a key that only the agent has.
    public = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    with contextlib.suppress(OSError, asyncssh.KeyImportError):
        require_regular(public)
        return bytes(asyncssh.read_public_key(public).public_data)
    return None


def _comment_of(pair: asyncssh.SSHKeyPair) -> str:
    with contextlib.suppress(UnicodeDecodeError):
        comment = str(pair.get_comment()).strip()
        if comment:
            return comment
    return str(pair.get_algorithm())
