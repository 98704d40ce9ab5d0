"""`rackless watch` in the master's namespace: what a person would see, with its time."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.master import Master

LATE_S = 1.0
"""Time from the writing of a line to its arrival from which both are shown, in seconds."""
HOUR_S = 3600.0
"""Time by which a fault may set a clock, in seconds."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line that the keeper printed."""

    time_s: float
    """Time at which it arrived here, in seconds since the epoch."""
    record: dict[str, Any]

    @property
    def text(self) -> str:
        record = self.record
        return str(record.get("text") or f"{record.get('node', '')} {record.get('state', '')}")

    def describe(self, since_s: float) -> str:
        """Return the line with its time after `since_s`, and that at which it was written."""
        written_s = float(self.record.get("time_s", self.time_s))
        is_late = LATE_S < self.time_s - written_s < HOUR_S
        written = f" (written at {written_s - since_s:.1f} s)" if is_late else ""
        return f"{self.time_s - since_s:.1f} s{written}: {self.text}"

    @property
    def kind(self) -> str:
        return str(self.record.get("event") or self.record.get("kind"))


@dataclass
class Keeper:
    """A keeper that can be killed and is started again, as a service would be."""

    master: Master
    lines: list[Line] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    began_s: float = 0.0
    """Time of its last start, in seconds since the epoch."""

    def start(self) -> None:
        self.began_s = time.time()
        self.process = self.master.start("watch", stderr=subprocess.DEVNULL)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                self.lines.append(Line(time.time(), json.loads(line)))
            except ValueError:  # a line that the kill cut
                continue

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def state_of(self, run_id: str, since_s: float = 0.0) -> str:
        """Return the newest state of a run that was printed since a time; empty: none was."""
        for line in reversed(tuple(self.lines)):
            if line.time_s < since_s:
                break
            if line.record.get("kind") == "run" and line.record.get("run_id") == run_id:
                return str(line.record["state"])
        return ""

    def sees_all(self, run_id: str) -> bool:
        """Return whether it has all of its nodes online, and has read the run since its start."""
        nodes = {
            line.record["node"]: line.record["state"]
            for line in tuple(self.lines)
            if line.time_s >= self.began_s and line.record.get("kind") == "node"
        }
        return (
            self.is_alive
            and set(nodes.values()) == {"online"}
            and bool(self.state_of(run_id, self.began_s))
        )

    def told_since(self, run_id: str, since_s: float) -> list[Line]:
        """Return what was told about the run or any node since a time, oldest first."""
        return [
            line
            for line in tuple(self.lines)
            if line.time_s >= since_s
            and (line.record.get("run_id") == run_id or line.record.get("kind") == "node")
            and line.record.get("kind") != "run"
        ]
