"""Repeat the check of one row after a repair."""

from __future__ import annotations

from collections.abc import Sequence

from app.nodes.fleet import Fleet
from app.provisioning.check import check_nodes
from app.provisioning.check_row import CheckRow, make_row


async def retest(fleet: Fleet, row: CheckRow, names: Sequence[str]) -> tuple[CheckRow, ...]:
    """Return the rows that replace `row`.

    Only the node is examined if that is enough. A row about the network, or about differences
    between nodes, needs the whole check.

    Args:
        fleet: fleet with the nodes.
        row: row of the earlier check.
        names: nodes of the earlier check.

    Raises:
        UserError: a node does not exist.
    """
    # A link, or a comparison, needs its peers.
    found = _same(row, await check_nodes(fleet, (row.node,))) if row.peer is None else ()
    if not found and len(names) > 1:
        found = _same(row, await check_nodes(fleet, names))
    # Checks that compare nodes have a row only if they find a problem.
    return found or (make_row(row.check, row.node, "pass", "nothing is wrong now"),)


def _same(row: CheckRow, rows: Sequence[CheckRow]) -> tuple[CheckRow, ...]:
    return tuple(
        one
        for one in rows
        if (one.check, one.node, one.peer) == (row.check, row.node, row.peer)
        or (one.check, one.node, one.status) == ("reach", row.node, "fail")
    )
