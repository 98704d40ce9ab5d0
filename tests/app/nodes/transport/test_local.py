"""Commands as child processes: what goes in, what comes out, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.errors import NodeNotReady
from app.nodes.bootstrap import start_agent
from app.nodes.node import LocalAddress, WslAddress
from app.nodes.transport.connection import connect
from app.nodes.transport.local import LocalConnection, WslConnection, find_wsl, list_distros
from app.nodes.transport.process import READ_AHEAD_BYTES, Process
from tests.draws import random_bytes
from tests.fakes.agent import fake_archive

PYTHON = (sys.executable, "-I", "-c")


@contextlib.asynccontextmanager
async def running(*argv: str) -> AsyncIterator[Process]:
    connection = LocalConnection()
    try:
        yield await connection.open(argv)
    finally:
        await connection.close()


async def read_all(process: Process) -> bytes:
    blocks = []
    while data := await process.read():
        blocks.append(data)
    return b"".join(blocks)


async def test_bytes_go_in_and_come_out_unchanged() -> None:
    data = random_bytes(3 << 20)
    async with running("cat") as process:

        async def feed() -> None:
            await process.write(data)
            process.write_eof()

        feeding = asyncio.create_task(feed())
        assert hashlib.sha256(await read_all(process)).digest() == hashlib.sha256(data).digest()
        await feeding
        assert await process.wait() == 0


async def test_exit_codes_signals_and_the_end_of_the_error_output() -> None:
    async with running("sh", "-c", "echo first >&2; echo last >&2; exit 3") as process:
        assert await read_all(process) == b""
        assert await process.wait() == 3
        assert process.stderr_text() == "first\nlast"
    async with running("sh", "-c", "kill -9 $$") as process:
        assert await process.wait() == -9


async def test_the_error_output_is_bounded() -> None:
    noise = "import sys; sys.stderr.write('x' * 1000000 + 'end')"
    async with running(*PYTHON, noise) as process:
        await process.wait()
        assert process.stderr_text().endswith("end")
        assert len(process.stderr_text()) < 20_000


async def test_a_reader_who_does_not_read_holds_the_writer_back() -> None:
    async with running("sh", "-c", "exec head -c 100000000 /dev/zero") as process:
        await asyncio.sleep(0.4)
        assert process._unread_bytes < READ_AHEAD_BYTES + (1 << 20)
        assert len(await read_all(process)) == 100_000_000


async def test_writing_to_a_command_that_has_ended_is_a_broken_pipe() -> None:
    async with running("true") as process:
        await process.wait()
        with pytest.raises(BrokenPipeError):
            await process.write(b"x")
        process.write_eof()


async def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(NodeNotReady, match="no-such-tool cannot be started on this PC"):
        await LocalConnection().open(["no-such-tool"])


async def test_closing_ends_a_command_that_ignores_its_input() -> None:
    connection = LocalConnection()
    process = await connection.open(["sleep", "1000"])
    await process.close()
    assert await asyncio.wait_for(process.wait(), 5) == -9
    await connection.close()


def write_tool(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


FAKE_WSL = """
[ "$1" = -d ] && [ "$3" = --exec ] || { echo "wrong arguments: $*"; exit 99; }
[ "$2" = "My Ubuntu" ] || { echo "There is no distribution with the supplied name.";
    echo "Error code: Wsl/Service/WSL_E_DISTRO_NOT_FOUND"; exit 255; }
[ "$WSL_UTF8" = 1 ] || { echo "UTF-16"; exit 98; }
shift 3; exec "$@"
"""


def wsl(folder: Path, distro: str) -> WslConnection:
    write_tool(folder / "bin" / "wsl.exe", FAKE_WSL)
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder / "home")}
    return WslConnection(WslAddress(distro=distro), environ)


async def test_the_agent_starts_in_a_wsl_distro(tmp_path: Path) -> None:
    connection = wsl(tmp_path, "My Ubuntu")
    try:
        agent = await start_agent(connection, fake_archive(), "pc (My Ubuntu)")
        assert agent.hello.hostname == "fake"
    finally:
        await connection.close()


async def test_a_distro_that_is_not_there_is_named(tmp_path: Path) -> None:
    connection = wsl(tmp_path, "Debian")
    with pytest.raises(NodeNotReady) as caught:
        await start_agent(connection, fake_archive(), "pc (Debian)")
    await connection.close()
    assert caught.value.message == "pc (Debian): this PC has no WSL distro of that name"
    assert "wsl --list" in caught.value.hint


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_the_distros_of_this_pc_are_listed(tmp_path: Path, encoding: str) -> None:
    listed = "Ubuntu-24.04\r\ndocker-desktop\r\nMy Debian\r\n\r\n".encode(encoding)
    (tmp_path / "listed").write_bytes(listed)
    write_tool(
        tmp_path / "bin" / "wsl.exe",
        f'[ "$*" = "--list --quiet" ] && [ "$WSL_UTF8" = 1 ] && cat {tmp_path}/listed',
    )
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert asyncio.run(list_distros(environ)) == ("Ubuntu-24.04", "My Debian")


def test_without_wsl_there_are_no_distros(tmp_path: Path) -> None:
    assert asyncio.run(list_distros({"PATH": str(tmp_path)})) == ()
    write_tool(tmp_path / "wsl.exe", "exit 1")
    assert asyncio.run(list_distros({"PATH": f"{tmp_path}:{os.environ['PATH']}"})) == ()


def test_without_wsl_the_message_says_how_to_get_it() -> None:
    with pytest.raises(NodeNotReady, match=r"no wsl\.exe") as caught:
        find_wsl({"PATH": "/nonexistent"})
    assert "wsl --install" in caught.value.hint


def test_the_msi_build_of_wsl_comes_before_the_one_on_path(tmp_path: Path) -> None:
    stub = write_tool(tmp_path / "System32" / "wsl.exe", "exit 1")
    environ = {"PATH": str(stub.parent), "ProgramFiles": str(tmp_path / "Program Files")}
    assert find_wsl(environ) == str(stub)
    real = write_tool(tmp_path / "Program Files" / "WSL" / "wsl.exe", "exit 0")
    assert find_wsl(environ) == str(real)


async def test_the_kind_of_address_chooses_the_way(tmp_path: Path) -> None:
    local = await connect(LocalAddress(), home=tmp_path)
    assert type(local) is LocalConnection
    other = await connect(WslAddress(distro="x"), home=tmp_path)
    assert type(other) is WslConnection
