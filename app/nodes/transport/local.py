"""Run commands on this PC, or in a WSL distro of this PC through `wsl.exe`.

Both are child processes with pipes; neither needs a server.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.errors import NodeNotReady, NodeUnreachable
from app.nodes.node import WslAddress
from app.nodes.transport.process import WRITE_AHEAD_BYTES, Process

# Time for a command to exit after its stdin is closed, in seconds.
_CLOSE_GRACE_S = 2.0
LIST_TIMEOUT_S = 10.0
"""Maximum duration of `wsl.exe --list`, in seconds: it may have to start WSL first."""


class LocalConnection:
    """Connection that runs commands on this PC."""

    def __init__(self, environ: Mapping[str, str] | None = None, where: str = "this PC") -> None:
        self._environ = environ
        self._where = where
        self._processes: list[Process] = []

    async def open(self, argv: Sequence[str]) -> Process:
        if sys.platform == "win32" and self._where == "this PC":
            raise NodeNotReady(
                "This PC runs Windows itself, where training does not run",
                "Install WSL2 and add its distro instead: rackless nodes add NAME --wsl Ubuntu",
            )
        process = Process(self._lost)
        loop = asyncio.get_running_loop()
        try:
            await loop.subprocess_exec(
                lambda: _ChildProtocol(process),
                *argv,
                env=self._environ,
                # A session of its own: Ctrl-C in the terminal must not reach the agent.
                start_new_session=sys.platform != "win32",
                # Without this flag every command flashes a console window on Windows.
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise NodeNotReady(
                f"{argv[0]} cannot be started on {self._where}: {error.strerror or error}",
                f"Make sure that {argv[0]} is installed and can be found in PATH",
            ) from error
        self._processes = [p for p in self._processes if not p.has_ended] + [process]
        return process

    async def close(self) -> None:
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.close(_CLOSE_GRACE_S) for process in processes))

    def _lost(self, reason: str) -> Exception:
        return NodeUnreachable(f"The command on {self._where} broke off: {reason}")


class WslConnection(LocalConnection):
    """Connection to a WSL distro of this PC, even if the master itself runs in WSL."""

    def __init__(self, address: WslAddress, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(_wsl_environ(environ), f"the WSL distro {address.distro}")
        self._address = address

    async def open(self, argv: Sequence[str]) -> Process:
        program = find_wsl(self._environ or {})
        # --exec: without it wsl.exe would pass the command through the distro's login shell.
        return await super().open([program, "-d", self._address.distro, "--exec", *argv])


def _wsl_environ(environ: Mapping[str, str] | None) -> dict[str, str]:
    """Return an environment in which wsl.exe prints its own messages in UTF-8, not UTF-16."""
    base = os.environ if environ is None else environ
    carried = ":".join(filter(None, (base.get("WSLENV"), "WSL_UTF8")))  # from Linux to Windows
    return {**base, "WSL_UTF8": "1", "WSLENV": carried}


async def list_distros(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the names of the WSL distros of this PC; empty if there is no WSL."""
    environment = _wsl_environ(environ)
    try:
        process = await asyncio.create_subprocess_exec(
            *(find_wsl(environment), "--list", "--quiet"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        async with asyncio.timeout(LIST_TIMEOUT_S):
            output, _ = await process.communicate()
    except (NodeNotReady, OSError, TimeoutError):
        return ()
    return read_distro_names(output)


def read_distro_names(output: bytes) -> tuple[str, ...]:
    """Return the names in the output of `wsl.exe --list --quiet`, without those that cannot
    train.
    """
    # An older wsl.exe does not know WSL_UTF8 and writes UTF-16.
    text = output.decode("utf-16-le" if b"\0" in output else "utf-8", "replace")
    # The distros of Docker Desktop run its engine and cannot train.
    names = (line.strip().lstrip("\ufeff") for line in text.splitlines())
    return tuple(name for name in names if name and not name.startswith("docker-desktop"))


def find_wsl(environ: Mapping[str, str]) -> str:
    """Return the path of `wsl.exe`.


    Raises:
        NodeNotReady: this PC has no WSL.
    """
    program_files = environ.get("ProgramFiles", "")
    windows = environ.get("SystemRoot", "")
    # The MSI build comes first: the stub in System32 does not work in every kind of session.
    places = (
        str(Path(program_files, "WSL", "wsl.exe")) if program_files else None,
        shutil.which("wsl.exe", path=environ.get("PATH")),
        str(Path(windows, "System32", "wsl.exe")) if windows else None,
        "/mnt/c/Program Files/WSL/wsl.exe",
        "/mnt/c/Windows/System32/wsl.exe",
    )
    for place in places:
        if place and os.path.isfile(place):
            return place
    raise NodeNotReady(
        "There is no wsl.exe on this PC",
        "On Windows, install WSL with: wsl --install; on Linux, add the node with --ssh or --local",
    )


class _ChildProtocol(asyncio.SubprocessProtocol):
    """Forwards the events of a child process to its `Process`, whose `Pipe` it is."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._transport: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        stdin = transport.get_pipe_transport(0)
        if isinstance(stdin, asyncio.WriteTransport):
            stdin.set_write_buffer_limits(high=WRITE_AHEAD_BYTES)
        self._process.attach(self)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        (self._process.feed if fd == 1 else self._process.feed_stderr)(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._process.end_output()
        elif fd == 0:
            # Wakes a waiting writer, whose next write then raises BrokenPipeError.
            self._process.resume_writing()

    def process_exited(self) -> None:
        if self._transport is not None:
            self._process.exited(self._transport.get_returncode())

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.closed(None if exc is None else str(exc))

    def pause_writing(self) -> None:
        self._process.pause_writing()

    def resume_writing(self) -> None:
        self._process.resume_writing()

    def write(self, data: bytes) -> None:
        stdin = self._transport and self._transport.get_pipe_transport(0)
        if not isinstance(stdin, asyncio.WriteTransport) or stdin.is_closing():
            raise BrokenPipeError("the command has closed its input")
        stdin.write(data)

    def write_eof(self) -> None:
        stdin = self._transport and self._transport.get_pipe_transport(0)
        if isinstance(stdin, asyncio.WriteTransport) and not stdin.is_closing():
            stdin.close()

    def pause_reading(self) -> None:
        stdout = self._transport and self._transport.get_pipe_transport(1)
        if isinstance(stdout, asyncio.ReadTransport) and not stdout.is_closing():
            stdout.pause_reading()

    def resume_reading(self) -> None:
        stdout = self._transport and self._transport.get_pipe_transport(1)
        if isinstance(stdout, asyncio.ReadTransport) and not stdout.is_closing():
            stdout.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
