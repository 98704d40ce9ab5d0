"""Run a program on behalf of a request: its lines as they come, a deadline, no orphan left behind.

Each child has a session of its own, so that its whole group can be ended when the deadline passes
or the master goes away. Ranks are not started here: they outlive the connection (supervisor/).
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

KEPT_LINES = 200

# How often a reader that hears nothing looks whether it should go.
_LOOK_S = 0.5

# How long the end waits until the readers have reaped what was killed.
_REAP_S = 5.0


class Children:
    """The programs that run now for a request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self.is_cancelled = False
        """Somebody does not want what they do any more."""

    @property
    def is_busy(self) -> bool:
        """Tell whether one of them runs."""
        return bool(self._running)

    @property
    def is_closed(self) -> bool:
        """Tell whether nothing can be started any more."""
        return self._closed

    def run(
        self,
        argv: Sequence[str],
        *,
        environ: dict[str, str] | None = None,
        timeout_s: float | None = None,
        on_line: Callable[[str], None] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> tuple[int, list[str]]:
        """Return the exit code and the last lines of stdout and stderr, each whole, as they came.

        Raises:
            ExpectedError: the program could not be started.
            TimeoutError: it ran longer than `timeout_s` and was ended.
        """
        process = self._start(argv, environ, stdin)
        kept: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            for line in self._read_text(process, timeout_s):
                kept.append(line)
                if on_line is not None:
                    on_line(line)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            end_group(process)
            return process.returncode, list(kept)
        finally:
            end_group(process)
            with self._lock:
                self._running.discard(process)

    def cancel(self) -> None:
        """Kill what still runs, because nobody wants it any more."""
        self.is_cancelled = True
        self.end_all()

    def end_all(self) -> None:
        """Kill what still runs; nothing can be started afterwards.

        The thread in `run` alone reaps its child and closes the pipe: another's hand on either
        would pull the descriptor or the process id from under it.
        """
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
                raise ExpectedError(f"The agent is ending and starts nothing more: {argv[0]}.")
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, **(environ or {})},
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise explain_os_error(error, f"starting {argv[0]}") from error
            self._running.add(process)
            return process

    def _read_text(
        self, process: subprocess.Popen[bytes], timeout_s: float | None
    ) -> Iterator[str]:
        """Yield the lines until all who hold the pipes have ended, or `end_all` was called.

        Each stream has a pipe of its own, because libraries log in threads: in one pipe half a
        line of theirs on stderr would stand before a line on stdout, which nobody understands.
        """
        rests = {pipe.fileno(): b"" for pipe in _pipes(process)}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while rests:
            left_s = _LOOK_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no end after {timeout_s:g} s")
            readable, _, _ = select.select(list(rests), [], [], min(left_s, _LOOK_S))
            if not readable and self._closed:
                break
            for source in readable:
                block = os.read(source, 1 << 16)
                *lines, rest = (rests[source] + block).replace(b"\r", b"\n").split(b"\n")
                if block:
                    rests[source] = rest[-(1 << 16) :]
                else:
                    lines.append(rests.pop(source))
                yield from (line.decode("utf-8", "replace") for line in lines if line.strip())


def _pipes(process: subprocess.Popen[bytes]) -> list[IO[bytes]]:
    return [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the child's whole group, then reap the child (in this order: its id stays taken)."""
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
