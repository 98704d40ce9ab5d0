"""Hosts behind others: jump hosts, programs of ~/.ssh/config, and the keys it names."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from app.errors import HostKeyUnknown, NodeUnreachable, UserError
from app.events import EventHub
from app.nodes.fleet import Fleet
from app.nodes.node import Node, SshAddress
from app.nodes.transport.connection import connect
from app.nodes.transport.host_keys import HostKeys, fingerprint_of
from app.nodes.transport.login_keys import load_login_keys
from app.nodes.transport.loopback import LoopbackNode
from tests.fakes.ssh import address_of, environment, loopback_node, make_key

RELAY = """
import socket, sys, threading, os
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print("a word on stderr", file=sys.stderr, flush=True)
def copy():
    while data := peer.recv(65536):
        os.write(1, data)
    os._exit(0)
threading.Thread(target=copy, daemon=True).start()
while data := os.read(0, 65536):
    peer.sendall(data)
"""


@pytest.fixture(autouse=True)
def _no_keys_of_the_user(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "user").mkdir()
    with environment(HOME=str(tmp_path / "user"), SSH_AUTH_SOCK=""):
        yield


class _Jump(asyncssh.SSHServer):
    """Lets the key in and forwards to where it is asked to, but runs no command."""

    def __init__(self, key: asyncssh.SSHKey, passed: list[tuple[str, int]]) -> None:
        self._key, self._passed = key, passed

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == "bob" and key == self._key

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> bool:
        self._passed.append((dest_host, dest_port))
        return True


@contextlib.asynccontextmanager
async def jump_host(
    folder: Path, passed: list[tuple[str, int]]
) -> AsyncIterator[tuple[SshAddress, str]]:
    """A jump host on this PC: its address and fingerprint; `passed` gets what it forwards to."""
    key, host_key = make_key(folder), asyncssh.generate_private_key("ssh-ed25519")
    allowed = asyncssh.read_public_key(f"{key}.pub")
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        config=None,
        server_factory=lambda: _Jump(allowed, passed),
        server_host_keys=[host_key],
    )
    async with server:
        address = SshAddress(host="127.0.0.1", port=server.get_port(), user="bob", key=key)
        yield replace(address, alias="gate"), fingerprint_of(host_key)


def behind(server: LoopbackNode, jump: SshAddress) -> SshAddress:
    return replace(address_of(server), jumps=(jump,))


async def test_each_host_on_the_way_is_confirmed_by_itself(tmp_path: Path) -> None:
    passed: list[tuple[str, int]] = []
    master = tmp_path / "master"
    async with loopback_node(tmp_path) as server, jump_host(tmp_path, passed) as (jump, shown):
        address = behind(server, jump)
        with pytest.raises(HostKeyUnknown, match=r"^gate \(127.0.0.1:\d+\) shows") as first:
            await connect(address, home=master)
        assert (first.value.fingerprint, passed) == (shown, [])
        with pytest.raises(HostKeyUnknown, match=r"^127.0.0.1") as second:
            await connect(address, home=master, accept_host_key=shown)
        assert second.value.fingerprint == server.fingerprint
        connection = await connect(address, home=master, accept_host_key=server.fingerprint)
        process = await connection.open(["echo", "there"])
        assert await process.read() == b"there\n"
        assert process.peer == ""  # the connection leads to the jump host
        await connection.close()
        assert set(passed) == {(server.address, server.port)}
        # Without the jump it is another place, whose key is not confirmed.
        assert HostKeys(master).find(address_of(server)) is None


async def test_a_node_behind_a_jump_host_is_a_node_and_leaves_no_key(tmp_path: Path) -> None:
    master = tmp_path / "master"
    async with loopback_node(tmp_path) as server, jump_host(tmp_path, []) as (jump, shown):
        address = behind(server, jump)
        async with Fleet(master, EventHub()) as fleet:
            with pytest.raises(HostKeyUnknown):
                await fleet.join(Node(name="lab", address=address), shown)
            snapshot, _ = await fleet.join(Node(name="lab", address=address), server.fingerprint)
            assert snapshot.state == "online"
            assert len((master / "known_hosts").read_text().splitlines()) == 2
            await fleet.remove("lab")
        assert (master / "known_hosts").read_text() == ""


async def test_a_host_that_the_jump_host_cannot_reach_is_named(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server, jump_host(tmp_path, []) as (jump, shown):
        nobody = replace(behind(server, jump), port=1)
        with pytest.raises(NodeUnreachable, match=r"gate .* lets us in, but cannot reach 127"):
            await connect(nobody, home=tmp_path / "master", accept_host_key=shown)


async def test_a_program_of_the_configuration_leads_to_the_host(tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    async with loopback_node(tmp_path) as server:
        relay = [sys.executable, str(tmp_path / "relay.py"), server.address, str(server.port)]
        address = replace(address_of(server), host="lab", proxy_command=shlex.join(relay))
        accepted = server.fingerprint
        connection = await connect(address, home=tmp_path / "m", accept_host_key=accepted)
        process = await connection.open(["echo", "there"])
        assert await process.read() == b"there\n"
        assert process.peer == ""
        await connection.close()
        with pytest.raises(UserError, match=r"program that leads to lab:.* gave no SSH") as caught:
            await connect(replace(address, proxy_command="false"), home=tmp_path / "m")
        assert caught.value.hint == "Try it in a terminal: false"


async def test_the_keys_of_the_configuration_replace_the_default_ones(tmp_path: Path) -> None:
    make_key(tmp_path / "user" / ".ssh", "id_ed25519")
    lab = make_key(tmp_path, "lab")
    plain = SshAddress(host="lab", user="anna")
    assert (await load_login_keys(plain)).names == [str(tmp_path / "user/.ssh/id_ed25519")]
    named = replace(plain, identity_files=(tmp_path / "missing", lab))
    assert (await load_login_keys(named)).names == [str(lab)]
