"""Who uses which device: one lock file per device, locked for as long as the supervisor lives.

The launching server takes the locks and the supervisor inherits them as open files, so that "busy"
is answered before anything is written, and the kernel frees a lock with the last process that holds
it. The file's content names the attempt, for the message and for whoever only wants to look.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from agents.errors import UserError, explain_os_error
from agents.state import Home, identity_from, read_json, take_lock
from agents.supervisor.sweep import Tag, describe_unkillable, find_processes, sweep

PATIENCE_S = 1.0
"""How long a device may still be held by a supervisor that is just ending."""


def lease_devices(home: Home, tag: Tag, device_ids: list[str], node: str) -> list[int]:
    """Lock each device and return the open files; the caller must close or hand them on.

    Raises:
        UserError: a device is held by another attempt, or its leftovers still run.
    """
    held: list[int] = []
    try:
        for device_id in sorted(set(device_ids)):
            held.append(_lease(home, tag, device_id, node))
    except BaseException:
        release(held)
        raise
    return held


def release(held: list[int]) -> None:
    """Give the locks back."""
    for lock in held:
        os.close(lock)


def sign(held: list[int], tag: Tag, identity: dict[str, Any]) -> None:
    """Write into each locked file who holds it."""
    content = json.dumps({"run_id": tag.run_id, "attempt": tag.attempt, **identity}).encode("ascii")
    for lock in held:
        os.pwrite(lock, content, 0)
        os.ftruncate(lock, len(content))


def is_any_held(home: Home) -> bool:
    """Tell whether an attempt is alive on this node, without touching a lock."""
    for path in home.leases.glob("*.lock"):
        holder = identity_from(read_json(path))
        if holder is not None and holder.is_alive():
            return True
    return False


def find_holder(home: Home, device_id: str) -> str | None:
    """Return the id of the run that uses a device now, without touching its lock; None: none."""
    found = read_json(_lock_file(home, device_id))
    holder = identity_from(found)
    if found is None or holder is None or not holder.is_alive():
        return None
    return str(found.get("run_id", "another run"))


def _lock_file(home: Home, device_id: str) -> Path:
    return home.leases / f"{re.sub('[^A-Za-z0-9._-]', '_', device_id)}.lock"


def _lease(home: Home, tag: Tag, device_id: str, node: str) -> int:
    path = _lock_file(home, device_id)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise explain_os_error(error, f"opening {path}") from error
    try:
        if not take_lock(lock, PATIENCE_S):
            raise _busy(path, device_id, node)
        _require_no_leftovers(home, path, tag, device_id, node)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _busy(path: Path, device_id: str, node: str) -> UserError:
    run_id = (read_json(path) or {}).get("run_id", "another run")
    return UserError(
        f"Node {node} is already busy: run {run_id} uses {_name(device_id)}.",
        f"Wait for it, or stop it: rackless runs stop {run_id}",
    )


def _require_no_leftovers(home: Home, path: Path, tag: Tag, device_id: str, node: str) -> None:
    """Refuse a device whose last supervisor was killed while its ranks still run.

    Those of an older attempt of this same run are ended: the new attempt takes their place.
    """
    last = read_json(path) or {}
    run_id, attempt = last.get("run_id"), last.get("attempt")
    if not isinstance(run_id, str) or not isinstance(attempt, int):
        return
    if (run_id, attempt) == (tag.run_id, tag.attempt):
        return
    old = Tag(run_id, attempt, home.attempt(run_id, attempt))
    if run_id == tag.run_id and attempt < tag.attempt and (stuck := sweep(old, 0.0)):
        raise UserError(describe_unkillable(stuck, node), "Restart that PC")
    left = find_processes(old)
    if left:
        raise UserError(
            f"Node {node} is already busy: {len(left)} processes of run {run_id} (attempt "
            f"{attempt}), whose supervisor is gone, still use {_name(device_id)}.",
            f"End them: rackless runs stop {run_id}",
        )


def _name(device_id: str) -> str:
    return "its CPU" if device_id == "cpu" else f"GPU {device_id}"
