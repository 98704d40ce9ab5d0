"""Logging in over SSH: whom we trust, with which key, and what each failure says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncssh
import pytest

from app.errors import (
    HostKeyChanged,
    HostKeyUnknown,
    LoginRefused,
    NodeUnreachable,
    UserError,
)
from app.nodes.node import SshAddress
from app.nodes.transport import ssh_login
from app.nodes.transport.connection import Connection, connect
from app.nodes.transport.host_keys import HostKeys
from app.nodes.transport.ssh import SshConnection
from tests.fakes.ssh import address_of, environment, loopback_node, make_key


@pytest.fixture(autouse=True)
def _no_keys_of_the_user(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "user").mkdir()
    with environment(HOME=str(tmp_path / "user"), SSH_AUTH_SOCK=""):
        yield


async def log_in(
    address: SshAddress, master: Path, accept_host_key: str | None = None
) -> Connection:
    return await connect(address, home=master, accept_host_key=accept_host_key)


@contextlib.asynccontextmanager
async def listening(answer: bytes | None) -> AsyncIterator[int]:
    """A port where something answers that is no SSH server; None: it never says a word."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            writer.write(answer)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def test_first_contact_shows_the_fingerprint_and_leaves_nothing(tmp_path: Path) -> None:
    told: list[str] = []

    async def run() -> None:
        async with loopback_node(tmp_path) as server:
            with pytest.raises(HostKeyUnknown) as caught:
                await log_in(address_of(server), tmp_path / "master")
            told.append(caught.value.fingerprint)
            assert not (tmp_path / "master").exists()

    asyncio.run(run())
    host_key = str(tmp_path / "pc" / ".loopback_host_key")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", host_key], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[1] in told


async def test_a_confirmed_key_is_remembered_and_asked_for_no_more(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        for accepted in (server.fingerprint, None):
            connection = await log_in(address_of(server), tmp_path / "master", accepted)
            process = await connection.open(["echo", 'it\'s; $HOME "quoted" \\ !'])
            assert await process.read() == b'it\'s; $HOME "quoted" \\ !\n'
            assert process.peer == server.address
            await connection.close()


@pytest.mark.parametrize("cut", [lambda f: f[:-1], str.lower, lambda f: f.removeprefix("SHA256:")])
async def test_another_fingerprint_than_the_shown_one_is_a_hard_error(tmp_path: Path, cut) -> None:
    async with loopback_node(tmp_path) as server:
        wrong = cut(server.fingerprint)
        with pytest.raises(UserError, match="but the key to accept is") as caught:
            await log_in(address_of(server), tmp_path / "master", wrong)
        assert not isinstance(caught.value, HostKeyUnknown)
        assert server.fingerprint in caught.value.message
        assert not (tmp_path / "master").exists()


@pytest.mark.parametrize("new_type", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
async def test_a_changed_host_key_is_a_hard_stop(tmp_path: Path, new_type: str) -> None:
    """Also when the host has no key of the old type any more, and whatever is accepted."""
    async with loopback_node(tmp_path) as server:
        address = address_of(server)
        await (await log_in(address, tmp_path / "master", server.fingerprint)).close()
        expected = server.fingerprint
    (server.home / ".loopback_host_key").unlink()
    asyncssh.generate_private_key(new_type).write_private_key(server.home / ".loopback_host_key")
    before = (tmp_path / "master" / "known_hosts").read_bytes()
    async with loopback_node(tmp_path, port=address.port) as server:
        for accepted in (None, server.fingerprint):
            with pytest.raises(HostKeyChanged) as caught:
                await log_in(address, tmp_path / "master", accepted)
            assert caught.value.expected == expected
            assert caught.value.shown == server.fingerprint
    assert (tmp_path / "master" / "known_hosts").read_bytes() == before


async def test_the_users_own_known_hosts_is_not_trusted(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        await (await log_in(address_of(server), tmp_path / "one", server.fingerprint)).close()
        folder = tmp_path / "user" / ".ssh"
        folder.mkdir()
        (folder / "known_hosts").write_bytes((tmp_path / "one" / "known_hosts").read_bytes())
        with pytest.raises(HostKeyUnknown):
            await log_in(address_of(server), tmp_path / "master")


async def test_a_refused_login_names_the_keys_and_the_command_that_installs_one(
    tmp_path: Path,
) -> None:
    async with loopback_node(tmp_path) as server:
        key = make_key(tmp_path, "other")
        with pytest.raises(LoginRefused) as caught:
            await log_in(address_of(server, key), tmp_path / "master", server.fingerprint)
        assert str(key) in caught.value.message
        command = f"ssh-copy-id -i {key} -p {server.port} {server.user}@127.0.0.1"
        assert command in caught.value.hint
        assert HostKeys(tmp_path / "master").find(address_of(server)) is None


async def test_without_any_key_the_message_says_how_to_make_one(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        address = SshAddress(host="127.0.0.1", port=server.port, user=server.user)
        with pytest.raises(LoginRefused, match="no key to log in") as caught:
            await log_in(address, tmp_path / "master", server.fingerprint)
        assert "ssh-keygen -t ed25519" in caught.value.hint
        assert "ssh-copy-id" in caught.value.hint


async def test_a_default_key_is_found(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        (tmp_path / "user" / ".ssh").mkdir()
        (tmp_path / "key").rename(tmp_path / "user" / ".ssh" / "id_ed25519")
        address = SshAddress(host="127.0.0.1", port=server.port, user=server.user)
        await (await log_in(address, tmp_path / "master", server.fingerprint)).close()


@contextlib.contextmanager
def agent_holding(key: Path, folder: Path) -> Iterator[None]:
    """A real ssh-agent that holds `key`, whose passphrase is `secret`."""
    ask = folder / "ask"
    ask.write_text("#!/bin/sh\necho secret\n")
    ask.chmod(0o755)
    path = str(folder / "agent.sock")
    with subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL) as agent:
        try:
            for _ in range(200):
                if os.path.exists(path):
                    break
                subprocess.run(["sleep", "0.02"], check=True)
            environ = {**os.environ, "SSH_AUTH_SOCK": path, "SSH_ASKPASS": str(ask)}
            environ |= {"SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":none"}
            subprocess.run(["ssh-add", "-q", str(key)], env=environ, check=True, timeout=10)
            with environment(SSH_AUTH_SOCK=path):
                yield
        finally:
            agent.terminate()


@pytest.mark.parametrize("named", [True, False])
async def test_a_key_with_a_passphrase_needs_the_agent(tmp_path: Path, named: bool) -> None:
    folder = tmp_path / "user" / ".ssh"
    key = make_key(folder, "id_ed25519", passphrase="secret")
    make_key(tmp_path).with_name("key.pub").write_bytes(
        key.with_name("id_ed25519.pub").read_bytes()
    )
    async with loopback_node(tmp_path) as server:
        address = SshAddress(
            host="127.0.0.1", port=server.port, user=server.user, key=key if named else None
        )
        with pytest.raises(LoginRefused, match=str(key)) as caught:
            await log_in(address, tmp_path / "master", server.fingerprint)
        assert f"ssh-add {key}" in caught.value.hint
        with agent_holding(key, tmp_path):
            await (await log_in(address, tmp_path / "master", server.fingerprint)).close()


async def test_an_agent_that_does_not_answer_is_passed_over(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        with environment(SSH_AUTH_SOCK=str(tmp_path / "nothing-here")):
            connection = await log_in(address_of(server), tmp_path / "master", server.fingerprint)
            await connection.close()


def key_problem(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "problem"
    if kind == "public":
        return make_key(tmp_path).with_name("key.pub")
    if kind == "garbage":
        path.write_text("this is no key")
    if kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        ("missing", "cannot be read: No such file", "ssh-keygen -t ed25519 -f"),
        ("garbage", "is not a private key", "ssh-keygen"),
        ("folder", "cannot be read", "chmod 600"),
        ("public", "is a public key", "without .pub"),
    ],
)
def test_a_key_file_that_cannot_be_used(tmp_path: Path, kind: str, message: str, hint: str) -> None:
    address = SshAddress(host="127.0.0.1", port=1, user="x", key=key_problem(tmp_path, kind))
    with pytest.raises(LoginRefused, match=message) as caught:
        asyncio.run(log_in(address, tmp_path / "master"))
    assert str(address.key) in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("key_type", "options", "what", "next_step"),
    [
        ("ssh-ed448", {}, "it offers only ssh-ed448, wanted is ed25519", "ssh-keygen -A"),
        (
            "ssh-ed25519",
            {"kex_algs": ["diffie-hellman-group1-sha1"]},
            "no key exchange method is known to both; it offers only diffie-hellman-group1-sha1",
            "remove KexAlgorithms",
        ),
        (
            "ssh-ed25519",
            {"encryption_algs": ["3des-cbc"]},
            "no encryption method is known to both; it offers only 3des-cbc",
            "remove Ciphers",
        ),
    ],
)
async def test_a_server_without_any_common_algorithm(
    tmp_path: Path, key_type: str, options: dict[str, list[str]], what: str, next_step: str
) -> None:
    key = asyncssh.generate_private_key(key_type)
    server = await asyncssh.listen("127.0.0.1", 0, server_host_keys=[key], **options)
    port = server.sockets[0].getsockname()[1]
    address = SshAddress(host="127.0.0.1", port=port, user="anna", key=make_key(tmp_path))
    with pytest.raises(NodeUnreachable, match=f"127.0.0.1:{port}") as caught:
        await log_in(address, tmp_path / "master")
    assert what in caught.value.message
    assert next_step in caught.value.hint
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400\r\n\r\n", b"SSH-2.0-x\r\n\0\0\0\1", None])
def test_an_offer_that_is_none_is_empty(monkeypatch, answer: bytes | None) -> None:
    async def run() -> None:
        async with listening(answer) as port:
            opened = socket.create_connection(("127.0.0.1", port))
            opened.setblocking(False)
            assert await ssh_login.read_host_key_types(opened) == ()

    monkeypatch.setattr(ssh_login, "OFFER_TIMEOUT_S", 0.2)
    asyncio.run(run())
    assert ssh_login.parse_host_key_types(b"\4\x15" + bytes(40)) == ()


def test_a_closed_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = SshAddress(host="127.0.0.1", port=port, user="anna")
    with pytest.raises(NodeUnreachable, match=f"nothing listens on port {port}") as caught:
        asyncio.run(log_in(address, tmp_path))
    assert "openssh-server" in caught.value.hint


def test_a_host_name_that_nobody_knows(tmp_path: Path) -> None:
    address = SshAddress(host="no-such-host.invalid", user="anna")
    with pytest.raises(NodeUnreachable, match=r"host name no-such-host\.invalid is not known"):
        asyncio.run(log_in(address, tmp_path))


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_host_name_that_cannot_be_one(tmp_path: Path, host: str) -> None:
    with pytest.raises(NodeUnreachable, match="is not known here"):
        asyncio.run(log_in(SshAddress(host=host, user="anna"), tmp_path))


def test_a_host_that_does_not_answer(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ssh_login, "CONNECT_TIMEOUT_S", 0.3)
    # A listener whose queue is full: the kernel drops further calls, as a firewall does.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        place = server.getsockname()
        held = [socket.socket() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(place)
        with pytest.raises(NodeUnreachable, match="did not answer on port") as caught:
            asyncio.run(log_in(SshAddress(host=place[0], port=place[1], user="anna"), tmp_path))
        for one in held:
            one.close()
    assert f"ufw allow {place[1]}/tcp" in caught.value.hint


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100_000, b""])
async def test_a_port_where_something_else_answers(tmp_path: Path, answer: bytes) -> None:
    async with listening(answer) as port:
        with pytest.raises(NodeUnreachable, match=f"127.0.0.1:{port}") as caught:
            await log_in(SshAddress(host="127.0.0.1", port=port, user="anna"), tmp_path)
        assert caught.value.hint


async def test_a_port_that_never_says_a_word(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ssh_login, "LOGIN_TIMEOUT_S", 0.3)
    async with listening(None) as port:
        with pytest.raises(NodeUnreachable, match="no SSH login was possible in time"):
            await log_in(SshAddress(host="127.0.0.1", port=port, user="anna"), tmp_path)


async def test_a_connection_that_breaks_tells_everyone_who_waits(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        connection = await log_in(address_of(server), tmp_path / "master", server.fingerprint)
        process = await connection.open(["sleep", "1000"])
        reading = asyncio.create_task(process.read())
        await asyncio.sleep(0)
        server.process.kill()
        with pytest.raises(NodeUnreachable, match="was lost"):
            await asyncio.wait_for(reading, 5)
        with pytest.raises(NodeUnreachable):
            await process.write(b"x")
        with pytest.raises(NodeUnreachable):
            await connection.open(["true"])
        assert await process.wait() is None
        await connection.close()


async def test_the_fast_cipher_is_chosen(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        connection = await log_in(address_of(server), tmp_path / "master", server.fingerprint)
        assert isinstance(connection, SshConnection)
        chosen = connection._connection.get_extra_info("send_cipher")
        assert chosen == "aes128-gcm@openssh.com"
        await connection.close()


def test_known_hosts_checking_is_switched_off_nowhere() -> None:
    sources = Path(ssh_login.__file__).parents[2].rglob("*.py")
    assert not [path for path in sources if "known_hosts=None" in path.read_text("utf-8")]
