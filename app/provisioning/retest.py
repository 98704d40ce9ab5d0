"""Check again what one row was about, after a repair."""

from __future__ import annotations

from collections.abc import Sequence

from app.nodes.fleet import Fleet
from app.provisioning.check import check_nodes
from app.provisioning.check_row import CheckRow, make_row


async def retest(fleet: Fleet, row: CheckRow, names: Sequence[str]) -> tuple[CheckRow, ...]:
    """Return the rows that now stand for `row`.

    Only the node is asked where that answers it. A row about the network, or about how the node
    compares with others, needs the whole check.

    Args:
        fleet: has the nodes.
        row: of the check before.
        names: nodes that were checked then.

    Raises:
        UserError: there is no node of one of these names.
    """
    found = _same(row, await check_nodes(fleet, (row.node,))) if row.peer is None else ()
    if not found and len(names) > 1:
        found = _same(row, await check_nodes(fleet, names))
    # What compares nodes has a row only where it finds something.
    return found or (make_row(row.check, row.node, "pass", "nothing is wrong now"),)


def _same(row: CheckRow, rows: Sequence[CheckRow]) -> tuple[CheckRow, ...]:
    return tuple(
        one
        for one in rows
        if (one.check, one.node, one.peer) == (row.check, row.node, row.peer)
        or (one.check, one.node, one.status) == ("reach", row.node, "fail")
    )
