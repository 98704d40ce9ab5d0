"""The loopback node behaves like another PC behind sshd; asked here with OpenSSH's own client."""

from __future__ import annotations

import asyncio
import getpass
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.errors import NodeUnreachable
from app.nodes.transport.loopback import LoopbackNode, find_processes, power_cut
from app.nodes.transport.process import Process
from tests.draws import random_bytes
from tests.fakes.ssh import address_of, connect, loopback_node, until


async def read_to_end(process: Process) -> None:
    while await process.read():
        pass


def ssh(server: LoopbackNode, command: Sequence[str], user: str = "") -> list[str]:
    known = server.home.parent / "known"
    known.write_text("")
    options = ("StrictHostKeyChecking=no", f"UserKnownHostsFile={known}", "LogLevel=ERROR")
    key = address_of(server).key
    place = ("-p", str(server.port), "-i", str(key), f"{user or server.user}@{server.address}")
    return ["ssh", "-F", "none", *(f"-o{option}" for option in options), *place, *command]


async def run_ssh(
    server: LoopbackNode, *command: str, data: bytes = b"", user: str = ""
) -> tuple[int | None, bytes, bytes]:
    process = await asyncio.create_subprocess_exec(
        *ssh(server, command, user),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(data), 30)
    return process.returncode, out, errors


async def test_commands_run_as_behind_sshd(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        data = random_bytes(5 << 20)
        # The half-closed input ends `cat`, its output still comes back, then the exit code.
        code, out, errors = await run_ssh(server, "cat; echo end >&2; exit 5", data=data)
        assert (code, errors) == (5, b"end\n")
        assert out == data
        code, out, _ = await run_ssh(server, "kill -TERM $$")
        assert code == 255  # OpenSSH's own code for a signal
        code, _, errors = await run_ssh(server, "no-such-command")
        assert code == 127


async def test_a_late_reader_gets_all_of_an_input_that_has_ended(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        for size in (1 << 20, 1_300_000, 2_000_000, 3_500_000):
            _, out, _ = await run_ssh(server, "sleep 0.3; wc -c", data=bytes(size))
            assert int(out) == size


async def test_a_command_finds_a_home_of_its_own_and_nothing_of_ours(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("RACKLESS_AGENT_HOME", "/elsewhere")
    monkeypatch.setenv("HF_TOKEN", "secret")
    async with loopback_node(tmp_path) as server:
        code, out, _ = await run_ssh(server, "pwd; env; tty; true")
        lines = out.decode().splitlines()
        values = dict(line.split("=", 1) for line in lines if "=" in line)
        assert code == 0
        assert lines[0] == values["HOME"] == str(server.home)
        assert values["SSH_CONNECTION"].split()[2:] == [server.address, str(server.port)]
        assert values["USER"] == getpass.getuser()
        assert "not a tty" in lines
        assert not {"RACKLESS_AGENT_HOME", "RACKLESS_HOME", "HF_TOKEN"} & set(values)


async def test_only_its_own_user_with_its_own_key_gets_in(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        code, _, errors = await run_ssh(server, "true", user="somebody")
        assert code == 255
        assert b"Permission denied (publickey)" in errors


async def test_the_host_key_stays_and_each_node_has_its_own(tmp_path: Path) -> None:
    async with loopback_node(tmp_path, "one") as first, loopback_node(tmp_path, "two") as other:
        assert first.fingerprint != other.fingerprint
    async with loopback_node(tmp_path, "one") as again:
        assert again.fingerprint == first.fingerprint


async def test_what_has_detached_itself_outlives_the_connection(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        connection = await connect(server, tmp_path / "master")
        detached = "setsid sleep 1000 </dev/null >/dev/null 2>&1 & echo $!"
        process = await connection.open(["sh", "-c", detached])
        pid = int(await process.read())
        await process.wait()
        await connection.close()
        os.kill(pid, 0)
        assert pid in set(find_processes(server.home))


def test_a_client_that_does_not_read_holds_the_command_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with loopback_node(tmp_path) as server:
            connection = await connect(server, tmp_path / "master")
            counting = (
                "import os\nn = 0\nwhile n < 1 << 30:\n"
                " n += os.write(1, bytes(1 << 16)); open('sent', 'w').write(str(n))"
            )
            process = await connection.open([sys.executable, "-I", "-c", counting])
            await process.read()
            await asyncio.sleep(1.0)
            stuck = int((server.home / "sent").read_text())
            await asyncio.sleep(0.5)
            assert int((server.home / "sent").read_text()) == stuck < 64 << 20
            await connection.close()

    asyncio.run(run())


async def test_a_power_cut_ends_everything_of_one_node_and_nothing_of_another(
    tmp_path: Path,
) -> None:
    async with loopback_node(tmp_path, "one") as one, loopback_node(tmp_path, "two") as two:
        connection = await connect(one, tmp_path / "master")
        stubborn = "trap '' TERM; setsid sleep 1000 & while :; do sleep 1000; done"
        process = await connection.open(["sh", "-c", stubborn])
        await until(lambda: len(set(find_processes(one.home))) >= 4)
        began_s = time.monotonic()
        assert await asyncio.to_thread(power_cut, one.home) >= 4
        assert time.monotonic() - began_s < 2
        assert not set(find_processes(one.home))
        assert two.process.pid in set(find_processes(two.home))
        with pytest.raises(NodeUnreachable, match="lost"):
            await read_to_end(process)
        await connection.close()


async def test_the_server_ends_with_who_started_it(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert await asyncio.wait_for(server.process.wait(), 10) == 0


def test_a_server_that_cannot_start_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        (
            *(sys.executable, "-m", "app.nodes.transport.loopback", "--home", str(tmp_path / "pc")),
            *("--authorized-key", str(tmp_path / "missing.pub")),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "missing.pub" in done.stderr
    assert "Traceback" not in done.stderr
