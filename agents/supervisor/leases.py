"""Leases of devices: one lock file per device, locked while the supervisor lives.

The launching server takes the locks, and the supervisor inherits them as open files: "busy" is
reported before anything is written, and the kernel frees a lock with its last holder. The content
of the file names the attempt, for messages and for readers without a lock. Other work on a GPU,
such as an export, borrows it in the same way for the duration of its request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.names import is_safe_name
from agents.contract.run import MasterIdentity
from agents.errors import ExpectedError, explain_os_error
from agents.state import Home, identify, identity_from, read_json, take_lock, write_json
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.sweep import Tag, describe_unkillable, find_processes, sweep

PATIENCE_S = 1.0
"""Maximum wait for an ending supervisor to free a device, in seconds."""


@dataclass(frozen=True)
class Holder:
    """Work that uses a device."""

    name: str
    """Name of the work, such as `run r-1` or `the export of run r-1`."""
    run_id: str | None
    """Id of the run; None for other work, or a run that has not signed the lock yet."""
    master: MasterIdentity | None = None
    """Master that launched the run; None if unknown or for other work."""

    def describe(self) -> str:
        """Return the name and the master, because the reader may use another master."""
        master = self.master
        return f"{self.name} of {master.user} on {master.host}" if master else self.name


class BorrowedError(ExpectedError):
    """Raised when the work on a device is not a run, or has not signed the lock yet."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(
            message, "Wait for it, or cancel it where it was started", topic="gpu-in-use"
        )
        self.name = name


def lease_devices(home: Home, tag: Tag, device_ids: list[str], node: str) -> list[int]:
    """Lock each device and return the open files; the caller must close them or pass them on.

    Raises:
        ExpectedError: another attempt holds a device, or its leftover processes still run.
    """
    held: list[int] = []
    try:
        # A fixed order: otherwise two launches could each hold a device that the other needs.
        for device_id in sorted(set(device_ids)):
            held.append(_lease(home, tag, device_id, node))
    except BaseException:
        release(held)
        raise
    return held


def release(held: list[int]) -> None:
    """Close the locks."""
    for lock in held:
        os.close(lock)


@contextlib.contextmanager
def borrow_device(
    home: Home, device_id: str, work: str, node: str, wait: Callable[[str], bool]
) -> Iterator[None]:
    """Hold a device within the block, for work that is not a run.

    Args:
        home: home of the agent.
        device_id: UUID of a GPU.
        work: name of the work, such as `the export of run r-1`.
        node: name of this node, for the message.
        wait: called with the name of other work, unless it is a run; returns False to give up.

    Raises:
        ExpectedError: a run uses the device, or `wait` gave up.
    """
    identity = identify(os.getpid())
    while True:
        try:
            lock = _lease(home, None, device_id, node)
            break
        except BorrowedError as busy:
            if not wait(busy.name):
                raise
            time.sleep(PATIENCE_S)
    try:
        _write(lock, {"work": work, **(identity.to_json() if identity else {})})
        yield
    finally:
        with contextlib.suppress(OSError):
            _write(lock, {})  # this process stays alive, so its identity would look like a holder
        os.close(lock)


def sign(held: list[int], tag: Tag, identity: dict[str, Any]) -> None:
    """Write the holder into each locked file."""
    for lock in held:
        _write(lock, {"run_id": tag.run_id, "attempt": tag.attempt, **identity})


def _write(lock: int, content: dict[str, Any]) -> None:
    # In place, not by a rename: a new file would not be locked.
    text = json.dumps(content).encode("ascii")
    os.pwrite(lock, text, 0)
    # An earlier holder may have written a longer text.
    os.ftruncate(lock, len(text))


@contextlib.contextmanager
def announce(home: Home, device_id: str, work: str) -> Iterator[None]:
    """Announce work on a device within the block, without excluding other work.

    Merges, previews and chats share a device; the announcement explains why it is busy.
    """
    identity = identify(os.getpid())
    path = home.leases / f"work-{os.getpid()}-{secrets.token_hex(4)}.json"
    try:
        said = {"work": work, "device": device_id, **(identity.to_json() if identity else {})}
        with contextlib.suppress(OSError, ExpectedError):  # a full disk must not stop the work
            write_json(path, said)
        yield
    finally:
        path.unlink(missing_ok=True)


def find_uses(home: Home, device_ids: Sequence[str]) -> dict[str, Holder]:
    """Return the work of Rackless on each busy device; takes no lock."""
    found: dict[str, Holder] = {}
    for path in home.leases.glob("work-*.json"):
        said, identity = read_json(path), identity_from(read_json(path))
        if said is None or identity is None or not identity.is_alive():
            path.unlink(missing_ok=True)  # its process was killed
        else:
            found[str(said.get("device"))] = Holder(str(said.get("work")), None)
    # A lease takes precedence, because it is exclusive.
    held = {device_id: find_holder(home, device_id) for device_id in device_ids}
    found |= {device_id: holder for device_id, holder in held.items() if holder is not None}
    return {device_id: found[device_id] for device_id in device_ids if device_id in found}


def is_any_held(home: Home) -> bool:
    """Return whether any device of this node is in use; takes no lock."""
    # Not by trying the locks: a trial would make a concurrent launch see a busy device.
    for path in home.leases.glob("*.lock"):
        holder = identity_from(read_json(path))
        if holder is not None and holder.is_alive():
            return True
    return False


def find_job(home: Home) -> str:
    """Return the name of work other than a run on this node, or an empty string; takes no lock."""
    for path in (*home.leases.glob("work-*.json"), *home.leases.glob("*.lock")):
        holder = _read_holder(home, path)
        if holder is not None and holder.run_id is None:
            return holder.name
    return ""


def find_holder(home: Home, device_id: str) -> Holder | None:
    """Return the work that uses a device, or None if it is free; takes no lock."""
    return _read_holder(home, _lock_file(home, device_id))


def _read_holder(home: Home, path: Path) -> Holder | None:
    found = read_json(path)
    identity = identity_from(found)
    if found is None or identity is None or not identity.is_alive():
        return None
    if "work" in found:
        return Holder(str(found["work"]), None)
    run_id, attempt = str(found.get("run_id")), found.get("attempt")
    return Holder(f"run {run_id}", run_id, _read_master(home, run_id, attempt))


def _read_master(home: Home, run_id: str, attempt: object) -> MasterIdentity | None:
    if not isinstance(attempt, int) or not is_safe_name(run_id):
        return None
    # The id comes from a file, so it was checked before it became part of a path.
    intent = AttemptFolder(home, run_id, attempt).read_intent()
    return intent.master if intent else None


def _lock_file(home: Home, device_id: str) -> Path:
    return home.leases / f"{re.sub('[^A-Za-z0-9._-]', '_', device_id)}.lock"


def _lease(home: Home, tag: Tag | None, device_id: str, node: str) -> int:
    path = _lock_file(home, device_id)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise explain_os_error(error, f"opening {path}") from error
    try:
        if not take_lock(lock, PATIENCE_S):
            raise _busy(home, path, device_id, node)
        _require_no_leftovers(home, path, tag, device_id, node)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _busy(home: Home, path: Path, device_id: str, node: str) -> ExpectedError:
    holder = _read_holder(home, path) or Holder("a run that is just starting", None)
    message = f"Node {node} is already busy: {holder.describe()} uses {_name(device_id)}."
    if holder.run_id is None:
        return BorrowedError(message, holder.name)
    # With --node, because the reader's master may not know the run.
    stop = f"rackless runs stop {holder.run_id} --node {node}"
    return ExpectedError(message, f"Wait for it, or stop it: {stop}", topic="gpu-in-use")


def _require_no_leftovers(
    home: Home, path: Path, tag: Tag | None, device_id: str, node: str
) -> None:
    """Refuse a device whose last supervisor was killed while its ranks still run.

    Leftover processes of an older attempt of the same run are ended, because it is replaced.
    """
    last = read_json(path) or {}
    run_id, attempt = last.get("run_id"), last.get("attempt")
    # Other work leaves no ids, and its programs end with their request.
    if not isinstance(run_id, str) or not isinstance(attempt, int):
        return
    # A repeated launch of the same attempt must not count its own processes as leftovers.
    if tag is not None and (run_id, attempt) == (tag.run_id, tag.attempt):
        return
    old = Tag(run_id, attempt, home.attempt(run_id, attempt))
    is_older = tag is not None and run_id == tag.run_id and attempt < tag.attempt
    if is_older and (stuck := sweep(old, 0.0)):
        raise ExpectedError(describe_unkillable(stuck, node), "Restart that PC")
    left = find_processes(old)
    if left:
        raise ExpectedError(
            f"Node {node} is already busy: {len(left)} processes of run {run_id} (attempt "
            f"{attempt}), whose supervisor is gone, still use {_name(device_id)}.",
            f"End them: rackless runs stop {run_id} --node {node}",
        )


def _name(device_id: str) -> str:
    return "its CPU" if device_id == "cpu" else f"GPU {device_id}"
