"""What a fault is, the row that has to name it, and what came of both.

A fault that Rackless can repair is repaired as a person would do it, checked again and brought back
by undoing the repair; see `mending.py`. Then every fault is taken back, and nothing may be left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tests.cluster.master import Master
from tests.faulty_nodes.site import Checked, FaultySite

Inject = Callable[[FaultySite, ExitStack], Master | None]
"""Puts the fault in, and takes it back when the stack ends. Returns the master to check with, where
it is another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, the row that has to name it, and the repair that has to heal it."""

    name: str
    inject: Inject
    check: str
    """Check whose row shows it."""
    status: str
    says: str
    """Words of its cause in the row's message."""
    node: str = "node1"
    peer: str | None = None
    needs_torch: bool = False
    also_fails: tuple[str, ...] = ()
    """Other checks that fail because of it, on any node."""
    repair: str = ""
    """What the ids of its repairs begin with; empty: a person heals it."""
    played: str = ""
    """What of the repair is played by the site; empty: all of it is real."""
    restart: Callable[[FaultySite, ExitStack], None] | None = None
    """Restart of the PC that the repair asks for; such a repair is not undone. None: none."""
    elsewhere: str = ""
    """Why its repair cannot be run in a namespace; empty: it can, or there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mended:
    """What came of a repair: applied, checked again, and undone."""

    commands: tuple[str, ...] = ()
    """Commands and lines of files that a person was shown."""
    retest: str
    """Row after the repair, or why nothing was repaired."""
    undo: str = ""
    problem: str = ""
    """What was not as it should be; empty: all was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the check made of a fault, and what came of its repair."""

    fault: Fault
    seconds: float
    """Duration of the check that named it, in seconds."""
    found: dict[str, Any] | None
    """Row that names it; None: there is none."""
    others: tuple[str, ...]
    """Rows that failed besides, without a reason."""
    mended: Mended

    @property
    def is_good(self) -> bool:
        return self.found is not None and not (self.others or self.mended.problem)


def names_fault(fault: Fault, row: dict[str, Any]) -> bool:
    """Return whether a row is the one that a fault has to give, with cause and fix."""
    place = (row["check"], row["node"], row["status"])
    return (
        place == (fault.check, fault.node, fault.status)
        and (fault.peer is None or row["peer"] == fault.peer)
        and fault.says in row["message"]
        and bool(row["fix"])
    )


def find_row(fault: Fault, checked: Checked) -> dict[str, Any] | None:
    """Return the row that names a fault; None: there is none."""
    return next((row for row in checked.rows if names_fault(fault, row)), None)


def find_others(fault: Fault, checked: Checked, healthy: Checked) -> tuple[str, ...]:
    """Return the rows that failed without a reason, as `CHECK NODE`."""
    allowed = {fault.check, *fault.also_fails}
    new = checked.failed() - healthy.failed()
    return tuple(sorted(f"{check} {node}" for check, node in new if check not in allowed))
