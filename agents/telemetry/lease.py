"""Keep one recorder per agent home running while a server renews its lease.

A recorder without a renewal for `LEASE_S` ends by itself, unless a device is in use. A server ends
a recorder of another agent version only once, when it starts: otherwise two masters of different
versions would end each other's recorder again and again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from agents.limits import read_group_limits
from agents.shared.files.python_child import python_environ
from agents.state import Home, agent_command, archive_path, identity_from, read_json, take_lock

LEASE_S = 900.0
"""Time for which a recorder runs after the last renewal, in seconds."""


def keep_recorder(home: Home, archive: str, replace: bool) -> None:
    """Renew the lease, and start a recorder if none runs (with `replace`: none of this version)."""
    renew(home)
    state = read_json(home.telemetry / "recorder.json") or {}
    recorder = identity_from(state)
    if recorder is not None and recorder.is_alive():
        # The path of the archive contains its hash, so it identifies the version.
        is_same = state.get("archive") == archive and _has_own_limits(recorder.pid)
        if not replace or is_same:
            return
        # The new recorder waits for the lock of this one.
        with contextlib.suppress(ProcessLookupError):
            os.kill(recorder.pid, signal.SIGTERM)
    _start(home)


def _has_own_limits(recorder: int) -> bool:
    """Return whether the recorder, and thus its samples, have the limits of this server."""
    return read_group_limits(recorder) == read_group_limits()


def renew(home: Home) -> None:
    """Renew the lease of the recorder."""
    lease = home.telemetry / "lease"
    try:
        lease.touch(mode=0o600)
    except OSError:
        return  # on a full disk, the recording just ends after LEASE_S


def read_renewal(home: Home) -> float:
    """Return a number that changes with each renewal."""
    lease: Path = home.telemetry / "lease"
    try:
        return lease.stat().st_mtime
    except OSError:
        return 0.0


def is_recording(home: Home) -> bool:
    """Return whether a recorder of any PC holds the home."""
    try:
        lock = os.open(home.telemetry / "recorder.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not take_lock(lock, 0.0)
    finally:
        os.close(lock)


def _start(home: Home) -> None:
    process = subprocess.Popen(
        [*agent_command(), "record"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**python_environ(os.environ, archive_path()), "RACKLESS_AGENT_HOME": str(home.path)},
        cwd=home.path,
        start_new_session=True,
    )
    process.wait()  # reaps the first process, which forks and exits at once
