"""Nodes on loopback for tests: a real SSH server each, ended with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from app.nodes.archive import AgentArchive, build_archive
from app.nodes.client import NodeClient
from app.nodes.link import Link, open_link
from app.nodes.node import Node, SshAddress
from app.nodes.transport.connection import Connection
from app.nodes.transport.connection import connect as connect_address
from app.nodes.transport.loopback import LoopbackNode, power_cut, start_loopback


def make_key(folder: Path, name: str = "key", passphrase: str = "") -> Path:
    """Write a key pair and return the private file; an existing one is used again."""
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)]
        subprocess.run(command, check=True)
    return path


@contextlib.asynccontextmanager
async def loopback_node(
    folder: Path, name: str = "pc", *options: str, port: int = 0
) -> AsyncIterator[LoopbackNode]:
    """A node whose home is `folder/name`; pulled from the mains at the end."""
    key = make_key(folder)
    home = folder / name
    server = await start_loopback(home, key.with_name("key.pub"), options=options, port=port)
    try:
        yield server
    finally:
        await asyncio.to_thread(power_cut, home)
        await server.process.wait()  # or it may be closed when its event loop is gone


def address_of(server: LoopbackNode, key: Path | None = None) -> SshAddress:
    return SshAddress(
        host=server.address,
        port=server.port,
        user=server.user,
        key=key or server.home.parent / "key",
    )


async def connect(server: LoopbackNode, master: Path) -> Connection:
    return await connect_address(
        address_of(server), home=master, accept_host_key=server.fingerprint
    )


@functools.cache
def real_archive() -> AgentArchive:
    return build_archive()


@contextlib.asynccontextmanager
async def linked(
    server: LoopbackNode, master: Path, archive: AgentArchive | None = None, name: str = "pc"
) -> AsyncIterator[Link]:
    """A link to the node, closed at the end."""
    link = await open_link(
        Node(name=name, address=address_of(server)),
        archive or real_archive(),
        home=master,
        gate=asyncio.Semaphore(8),
        accept_host_key=server.fingerprint,
    )
    try:
        yield link
    finally:
        await link.close()


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables of this process inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


async def until(condition: Callable[[], object], deadline_s: float = 20.0) -> float:
    """Wait until `condition` holds; return the seconds that it took."""
    began_s = time.monotonic()
    while not condition():
        took_s = time.monotonic() - began_s
        assert took_s < deadline_s, f"still not so after {deadline_s} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - began_s


def tools_without(folder: Path, *left_out: str) -> str:
    """Return a PATH with the tools of the script, except these."""
    folder.mkdir()
    names = ("sh", "head", "sha256sum", "mkdir", "mv", "rm", "ls", "grep", "tail", "find")
    for name in (*names, "python3"):
        found = shutil.which(name)
        if name not in left_out and found:
            (folder / name).symlink_to(found)
    return str(folder)


def client_of(link: Link, name: str = "pc") -> NodeClient:
    async def get() -> Link:
        return link

    return NodeClient(name, get)


@contextlib.asynccontextmanager
async def nodes(folder: Path, count: int, *options: str) -> AsyncIterator[list[NodeClient]]:
    """Clients of `count` nodes called pc-0, pc-1, ..., whose homes are below `folder`.

    `options` are those of each SSH server.
    """
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(count):
            server = await stack.enter_async_context(
                loopback_node(folder, f"pc-{number}", *options)
            )
            link = await stack.enter_async_context(linked(server, folder / "master"))
            clients.append(client_of(link, f"pc-{number}"))
        yield clients
