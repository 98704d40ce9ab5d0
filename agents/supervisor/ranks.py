"""Hold one started rank of this node, and read its heartbeat, journal and log."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.run_layout import rank_heartbeat, rank_journal, rank_log
from agents.state import read_json
from agents.supervisor.attempt import read_journal

LOG_TAIL_BYTES = 8192
LOG_LINE_CHARACTERS = 400


@dataclass
class RankProcess:
    """One rank of this node; the supervisor alone changes it."""

    rank: int
    device: str
    process: subprocess.Popen[bytes]
    folder: Path
    started_s: float
    """Time of its start on the monotonic clock, in seconds."""
    exit_code: int | None = None
    """Exit code; negative: the signal that ended it; None: it still runs."""
    ended_s: float | None = None
    """Time of its end on the monotonic clock, in seconds; None: it still runs."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log_path(self) -> Path:
        return self.folder / rank_log(self.rank)

    def send_signal(self, number: int) -> None:
        """Signal the rank; its pid cannot be another's as long as we have not waited for it."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def read_heartbeat(self) -> dict[str, Any]:
        return read_json(self.folder / rank_heartbeat(self.rank)) or {}

    def read_last(self, kind: str) -> dict[str, Any]:
        """Return the newest journal line of this kind, empty when there is none."""
        lines = read_journal(self.folder / rank_journal(self.rank))
        return next((line for line in reversed(lines) if line.get("kind") == kind), {})

    def read_log_tail(self) -> list[str]:
        """Return the last lines of its output that are not blank."""
        try:
            with open(self.log_path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
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
            "exit_code": self.exit_code,
            "step": beat.get("step"),
            "phase": beat.get("phase"),
            "last_line": (self.read_log_tail() or [""])[-1],
        }
