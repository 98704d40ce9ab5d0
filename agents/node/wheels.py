"""The wheels that this node keeps: which of a lock are here, and fetching the others.

Wheels may be for another node's interpreter, so that one node with internet fetches for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agents.children import Children
from agents.contract.environments import WheelQuery, WheelReport
from agents.errors import ExpectedError, explain_os_error
from agents.shared.packages.lock import read_lock_text
from agents.shared.packages.package_index import PackageIndex, read_index_settings
from agents.shared.packages.wheel_store import STORE, WheelProblem, WheelSet, fetch
from agents.state import Home, locked

TURN_S = 3600.0
"""Maximum wait for another fetch of the same wheels, in seconds."""


def wheel_set(home: Home, query: WheelQuery) -> WheelSet:
    """Return the set of wheels that a query names.

    Raises:
        ExpectedError: its lock is none.
    """
    try:
        lock = read_lock_text(query.lock_text)
        wheels = WheelSet(store=home.path / STORE, lock=lock, target=query.target)
        _ = [one.key for one in wheels.packages]  # reads markers and versions
    except ValueError as error:
        raise ExpectedError(
            f"On this node no environment was begun: {error}.",
            "Update Rackless on the PC that sent this lock",
        ) from error
    return wheels


def look_for_wheels(home: Home, query: WheelQuery) -> WheelReport:
    """Return which wheels of a query are on this node."""
    wheels = wheel_set(home, query)
    return WheelReport(
        path=f"{STORE}/{wheels.name}",
        num_packages=len(wheels.packages),
        num_present=len(wheels.present()),
        is_complete=wheels.is_complete,
        size_bytes=wheels.size_bytes,
    )


def fetch_wheels(
    home: Home, query: WheelQuery, children: Children, progress: Callable[[str], None]
) -> WheelReport:
    """Fetch what is missing of a query; what could not be fetched is in the report.

    Raises:
        ExpectedError: the disk is full, or the lock is none.
    """
    wheels = wheel_set(home, query)
    settings = read_index_settings(os.environ, Path.home(), query.index_url)
    busy = "Another request fetches the same packages on this node."
    try:
        wheels.store.mkdir(mode=0o700, exist_ok=True)
        # The lock of a transfer of this set: both write the same folder.
        with locked(wheels.store / f"{wheels.partial.name}.lock", TURN_S, busy):
            fetch(wheels, PackageIndex(settings), progress, lambda: children.is_closed)
            (wheels.store / f"{wheels.partial.name}.lock").unlink(missing_ok=True)
    except WheelProblem as problem:
        report = look_for_wheels(home, query)
        return replace(
            report, trouble=problem.kind, message=problem.message[:4000], hint=problem.hint
        )
    except OSError as error:
        raise explain_os_error(error, f"storing packages in {wheels.store}") from error
    return look_for_wheels(home, query)
