"""Start and end the process beside a supervisor that recovers the attempt without a master.

It is a process of its own (`agents/election`), because it has to outlive the supervisor, and it has
no tag, because it is not to be swept with the attempt that it recovers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from agents.contract.run import AttemptIntent
from agents.contract.run_layout import CLOSED_FILE, ELECTION_FILE, EXIT_FILE, KEPT_FILE
from agents.shared.files.python_child import python_environ
from agents.state import agent_command, archive_path, identity_from, read_json, write_json
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.fence import read_fence

ELECTION_LOG = "election.log"
END_TIMEOUT_S = 5.0
"""Time for the process to end after SIGTERM, in seconds."""


def start_election(attempt: AttemptFolder, intent: AttemptIntent) -> None:
    """Start the process, if the attempt may be recovered without a master.

    One that cannot be started is no reason to refuse a launch: it trains all the same.
    """
    if intent.election is None or not intent.credential:
        return
    environ = python_environ(os.environ, archive_path())
    untagged = {n: value for n, value in environ.items() if n not in attempt.tag.environ()}
    with contextlib.suppress(OSError), open(attempt.file(ELECTION_LOG), "ab") as log:
        process = subprocess.Popen(
            [*agent_command(), "election", str(attempt.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**untagged, "RACKLESS_AGENT_HOME": str(attempt.home.path)},
            cwd=attempt.folder,
            start_new_session=True,
        )
        process.wait()  # its first process ends at once; without a wait it would stay a zombie


def keep_election(attempt: AttemptFolder) -> None:
    """Start the process again if it was killed while a supervisor watches ranks of the attempt."""
    process = identity_from(read_json(attempt.file(ELECTION_FILE)))
    # Without a file it is still being started, or the attempt has none.
    if process is None or process.is_alive():
        return
    supervisor, intent = attempt.read_supervisor(), attempt.read_intent()
    is_watched = supervisor is not None and supervisor.is_alive()
    is_over = any(attempt.file(name).exists() for name in (CLOSED_FILE, EXIT_FILE))
    newest = read_fence(attempt.home, attempt.run_id)
    if intent is not None and is_watched and not is_over and newest <= attempt.number:
        start_election(attempt, intent)


def keep(attempt: AttemptFolder) -> None:
    """Record that a master looks after the attempt, and recovers it.

    Raises:
        ExpectedError: there is no such attempt here.
    """
    attempt.require()
    # Its time of change counts, as this comes every few seconds; a full disk keeps that.
    with contextlib.suppress(OSError):
        attempt.file(KEPT_FILE).touch(mode=0o600)


def close(attempt: AttemptFolder, reason: str) -> None:
    """Record that the nodes do nothing about the attempt, for good.

    Raises:
        ExpectedError: there is no such attempt here, or the disk is full.
    """
    attempt.require()
    if not attempt.file(CLOSED_FILE).exists():
        write_json(attempt.file(CLOSED_FILE), {"reason": reason, "closed_s": time.time()})


def end_election(attempt: AttemptFolder) -> None:
    """End the process, and wait until it is gone and nothing listens any more."""
    process = identity_from(read_json(attempt.file(ELECTION_FILE)))
    # It is the one that asks, when it launches the next attempt.
    if process is None or process.pid == os.getpid():
        return
    deadline = time.monotonic() + END_TIMEOUT_S
    number = signal.SIGTERM
    while process.is_alive():
        if time.monotonic() >= deadline:
            number = signal.SIGKILL
        with contextlib.suppress(OSError):
            os.kill(process.pid, number)
        time.sleep(0.05)
