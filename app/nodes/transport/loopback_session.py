"""Connect an SSH channel with the child process of one command, for the loopback server.

Bytes pass unchanged, and each side is paused when the other does not keep up.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence

import asyncssh

_HIGH_WATER_BYTES = 1 << 20
_EXIT_NOT_FOUND = 127


class CommandSession(asyncssh.SSHServerSession[bytes]):
    """Server session that runs one command."""

    def __init__(self, shell: Sequence[str], environ: Mapping[str, str], folder: str) -> None:
        self._shell = tuple(shell)
        self._environ = dict(environ)
        self._folder = folder
        self._command = ""
        self._channel: asyncssh.SSHServerChannel[bytes] | None = None
        self._child: asyncio.SubprocessTransport | None = None
        self._starting: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._input_ended = False

    # ------------------------------------------------------------ from the client

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        chan.set_encoding(None)
        chan.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._channel = chan
        peer, own = chan.get_extra_info("peername"), chan.get_extra_info("sockname")
        self._environ["SSH_CONNECTION"] = f"{peer[0]} {peer[1]} {own[0]} {own[1]}"
        self._environ["SSH_CLIENT"] = f"{peer[0]} {peer[1]} {own[1]}"

    def exec_requested(self, command: str) -> bool:
        self._command = command
        return True

    def session_started(self) -> None:
        if self._channel is not None:
            # There is no stdin to write to until the child has started.
            self._channel.pause_reading()
        self._starting = asyncio.get_running_loop().create_task(self._start())

    def data_received(self, data: bytes, datatype: int | None) -> None:
        stdin = self._pipe(0)
        if self._child is None:
            self._early.append(data)
        elif isinstance(stdin, asyncio.WriteTransport) and not stdin.is_closing():
            stdin.write(data)

    def eof_received(self) -> bool:
        self._input_ended = True
        self._close_pipes(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        # As with a real sshd, the command is not killed: its stdio is closed, and detached
        # processes live on.
        self._input_ended = True
        self._channel = None
        self._close_pipes(0, 1, 2)

    def pause_writing(self) -> None:
        for pipe in (self._pipe(1), self._pipe(2)):
            if isinstance(pipe, asyncio.ReadTransport) and not pipe.is_closing():
                pipe.pause_reading()

    def resume_writing(self) -> None:
        for pipe in (self._pipe(1), self._pipe(2)):
            if isinstance(pipe, asyncio.ReadTransport) and not pipe.is_closing():
                pipe.resume_reading()

    # ------------------------------------------------------------ from the command

    def started(self, child: asyncio.SubprocessTransport) -> None:
        self._child = child
        stdin = self._pipe(0)
        if isinstance(stdin, asyncio.WriteTransport):
            stdin.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
            for data in self._early:
                stdin.write(data)
        self._early.clear()
        if self._input_ended:
            self._close_pipes(0)
        if self._channel is None:
            self._close_pipes(1, 2)
        else:
            self._channel.resume_reading()

    def output(self, fd: int, data: bytes) -> None:
        if self._channel is None:
            return
        if fd == 1:
            self._channel.write(data)
        else:
            self._channel.write_stderr(data)

    def hold_input(self) -> None:
        if self._channel is not None:
            self._channel.pause_reading()

    def release_input(self) -> None:
        if self._channel is not None:
            self._channel.resume_reading()

    def ended(self, code: int) -> None:
        if self._channel is None or self._channel.is_closing():
            return
        if code >= 0:
            self._channel.exit(code)
        else:
            # RFC 4254, 6.10: signals are named without their SIG.
            self._channel.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))

    # ------------------------------------------------------------ inside

    async def _start(self) -> None:
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: _SessionProtocol(self),
                *self._shell,
                self._command,
                env=self._environ,
                cwd=self._folder,
                start_new_session=True,
            )
        except OSError as error:
            self.output(2, f"{self._shell[0]}: {error.strerror}\n".encode())
            self.ended(_EXIT_NOT_FOUND)

    def _pipe(self, fd: int) -> asyncio.BaseTransport | None:
        return None if self._child is None else self._child.get_pipe_transport(fd)

    def _close_pipes(self, *fds: int) -> None:
        for fd in fds:
            pipe = self._pipe(fd)
            if pipe is not None and not pipe.is_closing():
                pipe.close()


class _SessionProtocol(asyncio.SubprocessProtocol):
    """Forwards the events of the child process to its session."""

    def __init__(self, session: CommandSession) -> None:
        self._session = session
        self._child: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._child = transport
        self._session.started(transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._session.output(fd, data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 0:
            self._session.release_input()

    def pause_writing(self) -> None:
        self._session.hold_input()

    def resume_writing(self) -> None:
        # Not at once: asyncio calls this in the middle of emptying its buffer, and when the waiting
        # input ends here, it would close the pipe and lose what was written just now.
        asyncio.get_running_loop().call_soon(self._session.release_input)

    def connection_lost(self, exc: Exception | None) -> None:
        code = None if self._child is None else self._child.get_returncode()
        killed = signal.Signals["SIGKILL"]  # by name, because Windows does not have it
        self._session.ended(-killed if code is None else code)
