"""What a fault is, how it is put into a site, and whether the check named it."""

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
    """One fault, and the row that has to name it."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the check made of a fault."""

    fault: Fault
    seconds: float
    found: dict[str, Any] | None
    """Row that names it; None: there is none."""
    others: tuple[str, ...]
    """Rows that failed besides, without a reason."""

    @property
    def is_good(self) -> bool:
        return self.found is not None and not self.others


def try_fault(site: FaultySite, fault: Fault, healthy: Checked) -> Verdict:
    """Put a fault into the site, check, and heal; `healthy` is the check before."""
    with ExitStack() as stack:
        master = fault.inject(site, stack)
        checked = site.check(master)
    rows = [row for row in checked.rows if names_fault(fault, row)]
    allowed = {fault.check, *fault.also_fails}
    others = {
        f"{check} {node}"
        for check, node in checked.failed() - healthy.failed()
        if check not in allowed
    }
    return Verdict(
        fault=fault,
        seconds=checked.seconds,
        found=rows[0] if rows else None,
        others=tuple(sorted(others)),
    )


def names_fault(fault: Fault, row: dict[str, Any]) -> bool:
    """Return whether a row is the one that a fault has to give, with cause and fix."""
    place = (row["check"], row["node"], row["status"])
    return (
        place == (fault.check, fault.node, fault.status)
        and (fault.peer is None or row["peer"] == fault.peer)
        and fault.says in row["message"]
        and bool(row["fix"])
    )
