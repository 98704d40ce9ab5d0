"""Determine whether a rank failed because the file server of its model or data does not answer.

The symptoms differ: a read error, a stale handle, SIGBUS in a mapped file, or a read that never
returns. So another process tries to open the files again.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace

from agents.contract.run import AttemptIntent
from agents.contract.shares import SharedPlace
from agents.shared.files.python_child import SAFE_FOLDER, python_environ
from agents.state import agent_command, archive_path
from agents.supervisor.verdict import AttemptOutcome

PROBE_S = 10.0
"""Maximum time to open the files of a share, in seconds."""
_LOOK_S = 0.02
_CAUSES = ("error", "crashed", "stalled")
_LOST_HANDLE = ("stale file handle", "estale", "host is down", "transport endpoint")


def name_share(
    outcome: AttemptOutcome, intent: AttemptIntent, probe_s: float = PROBE_S
) -> AttemptOutcome:
    """Return the outcome, with a share as its cause if one does not answer."""
    if outcome.state != "failed" or outcome.cause not in _CAUSES or not intent.shared:
        return outcome
    for place, problem in find_silent(intent.shared, probe_s):
        return replace(
            outcome,
            message=f"{place.share}, which node {intent.node} uses in place at {place.path}, "
            f"cannot be read: {problem}. {outcome.message}",
            hint="Start its server, or mount the share again, then resume: "
            f"rackless runs resume {intent.run_id}",
            cause="share_lost",
            peer_lost=False,
        )
    # The share may be back already, but files opened before the outage stay stale.
    if any(sign in outcome.message.lower() for sign in _LOST_HANDLE):
        return replace(outcome, cause="share_lost", peer_lost=False)
    return outcome


def find_silent(places: Sequence[SharedPlace], probe_s: float) -> list[tuple[SharedPlace, str]]:
    """Return the places that cannot be read, with the reason; all are probed in parallel.

    Args:
        places: places on this node.
        probe_s: maximum time for all places, in seconds.
    """
    deadline = time.monotonic() + probe_s
    # Processes, not threads: a thread blocked on a lost server could not be abandoned.
    asked = [(place, _start_probe(place.path)) for place in places]
    found = []
    for place, process in asked:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if process.poll() is None:
            # Not waited for: a process in uninterruptible I/O on a lost server ignores SIGKILL.
            process.kill()
            found.append((place, f"no answer within {probe_s:.0f} s"))
        elif process.returncode and process.stdout is not None:
            said = process.stdout.read().decode("utf-8", "replace").strip()
            found.append((place, said or f"the probe ended with {process.returncode}"))
    return found


def _start_probe(path: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*agent_command(), "probe", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=python_environ(os.environ, archive_path()),
        cwd=SAFE_FOLDER,
        start_new_session=True,
    )
