"""A PC that lets in a password, or the keys of its authorized_keys: an SSH server without agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import asyncssh

from app.core.action import Action, Report, Result
from app.core.new_nodes import AddNode
from app.core.state import CoreState
from app.events import NodeSnapshot
from app.nodes.node import SshAddress
from app.nodes.transport.host_keys import fingerprint_of
from app.nodes.transport.ssh import connect_ssh
from app.paths import Paths
from tests.fakes.core import make_node

PASSWORD = "correct horse"


class _Pc(asyncssh.SSHServer):  # type: ignore[misc]
    """A PC that takes a password or the keys of its authorized_keys, as sshd does."""

    def __init__(self, pc: Path, ways: str, tries: list[str]) -> None:
        self._pc, self._ways, self._tries = pc, ways, tries

    def connection_requested(self, *way: object) -> bool:
        return True  # a jump host, too

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        path = self._pc / ".ssh" / "authorized_keys"
        known = path.read_text() if path.exists() and "deaf" not in self._ways else ""
        return key.export_public_key().decode().split()[1] in known

    def password_auth_supported(self) -> bool:
        return "password" in self._ways

    def validate_password(self, username: str, password: str) -> bool:
        self._tries.append(password)
        return password == PASSWORD

    def kbdint_auth_supported(self) -> bool:
        return "questions" in self._ways

    def get_kbdint_challenge(
        self, username: str, lang: str, submethods: str
    ) -> tuple[str, str, str, list[tuple[str, bool]]]:
        extra = [("Code: ", False)] if "two" in self._ways else []
        return "", "", "", [("Passwort: ", False), *extra]

    def validate_kbdint_response(self, username: str, responses: list[str]) -> bool:
        self._tries.extend(responses)
        return responses == [PASSWORD]


async def _serve_command(process: asyncssh.SSHServerProcess, pc: Path) -> None:
    """Run the command as sshd does: by a login shell, in the home of that PC."""
    child = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", process.command or ""),
        env={"HOME": str(pc), "PATH": f"{pc}/bin:{os.environ['PATH']}"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await child.communicate(await process.stdin.read())
    process.stdout.write(out)
    process.stderr.write(error)
    process.exit(child.returncode or 0)


@contextlib.asynccontextmanager
async def pc_with(
    folder: Path, ways: str = "password", most: int = 1
) -> AsyncIterator[tuple[SshAddress, str]]:
    """A PC whose home is `folder/pc`: its address and fingerprint."""
    (folder / "pc").mkdir(parents=True, exist_ok=True)
    tries: list[str] = []
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        config=None,
        server_factory=lambda: _Pc(folder / "pc", ways, tries),
        process_factory=lambda process: _serve_command(process, folder / "pc"),
        server_host_keys=[host_key],
        encoding=None,
    )
    async with server:
        address = SshAddress(host="127.0.0.1", port=server.get_port(), user="anna")
        yield address, fingerprint_of(host_key)
    assert len(tries) <= most, "a password was sent twice for one login"


class LoginCore:
    """Core over real SSH servers that need no agent, once `log_in` is `AddNode.perform`."""

    def __init__(self, home: Path) -> None:
        self.services = SimpleNamespace(paths=Paths(home))
        self.hosts_with_key: dict[str, SshAddress] = {}

    async def do(self, action: Action[Result], report: Report | None = None) -> Result:
        return await action.perform(cast(CoreState, self), report or (lambda event: None))


async def log_in(self: AddNode, core: CoreState, report: Report) -> NodeSnapshot:
    home, accepted = core.services.paths.home, self.accept_host_key
    assert isinstance(self.address, SshAddress)
    await (await connect_ssh(self.address, home=home, accept_host_key=accepted)).close()
    return make_node(self.name)


def files_with(folder: Path, text: str) -> list[Path]:
    """Return the files below a folder that contain a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]
