"""Start one rank with torchrun's environment contract, and know what became of it.

Started directly and not through torchrun, which demands equally many ranks on every node and hides
how a rank ended. Output goes to rank-R.log from the first byte, so that even a failed import of
our own package can be read there. The supervisor cuts the middle out of one that grows without end.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.run_layout import rank_heartbeat, rank_journal, rank_log
from agents.state import archive_path, read_json
from agents.supervisor.attempt import AttemptFolder, read_journal

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
    """Monotonic."""
    exit_code: int | None = None
    """Negative: the signal that ended it."""
    ended_s: float | None = None
    """Monotonic."""

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
        """Return the last lines of its output that say anything."""
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


def start_rank(
    attempt: AttemptFolder, intent: AttemptIntent, placement: RankPlacement
) -> RankProcess:
    """Start the rank in a session of its own.

    Raises:
        OSError: the interpreter cannot be started, or the log cannot be made.
    """
    log_path = attempt.file(rank_log(placement.rank))
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [intent.python, "-m", "agents.trainer"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=rank_environ(attempt, intent, placement),
            cwd=attempt.folder,
            start_new_session=True,
        )
    finally:
        os.close(log)
    return RankProcess(
        rank=placement.rank,
        device=placement.device,
        process=process,
        folder=attempt.folder,
        started_s=time.monotonic(),
    )


def rank_environ(
    attempt: AttemptFolder, intent: AttemptIntent, placement: RankPlacement
) -> dict[str, str]:
    """Return the whole environment of one rank."""
    num_local = sum(r.node == intent.node for r in intent.ranks)
    num_threads = intent.num_threads or choose_num_threads(num_local)
    environ = {
        **os.environ,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML counts so, and so do our device names
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        **intent.environ,
        **attempt.tag.environ(),
        "RACKLESS_AGENT_HOME": str(attempt.home.path),
        "PYTHONHOME": "",  # whatever the user's shell sets it to is meant for another Python
        "PYTHONPATH": archive_path(),
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(len(intent.ranks)),
        "LOCAL_WORLD_SIZE": str(num_local),
        "MASTER_ADDR": intent.master_address,
        "MASTER_PORT": str(intent.master_port),
        "OMP_NUM_THREADS": str(num_threads),
    }
    if intent.interface:
        environ["NCCL_SOCKET_IFNAME"] = f"={intent.interface}"
        environ["GLOO_SOCKET_IFNAME"] = intent.interface
    return environ


def choose_num_threads(num_local: int) -> int:
    """Return the CPU threads of a rank: its part of the cores, or fewer where the login says so.

    Nodes that share one PC are told by OMP_NUM_THREADS to leave each other room: three ranks with
    two threads each on two cores need ten times as long as with one.
    """
    share = max(1, len(os.sched_getaffinity(0)) // num_local)
    named = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(named)) if named.isdigit() and int(named) else share
