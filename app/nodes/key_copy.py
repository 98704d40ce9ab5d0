"""Put our public key into `~/.ssh/authorized_keys` of another PC, as ssh-copy-id does, and undo it.

The password logs in once and is not stored. The key is appended by a script on the standard input
of `sh`, so no login shell has to quote anything; the line is added at most once. Afterwards a
second connection logs in with the key alone; if that fails, the line is removed again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import asyncssh

from agents.shared.files.full_disk import advise_room, name_disk_error, removing_half
from app.errors import LoginRefused, UserError
from app.filelock import locked
from app.nodes.node import SshAddress, with_key_of
from app.nodes.ssh_config import local_user
from app.nodes.transport.login_keys import expand, load_login_keys
from app.nodes.transport.ssh import SshConnection, connect_ssh, connect_with_password
from app.paths import replace_text

RECORD_NAME = "copied_keys.json"


class CopiedKeys:
    """Record of the added lines below one home folder. Reads the file at each call, since another
    process may change it.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / RECORD_NAME

    def find(self, address: SshAddress) -> str | None:
        """Return the line that was added for an account, or None."""
        return self._read().get(_account(address))

    def keep(self, address: SshAddress, line: str) -> None:
        self._change(address, line)

    def forget(self, address: SshAddress) -> None:
        self._change(address, None)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def _change(self, address: SshAddress, line: str | None) -> None:
        try:
            with locked(self._path.with_name(f"{RECORD_NAME}.lock")):
                lines = self._read()
                lines.pop(_account(address), None)
                if line is not None:
                    lines[_account(address)] = line
                replace_text(self._path, json.dumps(lines, indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {name_disk_error(error)}",
                f"{advise_room(error)}, or give yourself write access to that folder",
            ) from error


def _account(address: SshAddress) -> str:
    return f"{address.user}@{address.known_as}"


# ------------------------------------------------------------------------

OWN_KEY_NAME = "id_ed25519"
"""Name of the key that Rackless makes for itself, in its home folder."""
SCRIPT_TIMEOUT_S = 30.0
"""Maximum duration of the script on the other PC, in seconds."""
_BLOB_SAFE = re.compile(r"[^\w.@-]")
# restorecon gives the file back the label that SELinux lets sshd read.
_ADD = r"""
set -e
umask 077
kind='{kind}'
blob='{blob}'
line='{line}'
folder="$HOME/.ssh"
file="$folder/authorized_keys"
[ -d "$folder" ] || mkdir "$folder"
chmod 700 "$folder"
if [ -f "$file" ] && grep -v '^[[:space:]]*#' "$file" | grep -qF -- "$kind $blob"; then
    state=present
else
    if [ -s "$file" ] && [ -n "$(tail -c 1 "$file")" ]; then echo >> "$file"; fi
    printf '%s\n' "$line" >> "$file"
    state=added
fi
chmod 600 "$file"
if command -v restorecon > /dev/null 2>&1; then
    restorecon "$folder" "$file" > /dev/null 2>&1 || :
fi
echo "rackless-key-$state"
"""
# `cat` keeps the owner, the mode and the label of the file, which a rename would replace.
_REMOVE = r"""
set -e
umask 077
line='{line}'
file="$HOME/.ssh/authorized_keys"
if [ -f "$file" ] && grep -qxF -- "$line" "$file"; then
    rest="$file.rackless.$$"
    grep -vxF -- "$line" "$file" > "$rest" || [ $? = 1 ]
    cat "$rest" > "$file"
    rm "$rest"
    echo rackless-key-removed
else
    echo rackless-key-absent
fi
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedKey:
    """A public key that another PC accepts now."""

    address: SshAddress
    """Address of the node, with the key file that it needs."""
    host: SshAddress
    """Account whose authorized_keys has it: the node's, or a jump host's on the route to it."""
    key: str
    """Private key file, or the name of a key in the SSH agent."""
    is_new: bool
    """True if the key was generated just now."""
    was_there: bool
    """True if authorized_keys had the line before."""

    @property
    def account(self) -> str:
        """`user@host:port` of the host."""
        return str(self.host)


async def copy_key(
    address: SshAddress, password: str, *, home: Path, accept_host_key: str | None = None
) -> CopiedKey:
    """Install a key on the first host of the route that refuses all our keys.

    Args:
        address: node to reach.
        password: password of the account that LoginRefused named.
        home: folder of the master.
        accept_host_key: fingerprint that the user has confirmed for that host.

    Raises:
        LoginRefused: the password is wrong, the host takes none, or it still refuses the key.
        UserError: the line cannot be written there, or no key can be made here.
    """
    connection = await connect_with_password(
        address, password, home=home, accept_host_key=accept_host_key
    )
    try:
        if not connection.by_password:
            raise UserError(f"{address} accepts our key already", "Add it without a password")
        host = connection.address
        ours = await _choose_key(host, home)
        # The command runs on the connection of the password; only the check below needs the key.
        state = await _run(connection, _ADD, ours.line)
        host = replace(host, key=ours.named or host.key)
        try:
            await (await connect_ssh(host, home=home)).close()
        except LoginRefused as error:
            if state == "added":
                await _run(connection, _REMOVE, ours.line)
            raise _still_refused(host, ours.name) from error
        if state == "added":
            CopiedKeys(home).keep(host, ours.line)
    finally:
        await connection.close()
    return CopiedKey(
        address=with_key_of(address, host),
        host=host,
        key=ours.name,
        is_new=ours.is_new,
        was_there=state == "present",
    )


async def take_back_key(address: SshAddress, *, home: Path) -> bool:
    """Remove the line that `copy_key` has added for a node; return whether it was still there.

    Raises:
        UserError: no line was added there, or it cannot be reached.
    """
    copied = CopiedKeys(home)
    line = copied.find(address)
    if line is None:
        raise UserError(
            f"Rackless has added no key to {address}",
            "Remove a key by hand in ~/.ssh/authorized_keys on that PC",
        )
    connection = await connect_ssh(address, home=home)
    try:
        state = await _run(connection, _REMOVE, line)
    finally:
        await connection.close()
    copied.forget(address)
    return state == "removed"


@dataclass(frozen=True, kw_only=True, slots=True)
class _OurKey:
    line: str
    """Line for authorized_keys."""
    name: str
    is_new: bool = False
    named: Path | None = None
    """Key file that the address must name; None if it is tried by default."""


async def _choose_key(host: SshAddress, home: Path) -> _OurKey:
    """Return the key to copy: one that can log in by itself, or a new one."""
    keys = await load_login_keys(host)
    try:
        found = [
            _OurKey(line=_line_of(pair.get_algorithm(), pair.public_data), name=name)
            for pair, name in zip(keys.pairs, keys.names, strict=True)
            # A certificate is no line of authorized_keys.
            if b"-cert-" not in bytes(pair.algorithm)
        ]
    finally:
        await keys.close()
    # A file logs in without the agent, which may hold other keys tomorrow.
    found.sort(key=lambda key: key.name.endswith("(from the SSH agent)"))
    return found[0] if found else await asyncio.to_thread(_make_key, host, home)


def _make_key(host: SshAddress, home: Path) -> _OurKey:
    """Make a key where logins find it by default, or in Rackless' own home if that file exists."""
    usual = expand(host.identity_files[0] if host.identity_files else Path("~/.ssh/id_ed25519"))
    own = home / OWN_KEY_NAME
    path, named = (own, own) if usual.exists() else (usual, None)
    if path.exists():
        key, is_new = asyncssh.read_private_key(path), False
    else:
        key, is_new = asyncssh.generate_private_key("ssh-ed25519", comment=_comment()), True
        try:
            _write_key(path, key)
        except OSError as error:
            raise UserError(
                f"No key can be made in {path}: {name_disk_error(error)}",
                f"{advise_room(error)}, give yourself write access to that folder, or name a key: "
                "--key FILE",
            ) from error
    line = _line_of(key.get_algorithm(), key.public_data)
    return _OurKey(line=line, name=str(path), is_new=is_new, named=named)


def _write_key(path: Path, key: asyncssh.SSHKey) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    public = path.with_name(f"{path.name}.pub")
    for place, data, mode in (
        (path, key.export_private_key("openssh"), 0o600),
        (public, key.export_public_key("openssh"), 0o644),
    ):
        # The mode is set when the file is created: a later chmod would leave it readable for a
        # moment.
        with removing_half(place):
            handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(handle, "wb") as file:
                file.write(data)


def _line_of(algorithm: str, public_data: bytes) -> str:
    blob = base64.b64encode(public_data).decode("ascii")
    # rsa-sha2-512 is a signature scheme; the key itself is of type ssh-rsa.
    kind = "ssh-rsa" if "rsa" in algorithm else algorithm
    return f"{kind} {blob} {_comment()}"


def _comment() -> str:
    return _BLOB_SAFE.sub("-", f"{local_user() or 'user'}@{socket.gethostname()}")


async def _run(connection: SshConnection, script: str, line: str) -> str:
    """Run a script for one line on the other PC and return the state that it prints.

    Raises:
        UserError: the script failed.
    """
    kind, blob, _ = line.split()
    text = script.replace("{kind}", kind).replace("{blob}", blob).replace("{line}", line)
    process = await connection.open(["sh"])
    try:
        async with asyncio.timeout(SCRIPT_TIMEOUT_S):
            await process.write(text.encode("ascii"))
            process.write_eof()
            said = b""
            while data := await process.read():
                # Only the end is kept: a login script may print without limit.
                said = (said + data)[-4096:]
            await process.wait()
    except (TimeoutError, BrokenPipeError):
        said = b""
    finally:
        with contextlib.suppress(UserError):
            await process.close()
    found = re.search(rb"rackless-key-(\w+)", said)
    if found is None:
        reason = process.stderr_text() or "its login shell ran no command"
        raise UserError(
            f"~/.ssh/authorized_keys of {connection.address} cannot be changed: {reason}",
            "Log in there and check that the home folder can be written: ls -ld ~ ~/.ssh",
        )
    return found[1].decode("ascii")


def _still_refused(host: SshAddress, name: str) -> LoginRefused:
    return LoginRefused(
        f"{host} refuses the key {name} even though it was added to ~/.ssh/authorized_keys there; "
        "it was removed again",
        "Its sshd may look elsewhere (AuthorizedKeysFile, PubkeyAuthentication), or the home "
        "folder may be writable for others: chmod go-w ~",
    )
