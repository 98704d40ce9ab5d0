"""Run programs for a request, yield their lines as they arrive, and leave no orphans.

Each child has its own session, so that its whole process group can be killed at the deadline or
when the master disconnects. Ranks, which outlive the connection, are started by `supervisor`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from agents.errors import ExpectedError, explain_os_error
from agents.shared.files.python_child import SAFE_FOLDER, python_variables
from agents.shared.login_variables import program_environ

KEPT_LINES = 200
"""Maximum number of lines kept of a program's output."""
_POLL_S = 0.5
"""Interval at which a reader without input checks whether it should end, in seconds."""
_REAP_S = 5.0
"""Maximum wait for the readers to reap killed children, in seconds."""


class Children:
    """The running programs of one request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self.is_cancelled = False
        """True if the request was cancelled."""

    @property
    def is_busy(self) -> bool:
        """True while a program runs or is being started."""
        # A program may already work while `_start` still waits for its `exec`.
        with self._lock:
            return bool(self._running)

    @property
    def is_closed(self) -> bool:
        """True if no more programs can be started."""
        return self._closed

    def run(
        self,
        argv: Sequence[str],
        *,
        environ: dict[str, str] | None = None,
        timeout_s: float | None = None,
        on_line: Callable[[str], None] | None = None,
        stdin: int = subprocess.DEVNULL,
        on_look: Callable[[int], None] | None = None,
    ) -> tuple[int, list[str]]:
        """Run a program; return its exit code and the last lines of stdout and stderr.

        `on_look` is called with its process id at least twice a second, and ends it by an error.

        Raises:
            ExpectedError: the program could not be started.
            TimeoutError: it ran longer than `timeout_s` and was ended.
        """
        process = self._start(argv, environ, stdin)
        kept: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            for line in self._read_text(process, timeout_s, on_look):
                kept.append(line)
                if on_line is not None:
                    on_line(line)
            # Wait without reaping: the pid stays reserved until the whole group is killed.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            end_group(process)
            return process.returncode, list(kept)
        finally:
            end_group(process)
            with self._lock:
                self._running.discard(process)

    def cancel(self) -> None:
        """Kill all programs, because the user cancelled the request."""
        self.is_cancelled = True
        self.end_all()

    def end_all(self) -> None:
        """Kill all programs; no more can be started afterwards."""
        # Only the thread in `run` reaps its child and closes its pipes: otherwise a pid or a
        # descriptor could be reused while `run` still uses it.
        with self._lock:
            self._closed = True
            running = tuple(self._running)
        for process in running:
            _kill_group(process)
        deadline = time.monotonic() + _REAP_S
        while self._running and time.monotonic() < deadline:
            time.sleep(0.005)

    def _start(
        self, argv: Sequence[str], environ: dict[str, str] | None, stdin: int
    ) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise ExpectedError(f"The agent is shutting down and did not start {argv[0]}.")
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**program_environ(os.environ), **python_variables(), **(environ or {})},
                    cwd=SAFE_FOLDER,
                    start_new_session=True,
                )
            except OSError as error:
                raise explain_os_error(error, f"starting {argv[0]}") from error
            self._running.add(process)
            return process

    def _read_text(
        self,
        process: subprocess.Popen[bytes],
        timeout_s: float | None,
        on_look: Callable[[int], None] | None,
    ) -> Iterator[str]:
        """Yield lines until all processes with the pipes have ended, or `end_all` was called."""
        # One pipe per stream, because libraries log in threads: in a shared pipe, half a line on
        # stderr would corrupt the next JSON line on stdout.
        rests = {pipe.fileno(): b"" for pipe in _pipes(process)}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while rests:
            left_s = _POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no end after {timeout_s:g} s")
            readable, _, _ = select.select(list(rests), [], [], min(left_s, _POLL_S))
            # A grandchild in another session survives the kill and may hold the pipe open forever.
            if not readable and self._closed:
                break
            if on_look is not None:
                on_look(process.pid)
            for source in readable:
                block = os.read(source, 1 << 16)
                # Progress bars end their lines with a carriage return.
                *lines, rest = (rests[source] + block).replace(b"\r", b"\n").split(b"\n")
                if block:
                    # A program may print without newlines; keep a limited part.
                    rests[source] = rest[-(1 << 16) :]
                else:
                    lines.append(rests.pop(source))
                yield from (line.decode("utf-8", "replace") for line in lines if line.strip())


def _pipes(process: subprocess.Popen[bytes]) -> list[IO[bytes]]:
    return [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the child's process group, then reap the child."""
    # In this order, because the group's id cannot be reused before its leader is reaped.
    if process.returncode is not None:
        return
    _kill_group(process)
    process.wait()
    for pipe in _pipes(process):
        pipe.close()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
