"""Try a fault: check, repair, check again, undo, check again, as a person at a terminal does it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.master import Master
from tests.cluster.terminal import type_at_terminal
from tests.faulty_nodes.fault import Fault, Inject, Mended, Verdict, find_others, find_row
from tests.faulty_nodes.site import PASSWORD, Checked, FaultySite

_QUESTION = "Apply this? [y/N] "
_PASSWORD_QUESTION = "Password for sudo on "
_COMPARED = ("interface", "mtu", "machine-id")
"""Checks that compare nodes, without a peer in their rows."""


def try_fault(site: FaultySite, fault: Fault, healthy: Checked) -> Verdict:
    """Put a fault into the site, check, repair, undo, and take it back.

    Args:
        site: whose nodes are healthy.
        fault: that is tried.
        healthy: check of the site before.
    """
    with ExitStack() as stack:
        master = fault.inject(site, stack) or site.master
        checked = site.check(master)
        found = find_row(fault, checked)
        mended = _mend(site, fault, master, checked, healthy, stack)
    return Verdict(
        fault=fault,
        seconds=checked.seconds,
        found=found,
        others=find_others(fault, checked, healthy),
        mended=mended,
    )


def try_oddity(site: FaultySite, inject: Inject, healthy: Checked) -> tuple[str, ...]:
    """Put what is no fault into the site and check; return the rows that changed for the worse."""
    with ExitStack() as stack:
        inject(site, stack)
        checked = site.check()
    new = checked.complaints() - healthy.complaints()
    return tuple(sorted(" ".join(one) for one in new))


def find_repairs(fault: Fault, rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Return the titles of a fault's repairs by node and id, from the rows of its check."""
    offered = (
        (row["repair"]["node"] or row["node"], row["repair"])
        for row in rows
        if row["check"] == fault.check and row["repair"] and row["repair"]["where"] == "node"
    )
    return {
        (node, repair["id"]): repair["title"]
        for node, repair in offered
        if fault.repair and repair["id"].startswith(fault.repair)
    }


def _mend(
    site: FaultySite,
    fault: Fault,
    master: Master,
    checked: Checked,
    healthy: Checked,
    stack: ExitStack,
) -> Mended:
    row = find_row(fault, checked)
    repair = row["repair"] if row else None
    if not fault.repair:
        return _leave_to_person(fault, master, repair)
    titles = find_repairs(fault, checked.rows)
    if not repair or not titles:
        return Mended(retest="", problem=f"no repair {fault.repair} is offered")
    nodes = [site.cluster.node(name) for name in sorted({node for node, _ in titles})]
    before = {node.name: site.state_of(node) for node in nodes}
    desk = Desk({f"\n{node}: {title}\n" for (node, _), title in titles.items()})
    # What concerns one node alone needs no other one.
    names = () if fault.peer or fault.check in _COMPARED else (fault.node,)
    words = ("check", *names, "--fix")
    _, shown = type_at_terminal(master.cluster, master.home, *words, typist=desk.type)
    if fault.restart is not None:
        fault.restart(site, stack)
    after = site.check(master, names)
    problems = [] if desk.num_passwords else ["sudo asked for no password"]
    problems += [] if desk.num_applied == len(titles) else [f"not all were offered: {shown[-800:]}"]
    problems += _judge_after(fault, after, healthy)
    retest = _describe(fault, after)
    if fault.restart is not None:
        return Mended(
            commands=tuple(desk.commands),
            retest=f"after a restart: {retest}",
            undo="cannot be undone, as was said before" if desk.says_no_undo else "",
            problem="; ".join(problems + ([] if desk.says_no_undo else ["undo is promised"])),
        )
    undone = [_undo(master, node) for node in sorted(before)]
    problems += [text for text in undone if text]
    problems += [f"{n.name} is not as before" for n in nodes if site.state_of(n) != before[n.name]]
    again = site.check(master, names)
    problems += [] if find_row(fault, again) else ["the fault did not come back with the undo"]
    return Mended(
        commands=tuple(desk.commands),
        retest=retest,
        undo="state as before by hash; " + _describe(fault, again),
        problem="; ".join(problems),
    )


def _leave_to_person(fault: Fault, master: Master, repair: dict[str, Any] | None) -> Mended:
    """Make sure that what cannot be repaired from here is shown, and only that."""
    if not fault.elsewhere:
        problem = "its repair is not tried" if repair else ""
        return Mended(retest="by a person", problem=problem)
    lines = repair["script"].splitlines() if repair else []
    desk = Desk(set())
    words = ("check", fault.node, "--fix")
    _, shown = type_at_terminal(master.cluster, master.home, *words, typist=desk.type)
    lost = [line for line in lines if line.rstrip() not in shown]
    return Mended(
        commands=tuple(lines),
        retest=f"shown, and not run here: {fault.elsewhere}",
        undo="not run here",
        problem=f"not shown: {lost[:3]}" if lost or not lines else "",
    )


@dataclass(slots=True)
class Desk:
    """A person who agrees to some repairs and declines all others."""

    wanted: set[str]
    """Headings of those to agree to."""
    commands: list[str] = field(default_factory=list)
    num_applied: int = 0
    num_passwords: int = 0
    says_no_undo: bool = False

    def type(self, shown: str) -> str | None:
        if shown.endswith(": ") and _PASSWORD_QUESTION in shown.rpartition("\n")[2]:
            self.num_passwords += 1
            return PASSWORD
        if not shown.endswith(_QUESTION):
            return None
        if not any(heading in shown for heading in self.wanted):
            return "n"
        self.num_applied += 1
        heading = next(one for one in self.wanted if one in shown)
        lines = shown.rpartition(heading)[2].splitlines()
        self.commands += [line.strip() for line in lines if line.startswith("    ")]
        self.says_no_undo |= any(line.startswith("Rackless cannot undo") for line in lines)
        return "y"


def _judge_after(fault: Fault, after: Checked, healthy: Checked) -> list[str]:
    problems = [f"failed after the repair: {one}" for one in find_others(fault, after, healthy)]
    if find_row(fault, after) is not None:
        problems.append("the repair did not heal it")
    if find_repairs(fault, after.rows):
        problems.append("the repair is offered again")
    return problems


def _describe(fault: Fault, checked: Checked) -> str:
    """Return status and message of the row at the place of a fault."""
    place = (fault.check, fault.node, fault.peer)
    found = (row for row in checked.rows if (row["check"], row["node"], row["peer"]) == place)
    row = find_row(fault, checked) or next(found, None)
    return f"{row['status']}: {row['message']}" if row else "no row any more"


def _undo(master: Master, node: str) -> str:
    """Undo all repairs of a node at a terminal; return what went wrong, empty: nothing."""
    desk = Desk(set())
    words = ("nodes", "undo", node, "--all")
    code, shown = type_at_terminal(master.cluster, master.home, *words, typist=desk.type)
    left = [
        change for change in master.answer("nodes", "changes", node) if change["undone_s"] is None
    ]
    return "" if code == 0 and not left else f"undo on {node} failed: {shown[-400:]}"
