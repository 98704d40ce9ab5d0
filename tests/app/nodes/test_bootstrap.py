"""Starting the agent on a node: cold, warm, damaged, and on nodes where it cannot start."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from app.errors import NodeNotReady, NodeUnreachable
from app.nodes import bootstrap
from app.nodes.archive import AgentArchive
from app.nodes.bootstrap import SCRIPT, StartedAgent, start_agent
from app.nodes.transport.local import LocalConnection
from app.nodes.transport.process import Process
from tests.fakes.agent import SOURCE, fake_archive
from tests.fakes.ssh import connect, loopback_node, real_archive, tools_without, until

IS_ROOT = os.geteuid() == 0
AGENTS = ".local/share/rackless-agent/agents"


def local(home: Path, path: str = "") -> LocalConnection:
    home.mkdir(parents=True, exist_ok=True)
    return LocalConnection({"HOME": str(home), "PATH": path or os.environ["PATH"]})


async def start(connection: LocalConnection, archive: AgentArchive) -> StartedAgent:
    try:
        return await start_agent(connection, archive, "pc (anna@pc:22)")
    finally:
        await connection.close()


def start_local(home: Path, archive: AgentArchive | None = None, path: str = "") -> StartedAgent:
    return asyncio.run(start(local(home, path), archive or fake_archive()))


def stored(home: Path) -> list[str]:
    return sorted(os.listdir(home / AGENTS))


def test_cold_then_warm(tmp_path: Path) -> None:
    archive = real_archive()
    for _ in range(2):
        agent = start_local(tmp_path, archive)
        assert agent.hello.archive_sha256 == archive.sha256
        assert agent.hello.agent_home == str(tmp_path / AGENTS.rpartition("/")[0])
    assert stored(tmp_path) == [f"{archive.sha256}.zip"]
    assert (tmp_path / AGENTS).stat().st_mode & 0o077 == 0


def test_a_home_with_blanks_and_stars_in_its_name(tmp_path: Path) -> None:
    home = tmp_path / "my  * home $x"
    assert start_local(home).hello.agent_home.startswith(str(home))


async def test_the_agents_home_can_be_chosen(tmp_path: Path) -> None:
    environ = {"HOME": "/nonexistent", "PATH": os.environ["PATH"]}
    connection = LocalConnection({**environ, "RACKLESS_AGENT_HOME": str(tmp_path / "own")})
    agent = await start(connection, fake_archive())
    assert agent.hello.agent_home == str(tmp_path / "own")


@pytest.mark.parametrize("damage", [b"", b"x" * 100])
def test_a_damaged_archive_on_the_node_is_sent_again(tmp_path: Path, damage: bytes) -> None:
    archive = fake_archive()
    start_local(tmp_path)
    path = tmp_path / AGENTS / f"{archive.sha256}.zip"
    path.write_bytes(damage)
    start_local(tmp_path)
    assert path.read_bytes() == archive.data


def test_the_script_needs_no_quotes_in_any_shell() -> None:
    assert not set(SCRIPT) & set("'\"\\!\n\r\t")
    assert SCRIPT.isascii()
    # Old csh refuses words of more than 1024 characters only for variables, not for commands;
    # Windows refuses command lines of more than 32767.
    assert len(SCRIPT) < 4096


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "csh", "tcsh"])
async def test_the_script_passes_through_login_shells(tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed here")
    async with loopback_node(tmp_path, "pc", "--shell", program) as server:
        connection = await connect(server, tmp_path / "master")
        agent = await start_agent(connection, fake_archive(), "pc")
        assert agent.hello.hostname == "fake"
        await connection.close()


async def test_noise_of_login_scripts_is_skipped(tmp_path: Path) -> None:
    """A real .bashrc, read by bash as under sshd, with no newline at the end of its noise."""
    async with loopback_node(tmp_path, "pc", "--shell", "/bin/bash") as server:
        noise = 'echo "Welcome!"; echo "{\\"type\\":\\"event\\"}"; printf "RACKLESS "; echo e >&2'
        (server.home / ".bashrc").write_text(noise + "\n")
        for _ in range(2):
            connection = await connect(server, tmp_path / "master")
            process = await connection.open(["true"])
            if not await process.read():
                pytest.skip("this bash does not read .bashrc for remote commands")
            agent = await start_agent(connection, real_archive(), "pc")
            assert agent.hello.archive_sha256 == real_archive().sha256
            await connection.close()


async def test_endless_noise_is_not_read_for_ever(tmp_path: Path) -> None:
    async with loopback_node(tmp_path, "pc", "--shell", write_shell(tmp_path, "yes")) as server:
        connection = await connect(server, tmp_path / "master")
        with pytest.raises(NodeNotReady, match="print more than 256 KiB"):
            await start_agent(connection, fake_archive(), "pc")
        await connection.close()


def write_shell(folder: Path, text: str) -> str:
    """Return a login shell that runs `text` instead of the command."""
    path = folder / "shell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo This account is currently not available.; exit 1", "currently not available"),
        ("exit 0", "ended with exit code 0"),
        ("echo broken >&2; exit 126", "broken"),
    ],
)
async def test_a_login_shell_that_runs_nothing(tmp_path: Path, text: str, message: str) -> None:
    async with loopback_node(tmp_path, "pc", "--shell", write_shell(tmp_path, text)) as server:
        connection = await connect(server, tmp_path / "master")
        with pytest.raises(NodeNotReady, match=message) as caught:
            await start_agent(connection, fake_archive(), "pc")
        assert "login shell must not be nologin" in caught.value.hint
        await connection.close()


async def test_a_login_shell_that_hangs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bootstrap, "STEP_TIMEOUT_S", 0.5)
    shell = write_shell(tmp_path, "read answer_that_never_comes")
    async with loopback_node(tmp_path, "pc", "--shell", shell) as server:
        connection = await connect(server, tmp_path / "master")
        began_s = time.monotonic()
        with pytest.raises(NodeNotReady, match="did not start our command") as caught:
            await start_agent(connection, fake_archive(), "pc")
        assert time.monotonic() - began_s < 5
        assert ".bashrc" in caught.value.hint
        await connection.close()


@pytest.mark.parametrize("tool", ["python3", "sha256sum", "head"])
def test_a_missing_tool_is_named(tmp_path: Path, tool: str) -> None:
    path = tools_without(tmp_path / "bin", tool)
    with pytest.raises(NodeNotReady, match=f"There is no {tool} on pc") as caught:
        start_local(tmp_path / "home", path=path)
    package = "python3" if tool == "python3" else "coreutils"
    assert caught.value.hint == f"Install it on that PC: sudo apt-get install {package}"
    assert os.listdir(tmp_path / "home") == []


async def test_no_python3_behind_ssh(tmp_path: Path) -> None:
    path = tools_without(tmp_path / "bin", "python3")
    async with loopback_node(tmp_path, "pc", "--path", path) as server:
        connection = await connect(server, tmp_path / "master")
        with pytest.raises(NodeNotReady, match="There is no python3 on pc"):
            await start_agent(connection, real_archive(), "pc")
        await connection.close()


def test_python3_that_is_too_old(tmp_path: Path) -> None:
    """A python3 that claims to be 3.8 runs the real archive's own check."""
    path = tools_without(tmp_path / "bin", "python3")
    python = tmp_path / "bin" / "python3"
    pretend = (
        "import runpy, sys; sys.version_info = (3, 8, 10, 'final', 0); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -c "{pretend}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(NodeNotReady, match=r"python3 on this node is 3\.8.*needs 3\.10") as caught:
        start_local(tmp_path / "home", real_archive(), path)
    assert caught.value.message.startswith("pc (anna@pc:22)")
    assert "apt-get install" in caught.value.hint


@pytest.fixture
def read_only_home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "frozen"
    home.mkdir()
    if IS_ROOT:
        mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", str(home)]
        if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
            pytest.skip("this container may not mount")
        yield home
        subprocess.run(["umount", "-l", str(home)], check=True)
    else:
        home.chmod(0o500)
        yield home
        home.chmod(0o700)


def test_a_home_that_cannot_be_written(read_only_home: Path) -> None:
    with pytest.raises(NodeNotReady, match=r"home folder on pc .* cannot be written") as caught:
        start_local(read_only_home)
    assert "findmnt" in caught.value.hint
    assert os.listdir(read_only_home) == []


def test_a_home_where_the_agents_folder_cannot_be(tmp_path: Path) -> None:
    (tmp_path / ".local").write_text("a file where a folder should be")
    with pytest.raises(NodeNotReady, match="could not be stored"):
        start_local(tmp_path)


@pytest.mark.skipif(not IS_ROOT, reason="a small disk can only be mounted by root")
def test_a_disk_that_is_full_while_the_agent_is_pushed(tmp_path: Path) -> None:
    home = tmp_path / "small"
    home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(home)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        with pytest.raises(NodeNotReady, match=r"disk on pc .* is full") as caught:
            start_local(home, real_archive())
        assert "df -h" in caught.value.hint
        assert stored(home) == []
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def test_bytes_that_arrive_damaged_are_not_kept(tmp_path: Path) -> None:
    archive = fake_archive()
    wrong = AgentArchive(archive.sha256, archive.data[:-1] + b"x")
    with pytest.raises(NodeNotReady, match="arrived damaged"):
        start_local(tmp_path, wrong)
    assert stored(tmp_path) == []


def test_a_push_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        connection = local(tmp_path)
        argv = ("sh", "-c", SCRIPT, "rackless", "n" * 32, "0" * 64, "100000")
        process: Process = await connection.open(argv)
        while b"NEED" not in await process.read():
            pass
        await process.write(b"x" * 5000)
        process.write_eof()
        await process.wait()

    asyncio.run(run())
    assert stored(tmp_path) == []


def test_what_dies_before_its_hello_is_told_with_its_last_words(tmp_path: Path) -> None:
    dying = "import sys; sys.exit('no module named this or that')"
    with pytest.raises(NodeNotReady, match="no module named this or that"):
        start_local(tmp_path, fake_archive(dying))


@pytest.mark.parametrize("first", ["nonsense", '{"type":"event","kind":"other","data":{}}', "{}"])
def test_a_first_line_that_is_no_hello(tmp_path: Path, first: str) -> None:
    source = f"import sys; print('RACKLESS ' + sys.argv[2]); print({first!r}, flush=True)"
    with pytest.raises(NodeNotReady, match="did not start on pc"):
        start_local(tmp_path, fake_archive(source))


async def test_cancelling_leaves_no_process(tmp_path: Path) -> None:
    source = f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(99)"
    connection = local(tmp_path / "home")
    task = asyncio.create_task(start_agent(connection, fake_archive(source), "pc"))
    await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not Path(f"/proc/{pid}").exists(), 5)
    await connection.close()


async def test_a_connection_lost_on_the_way_is_no_fault_of_the_node(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        connection = await connect(server, tmp_path / "master")
        source = "import time; time.sleep(99)"
        task = asyncio.create_task(start_agent(connection, fake_archive(source), "pc"))
        await asyncio.sleep(0.2)
        server.process.send_signal(signal.SIGKILL)
        with pytest.raises(NodeUnreachable) as caught:
            await task
        assert not isinstance(caught.value, NodeNotReady)
        await connection.close()


def versions(count: int) -> Sequence[AgentArchive]:
    return [fake_archive(SOURCE + f"\n# {number}") for number in range(count)]


def age(home: Path) -> None:
    """Make what is stored older, so that what comes next is the newest."""
    for path in (home / AGENTS).iterdir():
        times = path.stat()
        os.utime(path, (times.st_atime, times.st_mtime - 100))


def test_the_three_newest_archives_are_kept(tmp_path: Path) -> None:
    archives = versions(6)
    for archive in archives:
        start_local(tmp_path, archive)
        age(tmp_path)
    assert stored(tmp_path) == sorted(f"{archive.sha256}.zip" for archive in archives[-3:])


def test_an_archive_in_use_is_kept_however_old(tmp_path: Path) -> None:
    archives = versions(6)
    start_local(tmp_path, archives[0])
    age(tmp_path)
    used = f"{tmp_path}/{AGENTS}/{archives[0].sha256}.zip"
    with subprocess.Popen(["sleep", "1000"], env={"PYTHONPATH": used}) as rank:
        try:
            for archive in archives[1:]:
                start_local(tmp_path, archive)
                age(tmp_path)
            assert f"{archives[0].sha256}.zip" in stored(tmp_path)
            assert f"{archives[1].sha256}.zip" not in stored(tmp_path)
        finally:
            rank.kill()


def test_a_half_archive_of_an_old_push_is_removed(tmp_path: Path) -> None:
    start_local(tmp_path)
    old = tmp_path / AGENTS / ".abc.part"
    young = tmp_path / AGENTS / ".def.part"
    for path in (old, young):
        path.write_text("x")
    os.utime(old, (1, 1))
    start_local(tmp_path, versions(1)[0])
    assert not old.exists()
    assert young.exists()
