"""Ownership of the ranks of an attempt on this node: always exactly one supervisor.

From started.json to exit.json, the owner is the process named in started.json. If it is killed, its
ranks continue to train, and another supervisor is started, which adopts them. The first of these to
notice starts it: the recorder, which checks each second even if no master is connected; a request
about attempts; the election process; or a rank itself. The run's launch lock lets only one of them
succeed. The new supervisor leases the devices again, watches and stops the ranks as before, and
records their end. It ends them at once if a newer attempt has replaced theirs, or if the first
supervisor had not started all of them.
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
from agents.supervisor.process_signs import read_process_state
from agents.supervisor.start import start_supervisor
from agents.supervisor.sweep import LEFT_SETTLE_S, Tag, Tagged, find_processes, read_tagged, sweep

LOCK_TIMEOUT_S = 40.0
STRAY_S = 10.0
"""Time for which a supervisor may outlive its exit.json, and time between two searches for
processes without an owner, in seconds."""
STOPPED_LOOKS = 3
"""Number of consecutive checks that must find a supervisor stopped before it is continued; tools
that limit CPU use stop processes for moments."""
RETRY_S = 10.0
"""Time between two tries to start a supervisor, in seconds."""


def is_ownerless(attempt: AttemptFolder) -> bool:
    """Return whether processes of the attempt run without a supervisor."""
    supervisor = attempt.read_supervisor()
    # Without started.json, the supervisor is still starting, and its launch waits for it.
    if supervisor is None or supervisor.is_alive() or attempt.file(EXIT_FILE).exists():
        return False
    return supervisor.boot_id == boot_id() and bool(find_processes(attempt.tag))


def keep_owned(attempt: AttemptFolder) -> None:
    """Start another supervisor if living ranks have none; return once it has adopted them.

    Raises:
        ExpectedError: the supervisor cannot be started.
    """
    if not is_ownerless(attempt):
        return
    lock = attempt.home.run(attempt.run_id) / "launch.lock"
    with locked(lock, LOCK_TIMEOUT_S, f"Run {attempt.run_id} is being launched."):
        # Checked again: another process may have started one during the wait for the lock.
        intent = attempt.read_intent()
        if intent is None or not is_ownerless(attempt):
            return
        devices = [place.device_id for place in intent.ranks if place.node == intent.node]
        held = lease_devices(attempt.home, attempt.tag, devices, intent.node)
        try:
            start_supervisor(attempt, held)
        finally:
            release(held)  # the supervisor has inherited the locks


def keep_all_owned(home: Home, except_run: str | None = None) -> bool:
    """Call `keep_owned` for each attempt that leases a device; return whether all are owned.

    Args:
        home: home of the agent.
        except_run: id of a run to skip, or None.
    """
    are_owned = True
    for attempt in _find_leasing(home):
        if attempt.run_id != except_run:
            try:
                keep_owned(attempt)
            except ExpectedError:
                are_owned = False
    return are_owned


def _find_leasing(home: Home) -> Iterator[AttemptFolder]:
    """Yield each attempt that a lease of this node names."""
    # Leases only: reading the folders of all attempts each second would cost too much.
    for path in home.leases.glob("*.lock"):
        named = read_json(path) or {}
        run_id, number = named.get("run_id"), named.get("attempt")
        # Other work on a device leaves no ids.
        if isinstance(run_id, str) and isinstance(number, int) and is_safe_name(run_id):
            yield AttemptFolder(home, run_id, number)


def end_strays(home: Home, tagged: Tagged | None = None) -> list[Tag]:
    """End processes of this home that cannot get an owner; return their attempts.

    The attempt of such a process has no folder any more, or its end was recorded a while ago.
    """
    found: dict[Path, Tag] = {}
    for _, environ in read_tagged() if tagged is None else tagged:
        folder = Path(os.fsdecode(environ.get(b"RACKLESS_ATTEMPT_DIR", b"")))
        # Only the name is used, because a tagged process may name any folder.
        run_id, number = folder.parent.parent.name, attempt_of_folder(folder.name)
        # Processes of other agent homes on this PC belong to those agents.
        if number is None or not is_safe_name(run_id) or folder != home.attempt(run_id, number):
            continue
        if folder not in found and _is_abandoned(folder):
            found[folder] = Tag(run_id, number, folder)
    return [tag for tag in found.values() if not sweep(tag, 0.0, settle_s=LEFT_SETTLE_S)]


def _is_abandoned(folder: Path) -> bool:
    try:
        return time.time() - (folder / EXIT_FILE).stat().st_mtime > STRAY_S
    except OSError:
        # Not if the intent exists: it is written before the first process of an attempt starts.
        return not (folder / INTENT_FILE).exists()


class OwnershipWatch:
    """Watch that keeps the attempts of a home owned, for a process that calls it each second."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._due_s = 0.0
        self._strays_due_s = 0.0
        self._stopped: dict[int, int] = {}
        """Number of consecutive checks that found a supervisor stopped, by process id."""

    def look(self) -> None:
        """Check all attempts; after a failed start of a supervisor, pause starts for `RETRY_S`."""
        leasing = list(_find_leasing(self._home))
        self._continue_stopped(leasing)
        for attempt in leasing:
            keep_election(attempt)
        now_s = time.monotonic()
        if now_s >= self._strays_due_s:
            # Not each second: it reads the environment of every process of this PC.
            self._strays_due_s = now_s + STRAY_S
            end_strays(self._home)
        if now_s >= self._due_s and not keep_all_owned(self._home):
            self._due_s = now_s + RETRY_S

    def _continue_stopped(self, attempts: Iterable[AttemptFolder]) -> None:
        """Continue supervisors that were stopped (SIGSTOP), because their ranks are unwatched."""
        found = {}
        for attempt in attempts:
            supervisor = attempt.read_supervisor()
            # Not "t": a debugger holds the process then.
            if supervisor and supervisor.is_alive() and read_process_state(supervisor.pid) == "T":
                found[supervisor.pid] = self._stopped.get(supervisor.pid, 0) + 1
        self._stopped = found
        for pid, num_looks in found.items():
            if num_looks >= STOPPED_LOOKS:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGCONT)
