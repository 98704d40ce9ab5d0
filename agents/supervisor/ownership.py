"""Who owns the ranks of an attempt on this node: always exactly one supervisor.

From started.json to exit.json that is the process which started.json names. If it is killed, its
ranks train on, and the first one to notice starts another supervisor, which adopts them: the
recorder, which looks each second also when no master is connected, each request about attempts, the
process of an election, and the ranks themselves, for the case that nobody else is left.
The launch lock of the run decides between several that notice at once. The new supervisor leases
the devices again, watches and stops the ranks as the first one did, and records their end. It ends
them at once if a newer attempt has replaced theirs, or if the first one had not started them all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from agents.contract.names import is_safe_name
from agents.contract.run_layout import EXIT_FILE, INTENT_FILE, attempt_of_folder
from agents.errors import ExpectedError
from agents.state import Home, boot_id, locked, read_json
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.election_process import keep_election
from agents.supervisor.leases import lease_devices, release
from agents.supervisor.stalls import read_process_state
from agents.supervisor.start import start_supervisor
from agents.supervisor.sweep import Tag, Tagged, find_processes, read_tagged, sweep

LOCK_TIMEOUT_S = 40.0
STRAY_S = 10.0
"""Time after the recorded end of an attempt in which its supervisor may still be there, and time
between two searches for processes that nobody can own, in seconds."""
STOPPED_LOOKS = 3
"""Number of looks in a row that find a supervisor stopped before it is continued: programs that
limit the use of a CPU stop processes for moments."""
RETRY_S = 10.0
"""Time between two tries to start a supervisor that cannot start, in seconds."""


def is_ownerless(attempt: AttemptFolder) -> bool:
    """Return whether processes of an attempt live without a supervisor."""
    supervisor = attempt.read_supervisor()
    # Without a name in started.json it is still starting, and its launch waits for it.
    if supervisor is None or supervisor.is_alive() or attempt.file(EXIT_FILE).exists():
        return False
    return supervisor.boot_id == boot_id() and bool(find_processes(attempt.tag))


def keep_owned(attempt: AttemptFolder) -> None:
    """Start another supervisor if the one of living ranks is gone; return once it has them.

    Raises:
        ExpectedError: it cannot be started.
    """
    if not is_ownerless(attempt):
        return
    lock = attempt.home.run(attempt.run_id) / "launch.lock"
    with locked(lock, LOCK_TIMEOUT_S, f"Run {attempt.run_id} is being launched."):
        # Asked again: another process may have done it meanwhile.
        intent = attempt.read_intent()
        if intent is None or not is_ownerless(attempt):
            return
        devices = [place.device_id for place in intent.ranks if place.node == intent.node]
        held = lease_devices(attempt.home, attempt.tag, devices, intent.node)
        try:
            start_supervisor(attempt, held)
        finally:
            release(held)  # the supervisor has inherited the locks


def keep_all_owned(home: Home, besides: str | None = None) -> bool:
    """Do so for each attempt that holds a device of this node; return whether all are owned.

    Args:
        home: of the agent.
        besides: id of a run that is left as it is; None: none.
    """
    are_owned = True
    for attempt in _find_leasing(home):
        if attempt.run_id != besides:
            try:
                keep_owned(attempt)
            except ExpectedError:
                are_owned = False
    return are_owned


def _find_leasing(home: Home) -> Iterator[AttemptFolder]:
    """Return each attempt that a lease of this node names."""
    # Reading all folders each second would cost too much.
    for path in home.leases.glob("*.lock"):
        named = read_json(path) or {}
        run_id, number = named.get("run_id"), named.get("attempt")
        # Other work on a device leaves no ids.
        if isinstance(run_id, str) and isinstance(number, int) and is_safe_name(run_id):
            yield AttemptFolder(home, run_id, number)


def end_strays(home: Home, tagged: Tagged | None = None) -> list[Tag]:
    """End processes of this home that nobody can own; return their attempts.

    Those are processes whose attempt has no folder any more, and what is left of an attempt whose
    end was recorded a while ago.
    """
    found: dict[Path, Tag] = {}
    for _, environ in read_tagged() if tagged is None else tagged:
        folder = Path(os.fsdecode(environ.get(b"RACKLESS_ATTEMPT_DIR", b"")))
        # By name alone: whatever carries a tag may name any folder, or none.
        run_id, number = folder.parent.parent.name, attempt_of_folder(folder.name)
        # Another agent of this PC, with another home, looks after its own.
        if number is None or not is_safe_name(run_id) or folder != home.attempt(run_id, number):
            continue
        if folder not in found and _is_abandoned(folder):
            found[folder] = Tag(run_id, number, folder)
    return [tag for tag in found.values() if not sweep(tag, 0.0)]


def _is_abandoned(folder: Path) -> bool:
    try:
        return time.time() - (folder / EXIT_FILE).stat().st_mtime > STRAY_S
    except OSError:
        # The intent is written before any process of an attempt is started.
        return not (folder / INTENT_FILE).exists()


class OwnershipWatch:
    """Keeps the attempts of a home owned, for a process that looks each second."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._due_s = 0.0
        self._strays_due_s = 0.0
        self._stopped: dict[int, int] = {}
        """Number of looks in a row that found a supervisor stopped, by its process id."""

    def look(self) -> None:
        """Look, unless a supervisor could not be started moments ago."""
        leasing = list(_find_leasing(self._home))
        self._continue_stopped(leasing)
        for attempt in leasing:
            keep_election(attempt)
        now_s = time.monotonic()
        if now_s >= self._strays_due_s:
            # Reads the environment of every process of this PC, so not each second.
            self._strays_due_s = now_s + STRAY_S
            end_strays(self._home)
        if now_s >= self._due_s and not keep_all_owned(self._home):
            self._due_s = now_s + RETRY_S

    def _continue_stopped(self, attempts: Iterable[AttemptFolder]) -> None:
        """Let supervisors that somebody has stopped go on: nobody else watches their ranks."""
        found = {}
        for attempt in attempts:
            supervisor = attempt.read_supervisor()
            # Not "t", in which a debugger holds it.
            if supervisor and supervisor.is_alive() and read_process_state(supervisor.pid) == "T":
                found[supervisor.pid] = self._stopped.get(supervisor.pid, 0) + 1
        self._stopped = found
        for pid, num_looks in found.items():
            if num_looks >= STOPPED_LOOKS:
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGCONT)
