"""Find and end all processes of an attempt by the tag in their environment.

The environment is inherited reliably; process groups and parents are not (each worker has its own
session; a daemonised grandchild has another parent). A process belongs to the attempt if it has its
RACKLESS_TAG and does not name another attempt folder: two agent homes on one PC may run parts of
the same run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.supervisor.process_signs import is_frozen

Tagged = Sequence[tuple[int, dict[bytes, bytes]]]
"""Tagged processes, each as pid and environment."""
SETTLE_S = 10.0
"""Maximum time for a process to end after SIGKILL, in seconds; later it counts as unkillable."""
LEFT_SETTLE_S = 1.0
"""The same for processes that outlived such a kill: each request would wait for them again."""


@dataclass(frozen=True)
class Tag:
    """Environment variables of all processes of one attempt on one node."""

    run_id: str
    attempt: int
    folder: Path
    """The attempt's folder."""

    @property
    def text(self) -> str:
        return f"{self.run_id}.{self.attempt}"

    def environ(self) -> dict[str, str]:
        return {
            "RACKLESS_TAG": self.text,
            "RACKLESS_RUN": self.run_id,
            "RACKLESS_ATTEMPT": str(self.attempt),
            "RACKLESS_ATTEMPT_DIR": str(self.folder),
        }

    def is_on(self, pid: int) -> bool:
        """Return whether this living process belongs to the attempt."""
        return self.fits(read_environ(pid))

    def fits(self, environ: dict[bytes, bytes]) -> bool:
        """Return whether a process with this environment belongs to the attempt."""
        if environ.get(b"RACKLESS_TAG") != os.fsencode(self.text):
            return False
        folder = os.fsencode(self.folder)
        # Without the folder variable, the tag alone decides.
        return environ.get(b"RACKLESS_ATTEMPT_DIR", folder) == folder


def read_environ(pid: int) -> dict[bytes, bytes]:
    """Return the initial environment of a tagged process; empty if untagged or unreadable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read()
    except OSError:
        return {}
    # A scan reads all processes of the PC, so most are skipped without parsing.
    if b"RACKLESS_TAG=" not in data:
        return {}
    return {name: value for name, _, value in (item.partition(b"=") for item in data.split(b"\0"))}


def read_tagged() -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """Yield pid and environment of each tagged process of this PC."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            environ = read_environ(int(name))
            if b"RACKLESS_TAG" in environ:
                yield int(name), environ


def find_processes(tag: Tag, without: int | None = None, among: Tagged | None = None) -> list[int]:
    """Return the pids of the attempt's processes, except `without`."""
    tagged = read_tagged() if among is None else among
    return sorted(pid for pid, env in tagged if pid != without and tag.fits(env))


def send_signal(tag: Tag, pid: int, number: int) -> None:
    """Signal the process if it still exists and belongs to the attempt."""
    try:
        # The pidfd is taken before the check, so that the signal cannot hit a reused pid.
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # no pidfd (old kernel, sandbox): the check alone must suffice
        if tag.is_on(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        return
    try:
        if tag.is_on(pid):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def sweep(
    tag: Tag, grace_s: float, without: int | None = None, settle_s: float | None = None
) -> list[int]:
    """End all processes of the attempt: SIGTERM, `grace_s` of time, then SIGKILL.

    Returns:
        Processes that SIGKILL did not end within `settle_s` (None: `SETTLE_S`), because they are
        stuck in the kernel.
    """
    # A process may ignore SIGTERM or fork after it, so SIGKILL starts with a new scan.
    if grace_s > 0 and not _end(tag, signal.SIGTERM, grace_s, without):
        return []
    return _end(tag, signal.SIGKILL, SETTLE_S if settle_s is None else settle_s, without)


def _end(tag: Tag, number: int, patience_s: float, without: int | None) -> list[int]:
    """Signal each process (SIGTERM once, SIGKILL in each scan) and wait until all are gone."""
    deadline = time.monotonic() + patience_s
    signalled: set[int] = set()
    empty_scans = 0
    while True:
        left = find_processes(tag, without)
        empty_scans = 0 if left else empty_scans + 1
        # Two, because during a scan a parent may fork an unseen child and end.
        if empty_scans == 2:
            return []
        for pid in left:
            if number == signal.SIGKILL or pid not in signalled:
                send_signal(tag, pid, number)
                signalled.add(pid)
        if left and time.monotonic() >= deadline:
            return left
        time.sleep(0.05 if left else 0.01)  # the second empty scan need not wait for long


def describe_unkillable(pids: list[int], node: str) -> str:
    """Return a message about processes that SIGKILL did not end."""
    names = ", ".join(f"{pid} ({_name(pid)})" for pid in pids[:5])
    why = "it is stuck in the kernel, most often in the GPU driver, and may still hold GPU memory"
    if pids and all(map(is_frozen, pids)):
        why = "its control group is frozen, so it ends only once that group is thawed"
    return f"Process {names} on node {node} cannot be killed: {why}."


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "?"
