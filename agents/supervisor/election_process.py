"""Start and end the process that can recover an attempt without a master (`agents/election`).

It is separate from the supervisor because it has to outlive it. It has no tag, because it must not
be swept with the attempt that it recovers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace

from agents.contract.election import Closing
from agents.contract.run import AttemptIntent
from agents.contract.run_layout import CLOSED_FILE, ELECTION_FILE, EXIT_FILE, KEPT_FILE
from agents.contract.wire import to_wire
from agents.shared.files.python_child import python_environ
from agents.state import agent_command, archive_path, identity_from, read_json, write_json
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.fence import read_fence

ELECTION_LOG = "election.log"
END_TIMEOUT_S = 5.0
"""Maximum time for the process to end after SIGTERM, in seconds."""


def start_election(attempt: AttemptFolder, intent: AttemptIntent) -> None:
    """Start the process if the attempt may be recovered without a master.

    A failure to start it is ignored: the attempt can train without it.
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
        process.wait()  # reaps the first process, which forks and exits at once


def keep_election(attempt: AttemptFolder) -> None:
    """Restart the process if it was killed while the attempt has a supervisor."""
    process = identity_from(read_json(attempt.file(ELECTION_FILE)))
    # Without its file, the process is just starting or the attempt has no election.
    if process is None or process.is_alive():
        return
    supervisor, intent = attempt.read_supervisor(), attempt.read_intent()
    is_watched = supervisor is not None and supervisor.is_alive()
    is_over = any(attempt.file(name).exists() for name in (CLOSED_FILE, EXIT_FILE))
    newest = read_fence(attempt.home, attempt.run_id)
    if intent is not None and is_watched and not is_over and newest <= attempt.number:
        start_election(attempt, intent)


def keep(attempt: AttemptFolder) -> None:
    """Record that a master watches the attempt and would recover it.

    Raises:
        ExpectedError: this node has no such attempt.
    """
    attempt.require()
    # Called every few seconds, so only the mtime is changed, which works on a full disk, too.
    with contextlib.suppress(OSError):
        attempt.file(KEPT_FILE).touch(mode=0o600)


def close(attempt: AttemptFolder, reason: str, closing: Closing | None = None) -> bool:
    """Record that the nodes must never recover the attempt, with the master's word if it is known.

    Returns:
        False if that was recorded before.

    Raises:
        ExpectedError: this node has no such attempt, or the disk is full.
    """
    attempt.require()
    known = read_json(attempt.file(CLOSED_FILE))
    # A part that closed by itself may learn the master's word later, which the others need.
    is_news = closing is not None and closing.signature != ""
    is_known = known is not None and (not is_news or bool(known.get("signature")))
    if not is_known:
        said = to_wire(replace(closing or Closing(), reason=reason))
        write_json(attempt.file(CLOSED_FILE), {**said, "closed_s": time.time()})
    return not is_known


def end_election(attempt: AttemptFolder) -> None:
    """End the process, and wait until it is gone and its port is closed."""
    process = identity_from(read_json(attempt.file(ELECTION_FILE)))
    # The election process itself calls this when it launches the next attempt.
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
