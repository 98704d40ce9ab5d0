"""The ranks of this node in one attempt: start or adopt them, wait for them, signal them.

Ranks that this process started are its children, so it gets their exit codes. Ranks that an earlier
supervisor started are found by started.json and their tag. They have another parent now, so their
end shows by a missing process, and its cause by their journal.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.run_layout import STARTED_FILE
from agents.limits import list_groups
from agents.shared.files.logcap import cap_log
from agents.state import Identity, boot_id, identify, identity_from, read_json, write_json
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.journal import AttemptJournal
from agents.supervisor.launcher import Launcher
from agents.supervisor.ranks import RankProcess
from agents.supervisor.sweep import find_processes
from agents.supervisor.verdict import AttemptOutcome, explain_exit

TICK_S = 0.5
MAX_RECORDS = 10_000
_KILLED = re.compile(r"Killed process (\d+) ")
_RECORD_BYTES = 8192


class RankGroup:
    """Ranks of this node; `ranks` includes ended ones."""

    def __init__(
        self,
        attempt: AttemptFolder,
        intent: AttemptIntent,
        identity: Identity,
        journal: AttemptJournal,
        wake: int,
    ) -> None:
        """Create the group; `wake` is a descriptor that becomes readable after a signal."""
        self.ranks: list[RankProcess] = []
        self._attempt = attempt
        self._intent = intent
        self._identity = identity
        self._journal = journal
        self._wake = wake
        self._can_cap_logs = True
        self._memory_kills = MemoryKills()
        self._earlier = read_json(attempt.file(STARTED_FILE)) or {}

    @property
    def is_any_alive(self) -> bool:
        return any(not rank.has_ended for rank in self.ranks)

    # ------------------------------------------------------------ start, adopt

    def start(self, launcher: Launcher) -> AttemptOutcome | None:
        """Start all ranks; return the outcome if one cannot be started."""
        # Before the first rank, so that every started rank has an owner in started.json.
        self._write_started()
        self._journal.write("launched", pid=self._identity.pid)
        for placement in self._placements():
            try:
                rank = launcher.start(self._attempt, self._intent, placement)
            except OSError as error:
                where = f"rank {placement.rank} on node {self._intent.node}"
                return AttemptOutcome(
                    state="failed",
                    message=f"Could not start {where} with {self._intent.python}: {error}.",
                    hint=f"Build the environment again: rackless nodes setup {self._intent.node}",
                )
            self.ranks.append(rank)
            # After each start, because a successor of this process must know all started ranks.
            self._write_started()
            self._journal.write("rank_started", rank=rank.rank, pid=rank.pid)
        return None

    @cached_property
    def has_predecessor(self) -> bool:
        """True if an earlier supervisor has started ranks, or was killed while starting them."""
        if not self._earlier:
            return False
        return bool(self._earlier.get("ranks") or find_processes(self._attempt.tag, os.getpid()))

    def adopt(self) -> AttemptOutcome | None:
        """Take over the ranks of an earlier supervisor; return the outcome if some are missing."""
        listed = self._earlier.get("ranks")
        rows = {row["rank"]: row for row in listed or () if isinstance(row, dict)}
        missing = [place.rank for place in self._placements() if place.rank not in rows]
        for placement in self._placements():
            if placement.rank in rows:
                self.ranks.append(self._adopt_rank(placement, rows[placement.rank]))
        living = [rank.rank for rank in self.ranks if not rank.has_ended]
        self._journal.write("adopted", pid=self._identity.pid, ranks=living)
        self._write_started()
        if not missing:
            return None
        return AttemptOutcome(
            state="failed",
            message=f"The supervisor on node {self._intent.node} was killed while it started the "
            f"ranks; rank {', '.join(map(str, missing))} had not begun.",
            hint=f"Resume it: rackless runs resume {self._intent.run_id}",
        )

    def _adopt_rank(self, placement: RankPlacement, row: dict[str, Any]) -> RankProcess:
        pid = row["pid"]
        # Earlier versions did not write the start time; the tag shows whether the pid was reused.
        identity = identity_from({**row, "boot_id": boot_id()}) or identify(pid)
        if not self._attempt.tag.is_on(pid):
            identity = None
        rank = RankProcess(
            rank=placement.rank,
            device=placement.device,
            identity=identity or Identity(pid, -1, boot_id()),
            attempt=self._attempt,
            started_s=time.monotonic(),
        )
        self._notice(rank)
        return rank

    def _placements(self) -> list[RankPlacement]:
        return [place for place in self._intent.ranks if place.node == self._intent.node]

    def _write_started(self) -> None:
        rows = [
            {"rank": r.rank, "pid": r.pid, "start_ticks": r.identity.start_ticks}
            for r in self.ranks
        ]
        # A successor keeps the start time of the first supervisor.
        began = {"started_s": self._earlier.get("started_s") or time.time()}
        write_json(
            self._attempt.file(STARTED_FILE), {**self._identity.to_json(), **began, "ranks": rows}
        )
        self._earlier |= began

    # ------------------------------------------------------------ signal, wait

    def send_signal(self, number: int) -> None:
        """Signal all living ranks."""
        for rank in self.ranks:
            rank.send_signal(number)

    def wait_for_all(self, patience_s: float) -> None:
        """Wait until all ranks have ended, at most `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while self.is_any_alive:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            self.wait(min(left_s, TICK_S))

    def wait(self, timeout_s: float) -> None:
        """Sleep until a signal or the timeout, then record the ranks that have ended."""
        # select, because the wakeup descriptor of signals ends the sleep without a race.
        if select.select([self._wake], [], [], timeout_s)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        self._cap_logs()
        self._reap()
        for rank in self.ranks:
            self._notice(rank)

    def _reap(self) -> None:
        while True:
            try:
                # Any child: a subreaper also gets orphans that ranks leave behind.
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for rank in self.ranks:
                if rank.pid == pid and rank.process is not None:
                    rank.note_end(os.waitstatus_to_exitcode(status))
                    self._journal_exit(rank)

    def _notice(self, rank: RankProcess) -> None:
        if rank.notice_end():
            self._journal_exit(rank)

    def _journal_exit(self, rank: RankProcess) -> None:
        if rank.exit_code in (None, -signal.SIGKILL):
            rank.kill_cause = self._memory_kills.explain(rank.pid)
        # The user need not be told about a rank that was ended on purpose.
        about = {} if not rank.exit_code or rank.was_ended else {"how": explain_exit(rank)}
        self._journal.write(
            "rank_exited", rank=rank.rank, pid=rank.pid, exit_code=rank.exit_code, **about
        )

    def _cap_logs(self) -> None:
        """Cut large logs, so that a rank that prints endlessly cannot fill the disk."""
        for rank in self.ranks if self._can_cap_logs else ():
            try:
                if cap_log(rank.log_path):
                    self._journal.write("log_cut", rank=rank.rank)
            except FileNotFoundError:
                continue  # the user deleted it
            except OSError as error:
                self._can_cap_logs = False
                self._journal.write("log_not_cut", rank=rank.rank, message=str(error))


class MemoryKills:
    """Out-of-memory kills since this object was created."""

    def __init__(self) -> None:
        readable = (path for path in _find_counters() if _read_count(path) is not None)
        # Ancestors count the kills of their other groups, too.
        self._counters = list(readable)[:1]
        self._before = {path: _read_count(path) for path in self._counters}
        self._of_pc = _read_count(Path("/proc/vmstat"))
        # Lines of the kernel's log by killed process, kept because each line can be read only once.
        self._lines: dict[int, str] = {}
        self._log: int | None = None
        with contextlib.suppress(OSError):  # kernel.dmesg_restrict denies it to most users
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)  # skip older records

    def explain(self, pid: int) -> str:
        """Return who killed this process with SIGKILL, as far as the kernel reports it."""
        for line in self._read_log():
            if found := _KILLED.search(line):
                self._lines[int(found[1])] = line.strip()
        if pid in self._lines:
            return f"the kernel killed it because memory ran out: {self._lines[pid]}"
        # Without the log, the counters tell only that some process was killed meanwhile.
        if any(_read_count(path) != self._before[path] for path in self._counters):
            return "the kernel killed it because the memory of its control group ran out"
        count = _read_count(Path("/proc/vmstat"))
        if count is None or self._of_pc is None:
            return "killed; whether memory ran out cannot be read on this node"
        if count != self._of_pc:
            return "the kernel killed a process then because the memory of this PC ran out"
        return "not by the kernel for lack of memory: a user or another program killed it"

    def _read_log(self) -> list[str]:
        lines: list[str] = []
        while self._log is not None and len(lines) < MAX_RECORDS:
            try:
                record = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # EPIPE: records were overwritten before they were read
            except OSError:
                break
            if not record:
                break
            # priority,sequence,time,flags;message, then lines of key=value
            lines.append(record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0])
        return lines


def _find_counters() -> list[Path]:
    """Return files that count out-of-memory kills in the groups of this process, its own first."""
    return [
        Path(folder, name)
        for folder in list_groups("memory")
        for name in ("memory.events", "memory.oom_control")
    ]


def _read_count(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return None
