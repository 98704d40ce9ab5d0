"""`rackless check`: check that nodes are ready for a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from agents.contract.messages import Progress
from app.cli.kit.command import with_core
from app.cli.kit.output import Output
from app.cli.repairs import add_fix_options, repair_rows, require_answers
from app.core.action import CoreApi
from app.core.nodes import CheckNodes, ListNodes, RowChecked
from app.presentation.check_text import summarise_check
from app.provisioning.check_row import CheckRow
from app.text import one_line


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_check))
    parser.add_argument("names", nargs="*", metavar="NAME", help="node names; default: all nodes")
    add_fix_options(parser)


async def _check(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    problems: tuple[str, ...] = ()
    if args.fix:
        require_answers(args, out)
    lines = _Lines(out, args.names or [node.name for node in await core.do(ListNodes())])
    rows = await core.do(CheckNodes(names=tuple(args.names)), lines.report)
    lines.end()
    if args.fix:
        repaired = await repair_rows(core, rows, args, out)
        rows, problems = repaired.rows, repaired.problems
        out.document(repaired.document())
    else:
        out.document(rows)
    if not rows:
        out.text("There are no nodes to check yet. Add one: rackless nodes add NAME --local")
    for row in rows:
        if row.fix and row.status != "pass":
            more = f" (more: rackless help {row.topic})" if row.topic else ""
            out.text(f"  {row.node}, {row.check}: {row.fix}{more}")
    if rows:
        out.text(summarise_check([row.status for row in rows]))
    return 1 if problems or any(row.status == "fail" for row in rows) else 0


class _Lines:
    """Rows as lines of a table whose later rows are not known yet."""

    def __init__(self, out: Output, names: Sequence[str]) -> None:
        self._out = out
        # As wide as the longest that may come: a name of a check has at most 12 letters.
        self._name_width = max((len(name) for name in (*names, "NODE")), default=0)
        self._has_head = False

    def report(self, event: object) -> None:
        """Print a row, the first one below the head of the table, or progress below the rows."""
        if isinstance(event, RowChecked):
            self._add(event.row)
        elif isinstance(event, Progress) and self._out.is_terminal:
            self._out.bar(event.message)
        else:
            self._out.report(event)

    def _add(self, row: CheckRow) -> None:
        if not self._has_head:
            self._has_head = True
            self._print("STATUS", "CHECK", "NODE", "PEER", "MESSAGE")
        self._print(row.status, row.check, row.node, row.peer or "", row.message)

    def end(self) -> None:
        """Erase the last line of progress."""
        if self._out.is_terminal:
            self._out.wipe()

    def _print(self, status: str, check: str, node: str, peer: str, message: str) -> None:
        self.end()
        width = self._name_width
        message = one_line(message)
        self._out.text(f"{status:7}  {check:12}  {node:{width}}  {peer:{width}}  {message}")
