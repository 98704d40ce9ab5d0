"""An SSH server for measurements: the system's own sshd on a high port, or our loopback one.

OpenSSH's is what users have, so it is taken where it is installed. It runs as this user, with a key
and a configuration of its own, and gives every command a home of its own: what somebody's .bashrc
takes (often more than all the rest) is not measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from app.nodes.node import SshAddress
from app.nodes.transport.host_keys import HostKeys
from tests.bench.rigs.processes import processes_with
from tests.fakes.ssh import address_of, loopback_node, make_key

CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
MaxStartups 200
SetEnv HOME={folder}/home RACKLESS_AGENT_HOME={agent_home}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredServer:
    name: str
    address: SshAddress
    agent_home: Path


@contextlib.asynccontextmanager
async def measured_server(folder: Path, master: Path) -> AsyncIterator[MeasuredServer]:
    """Run a server; its host key is confirmed below `master`."""
    sshd = find_sshd()
    make_key(folder)
    if sshd is None:
        async with loopback_node(folder) as server:
            key = asyncssh.read_private_key(server.home / ".loopback_host_key")
            HostKeys(master).confirm(address_of(server), key.convert_to_public())
            home = server.home / ".local/share/rackless-agent"
            yield MeasuredServer(name="loopback.py", address=address_of(server), agent_home=home)
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    agent_home = folder / "agent"
    (folder / "home").mkdir()
    host_key = make_key(folder, "host")
    config = folder / "sshd_config"
    config.write_text(CONFIG.format(port=port, folder=folder, agent_home=agent_home))
    address = SshAddress(host="127.0.0.1", port=port, user=getpass.getuser(), key=folder / "key")
    HostKeys(master).confirm(address, asyncssh.read_public_key(f"{host_key}.pub"))
    server = await asyncio.create_subprocess_exec(
        sshd, "-D", "-e", "-f", str(config), stderr=subprocess.DEVNULL
    )
    try:
        await _wait_for_port(port)
        yield MeasuredServer(name="OpenSSH sshd", address=address, agent_home=agent_home)
    finally:
        server.terminate()
        await server.wait()
        for pid in list(processes_with("RACKLESS_AGENT_HOME", str(agent_home))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def find_sshd() -> str | None:
    """Return an sshd that can run: it wants its own empty folder."""
    found = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    return found if Path("/run/sshd").is_dir() else None


async def _wait_for_port(port: int) -> None:
    for _ in range(500):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.01)
    raise RuntimeError("sshd does not listen")
