"""Read the folder of an attempt: its intent, its state and its ranks.

Files decide the state: intent.json is written before the first fork, started.json by the
supervisor, stop.json by a stop request, exit.json at the end. Without exit.json and a living
supervisor, processes decide: an attempt with living ranks is running, because `ownership` starts
another supervisor for them. If no rank lives, the ranks' journals show whether they finished; an
attempt without any record of its end is `lost` (power cut, reboot).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from agents.contract import run_layout
from agents.contract.json_text import parse_json
from agents.contract.names import is_safe_name
from agents.contract.regroup import Regroup, may_regroup
from agents.contract.run import (
    UNKNOWN_NODE,
    AttemptIntent,
    AttemptState,
    AttemptStatus,
    FailureCause,
    MasterIdentity,
    RankStatus,
)
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.state import Home, Identity, boot_id, boot_time_s, identity_from, read_json, write_json
from agents.supervisor.sweep import Tag, Tagged, find_processes

STATES = ("stopped", "done", "failed")
EXIT_USER_ERROR = 3
"""Exit code of a rank that has recorded its failure in its journal."""


@dataclass(frozen=True)
class RankEnd:
    """A rank's own record of its end."""

    exit_code: int | None = None
    """Exit code that follows from the record, or None without a record."""
    reason: str = ""
    """`completed` or `stopped` if the rank finished, else empty."""
    time_s: float | None = None
    """Time of the record on the wall clock, in seconds since 1970."""


@dataclass(frozen=True)
class AttemptFolder:
    """One attempt's folder on this node."""

    home: Home
    run_id: str
    number: int

    @cached_property
    def folder(self) -> Path:
        return self.home.attempt(self.run_id, self.number)

    @property
    def tag(self) -> Tag:
        return Tag(self.run_id, self.number, self.folder)

    def file(self, name: str) -> Path:
        return self.folder / name

    def read_intent(self) -> AttemptIntent | None:
        """Return the intent of the attempt, or None if it is missing or unreadable."""
        value = read_json(self.file(run_layout.INTENT_FILE))
        try:
            return None if value is None else from_wire(AttemptIntent, value)
        except WireError:
            return None

    def read_supervisor(self) -> Identity | None:
        return identity_from(read_json(self.file(run_layout.STARTED_FILE)))

    def require(self) -> None:
        """Raise ExpectedError unless this node knows the attempt."""
        if not self.file(run_layout.INTENT_FILE).exists():
            raise ExpectedError(f"This node has no attempt {self.number} of run {self.run_id}.")


def find_attempts(home: Home) -> list[AttemptFolder]:
    """Return all attempts on this node, sorted by run and number."""
    found = []
    for path in home.runs.glob(f"*/{run_layout.ATTEMPTS}/*/{run_layout.INTENT_FILE}"):
        number, run_id = run_layout.attempt_of_folder(path.parent.name), path.parents[2].name
        # Folders of runs that are being deleted are hidden, and hidden names are not safe names.
        if number is not None and is_safe_name(run_id):
            found.append(AttemptFolder(home, run_id, number))
    return sorted(found, key=lambda attempt: (attempt.run_id, attempt.number))


def read_status(attempt: AttemptFolder, tagged: Tagged | None = None) -> AttemptStatus:
    """Return the status of an attempt from its files and processes.

    Args:
        attempt: folder of the attempt.
        tagged: tagged processes of this PC, if the caller has read them for many attempts.

    Raises:
        ExpectedError: this node has no such attempt.
    """
    attempt.require()
    intent = attempt.read_intent()
    started = read_json(attempt.file(run_layout.STARTED_FILE)) or {}
    ended = read_json(attempt.file(run_layout.EXIT_FILE))
    supervisor = identity_from(started)  # started.json contains the supervisor's identity
    processes = find_processes(attempt.tag, among=tagged)
    if ended is None and not (supervisor and supervisor.is_alive()):
        # Read again: it may have ended between the first read and the check for the supervisor.
        ended = read_json(attempt.file(run_layout.EXIT_FILE))
        if ended is None and supervisor is not None and not processes:
            ended = _recall_end(attempt, intent, started)
    # Before exit.json exists, only the journal has exit codes and standstills.
    journal = [] if ended else read_journal(attempt.file(run_layout.SUPERVISOR_JOURNAL))
    state, message, hint = _judge(attempt, supervisor, ended, processes, journal)
    status = AttemptStatus(
        run_id=attempt.run_id,
        attempt=attempt.number,
        node=intent.node if intent else UNKNOWN_NODE,
        state=state,
        message=message,
        hint=hint,
        supervisor_pid=supervisor.pid if supervisor and ended is None else None,
        ranks=_read_ranks(attempt, started, ended, state, journal),
        started_s=started.get("started_s"),
        ended_s=(ended or {}).get("ended_s"),
        num_processes=len(processes),
        # Missing in files of earlier versions, as are the next two.
        peer_lost=(ended or {}).get("peer_lost") is True,
        lost_nodes=tuple(map(str, (ended or {}).get("lost_nodes") or ())),
        cause=_read_cause(ended or {}),
        restarted_s=boot_time_s() if state == "lost" and _is_of_earlier_boot(supervisor) else None,
    )
    if intent is None:  # the file exists, but is unreadable
        return status
    owner = read_owner(attempt)
    generation = max((read_generation(attempt, rank.rank) for rank in status.ranks), default=0)
    group = find_group(attempt, generation)
    return replace(
        status,
        spec=intent.spec,
        all_ranks=intent.ranks,
        master=owner or intent.master,
        owner=owner,
        resume_step=intent.resume_step,
        election=intent.election,
        is_confirmed=is_confirmed(attempt, intent),
        may_regroup=may_regroup(intent),
        generation=group.generation if group else 0,
        members=group.nodes if group else (),
        proof=intent.proof,
    )


def _read_cause(ended: dict[str, Any]) -> FailureCause:
    """Return the cause in exit.json, or an empty string if an earlier version wrote the file."""
    known: tuple[FailureCause, ...] = get_args(FailureCause)
    return next((cause for cause in known if cause == ended.get("cause")), "")


def read_owner(attempt: AttemptFolder) -> MasterIdentity | None:
    """Return the master that took over the attempt since its launch, or None."""
    try:
        return from_wire(MasterIdentity, read_json(attempt.file(run_layout.OWNER_FILE)))
    except WireError:
        return None


def read_generation(attempt: AttemptFolder, rank: int) -> int:
    """Return how often a rank's group has regrouped; see `agents.contract.regroup`."""
    generation = (read_json(attempt.file(run_layout.rank_heartbeat(rank))) or {}).get("generation")
    return generation if isinstance(generation, int) else 0


def read_regroup(attempt: AttemptFolder) -> Regroup | None:
    """Return the newest group that this node was asked to join, or None for the initial group."""
    try:
        return from_wire(Regroup, read_json(attempt.file(run_layout.REGROUP_FILE)))
    except WireError:
        return None


def find_group(attempt: AttemptFolder, generation: int) -> Regroup | None:
    """Return the group of ranks of this generation, or None for the initial group."""
    newest = read_regroup(attempt)
    # The file may name a group that its ranks have not joined yet.
    return newest if newest is not None and newest.generation == generation else None


def write_owner(attempt: AttemptFolder, master: MasterIdentity) -> None:
    """Record that `master` has taken over the attempt.

    Raises:
        ExpectedError: this node has no such attempt, or the disk is full.
    """
    attempt.require()
    write_json(attempt.file(run_layout.OWNER_FILE), to_wire(master))


def is_confirmed(attempt: AttemptFolder, intent: AttemptIntent) -> bool:
    """Return whether the master has confirmed that all parts run, or need not confirm it."""
    said = read_json(attempt.file(run_layout.CONFIRMED_FILE)) or {}
    return intent.confirm_s is None or said.get("is_final") is True


def is_over(attempt: AttemptFolder) -> bool:
    """Return whether the attempt has ended or was lost, with as few reads as possible."""
    if attempt.file(run_layout.EXIT_FILE).exists():
        return True
    supervisor = attempt.read_supervisor()
    if supervisor is None:
        return not _is_launching(attempt)
    # Living ranks without a supervisor are adopted, so the attempt continues.
    return not (supervisor.is_alive() or find_processes(attempt.tag))


def _recall_end(
    attempt: AttemptFolder, intent: AttemptIntent | None, started: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the content for exit.json if all ranks finished without a supervisor, else None."""
    if intent is None:
        return None
    local = [place.rank for place in intent.ranks if place.node == intent.node]
    ends = {rank: read_rank_end(attempt, rank) for rank in local}
    # If any rank left no record, the attempt is lost.
    if not ends or not all(end.reason for end in ends.values()):
        return None
    rows = started.get("ranks") or [{"rank": rank} for rank in local]
    return {
        "state": "done" if all(e.reason == "completed" for e in ends.values()) else "stopped",
        "ended_s": max(end.time_s or 0.0 for end in ends.values()),
        "ranks": [{**row, "exit_code": 0} for row in rows if isinstance(row, dict)],
    }


def _judge(
    attempt: AttemptFolder,
    supervisor: Identity | None,
    ended: dict[str, Any] | None,
    processes: Sequence[int],
    journal: Sequence[dict[str, Any]],
) -> tuple[AttemptState, str, str]:
    if ended is not None:
        state = ended.get("state")
        # An unknown state, such as one of a newer version, counts as failed.
        known: AttemptState = state if state in STATES else "failed"
        return known, str(ended.get("message", "")), str(ended.get("hint", ""))
    if supervisor is not None and (supervisor.is_alive() or processes):
        standing = _find_standstill(journal)
        if attempt.file(run_layout.STOP_FILE).exists():
            return "stopping", standing, ""
        ranks = (read_json(attempt.file(run_layout.STARTED_FILE)) or {}).get("ranks")
        return ("running" if ranks else "starting"), standing, ""
    if supervisor is None and _is_launching(attempt):
        return "starting", "", ""
    cause = (
        "this PC was restarted or lost power"
        if _is_of_earlier_boot(supervisor)
        else "its processes were killed"
    )
    return (
        "lost",
        f"Attempt {attempt.number} of run {attempt.run_id} left no record of an end: {cause}.",
        f"Resume from the newest checkpoint: rackless runs resume {attempt.run_id}",
    )


def _is_of_earlier_boot(supervisor: Identity | None) -> bool:
    # Not by the boot time, which moves when the wall clock is set.
    return supervisor is not None and supervisor.boot_id != boot_id()


def _is_launching(attempt: AttemptFolder) -> bool:
    """Return whether a server is launching the attempt, before its supervisor has started."""
    try:
        lock = os.open(attempt.home.run(attempt.run_id) / "launch.lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        # A shared lock, so that two readers do not mistake each other for a launching server.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return bool(find_processes(attempt.tag))
    except BlockingIOError:
        return True  # the launch holds the lock exclusively
    finally:
        os.close(lock)


def _read_ranks(
    attempt: AttemptFolder,
    started: dict[str, Any],
    ended: dict[str, Any] | None,
    state: str,
    journal: Sequence[dict[str, Any]],
) -> tuple[RankStatus, ...]:
    # exit.json is written by the last supervisor and has exit codes; started.json has pids only.
    rows = (ended or {}).get("ranks") or started.get("ranks") or []
    codes = {} if ended else _find_exit_codes(journal)
    # The monotonic clock restarts at boot, so only heartbeats of living ranks have an age.
    alive = state in ("starting", "running", "stopping")
    return tuple(_read_rank(attempt, row, codes, alive) for row in rows if isinstance(row, dict))


def _read_rank(
    attempt: AttemptFolder, row: dict[str, Any], codes: dict[int, int | None], alive: bool
) -> RankStatus:
    rank = int(row["rank"])
    beat = read_json(attempt.file(run_layout.rank_heartbeat(rank))) or {}
    exit_code = row.get("exit_code", codes.get(rank))
    age_s = None
    if alive and rank not in codes and isinstance(beat.get("monotonic_s"), (int, float)):
        age_s = max(0.0, time.monotonic() - beat["monotonic_s"])
    return RankStatus(
        rank=rank,
        pid=row.get("pid"),
        step=beat["step"] if isinstance(beat.get("step"), int) else None,
        phase=str(beat["phase"]) if "phase" in beat else None,
        heartbeat_age_s=age_s,
        exit_code=exit_code,
    )


def _find_exit_codes(journal: Sequence[dict[str, Any]]) -> dict[int, int | None]:
    """Return the exit code of each ended rank; None if it is unknown."""
    lines = [line for line in journal if line.get("kind") == "rank_exited"]
    return {int(line["rank"]): line["exit_code"] for line in lines}


def _find_standstill(journal: Sequence[dict[str, Any]]) -> str:
    """Return the message about the rank that currently stands still, or an empty string."""
    # "moving" ends the standstill that the last "standing" began.
    lines = [line for line in journal if line.get("kind") in ("standing", "moving")]
    newest = lines[-1] if lines else {}
    return str(newest.get("message", "")) if newest.get("kind") == "standing" else ""


def read_rank_line(attempt: AttemptFolder, rank: int, kind: str) -> dict[str, Any]:
    """Return the newest line of this kind in a rank's journal, or an empty dict."""
    lines = read_journal(attempt.file(run_layout.rank_journal(rank)))
    return next((line for line in reversed(lines) if line.get("kind") == kind), {})


def read_rank_end(attempt: AttemptFolder, rank: int) -> RankEnd:
    """Return a rank's own record of its end."""
    # A failure after `finished`, such as during the clean-up, takes precedence.
    for kind, exit_code in (("failed", EXIT_USER_ERROR), ("finished", 0)):
        if line := read_rank_line(attempt, rank, kind):
            reason = str(line.get("reason", "")) if kind == "finished" else ""
            time_s = line.get("time_s")
            known = time_s if isinstance(time_s, (int, float)) else None
            return RankEnd(exit_code, reason, known)
    return RankEnd()


def read_journal(path: Path, tail_bytes: int = 1 << 18) -> list[dict[str, Any]]:
    """Return the last complete lines of a journal; empty if it is unreadable."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail_bytes))
            data = file.read(tail_bytes)
    except OSError:
        return []
    # The first line of the tail may be cut; text after the last newline is still being written.
    lines = data.split(b"\n")[1 if size > tail_bytes else 0 : -1]
    return [value for value in map(_parse, lines) if value]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line, finite=False)
    except WireError:
        return {}
    return value if isinstance(value, dict) else {}
