"""One started rank of this node, with its heartbeat, journal and log."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.contract.run_layout import rank_heartbeat, rank_log
from agents.state import Identity, read_json
from agents.supervisor.attempt import AttemptFolder, read_rank_end, read_rank_line
from agents.supervisor.sweep import send_signal

LOG_TAIL_BYTES = 8192
LOG_LINE_CHARACTERS = 400
# Exceptions, messages of the C library, of CUDA and of the kernel.
_TELLING = re.compile(
    r"error|exception|exit|fatal|fail|abort|assert|terminate|kill|panic|invalid|corrupt|denied|"
    r"cannot|can't|could not|unable|no such|not found|out of memory|bad_alloc|fault|overflow|"
    r"what\(\)|died|refused|unexpected|interrupt",
    re.IGNORECASE,
)
# As libraries print them: Python with file and line, glog, logging, and progress bars.
_HARMLESS = re.compile(
    r"""\w*Warning\b
    |^(\[rank\d+\]:)?\[?[WI]\d{4}\b
    |^\W*(\d[\d:.,TZ\ -]+\W*)?([\w.]+\W+)?(WARN(ING)?|INFO|DEBUG|NOTICE)\b
    |\bwarn(ings?)?\b|\bdeprecated\b
    |\d+%\|""",
    re.VERBOSE,
)
_EXCEPTION = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt)\b")


@dataclass
class RankProcess:
    """One rank of this node; only the supervisor changes it."""

    rank: int
    device: str
    identity: Identity
    attempt: AttemptFolder
    started_s: float
    """Time of its start or adoption on the monotonic clock, in seconds."""
    process: subprocess.Popen[bytes] | None = None
    """Child process; None for an adopted rank, which has another parent."""
    exit_code: int | None = None
    """Exit code, negative for the signal that ended it; None while it runs, or if an adopted rank
    left no record of its end."""
    ended_s: float | None = None
    """Time of its end on the monotonic clock, in seconds; None while it runs."""
    kill_cause: str = ""
    """Explanation of a SIGKILL, as far as the kernel reports it."""
    _sent: set[int] = field(default_factory=set)
    """Signals that the supervisor has sent to it."""

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def has_ended(self) -> bool:
        return self.ended_s is not None

    @property
    def has_failed(self) -> bool:
        """True if it has ended with an exit code other than 0."""
        return self.has_ended and self.exit_code != 0

    @property
    def was_ended(self) -> bool:
        """True if a signal of the supervisor killed it, as before a rank has installed handlers."""
        # Python reports death by signal N as exit code -N.
        return self.exit_code is not None and -self.exit_code in self._sent

    @property
    def folder(self) -> Path:
        return self.attempt.folder

    @property
    def log_path(self) -> Path:
        return self.folder / rank_log(self.rank)

    def send_signal(self, number: int) -> None:
        """Signal the rank if it still runs."""
        if self.has_ended:
            return
        self._sent.add(number)
        # An adopted rank is not a child, so its pid may have been reused.
        if self.process is None:
            send_signal(self.attempt.tag, self.pid, number)
        else:
            # The kernel cannot reuse the pid before the child is reaped.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def note_end(self, exit_code: int | None) -> None:
        """Record that the process has ended."""
        self.exit_code, self.ended_s = exit_code, time.monotonic()
        if self.process is not None:
            # The child was reaped elsewhere, so Popen could not get its exit code.
            self.process.returncode = exit_code

    def notice_end(self) -> bool:
        """Return whether an adopted rank has ended since the last call."""
        if self.process is not None or self.has_ended or self.identity.is_alive():
            return False
        # Its exit code went to another parent; its journal has its own record of the end.
        self.note_end(read_rank_end(self.attempt, self.rank).exit_code)
        return True

    def read_heartbeat(self) -> dict[str, Any]:
        return read_json(self.folder / rank_heartbeat(self.rank)) or {}

    def read_last(self, kind: str) -> dict[str, Any]:
        """Return the newest journal line of this kind, or an empty dict."""
        return read_rank_line(self.attempt, self.rank, kind)

    def read_log_tail(self) -> list[str]:
        """Return the last non-blank lines of its output."""
        try:
            with open(self.log_path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                # A rank may have printed gigabytes.
                file.seek(max(0, size - LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [line.strip()[:LOG_LINE_CHARACTERS] for line in text.split("\n") if line.strip()]

    def to_json(self) -> dict[str, Any]:
        beat = self.read_heartbeat()
        return {
            "rank": self.rank,
            "pid": self.pid,
            "start_ticks": self.identity.start_ticks,
            "exit_code": self.exit_code,
            "step": beat.get("step"),
            "phase": beat.get("phase"),
            "last_line": find_telling_line(self.read_log_tail()),
        }


def find_telling_line(lines: Sequence[str]) -> str:
    """Return the last line of a log that says why its process ended; empty if none does.

    Warnings, notices and progress bars of libraries do not.

    >>> find_telling_line(["ValueError: no good", "/lib/a.py:7: FutureWarning: it may fail",
    ...     "warnings.warn(", "[W1128 19:00:01.5 socket.cpp:755] [c10d] hostname not found"])
    'ValueError: no good'
    >>> find_telling_line(["WARNING:root:failed", "Loading:  40%|####  | 2/5 [00:01, 1.9it/s]"])
    ''
    """
    for line in reversed(lines):
        is_harmless = _HARMLESS.search(line) is not None
        if _EXCEPTION.match(line) or (_TELLING.search(line) and not is_harmless):
            return line
    return ""
