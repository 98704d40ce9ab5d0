"""`rackless check`: check that nodes are ready for a run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from app.cli.command import Commands, add_command, with_core
from app.cli.output import Output
from app.text import count_of

if TYPE_CHECKING:
    from app.core.core import Core


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "check", "check that nodes are ready for a run", with_core(_check)
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="node names; default: all nodes")


async def _check(core: Core, args: argparse.Namespace, out: Output) -> int:
    rows = await core.nodes.check(tuple(args.names))
    out.document(rows)
    out.table(
        ["STATUS", "CHECK", "NODE", "PEER", "MESSAGE"],
        [[row.status, row.check, row.node, row.peer or "", row.message] for row in rows],
        "There are no nodes to check yet. Add one: rackless nodes add NAME --local",
    )
    bad = [row for row in rows if row.status == "fail"]
    for row in rows:
        if row.fix and row.status != "pass":
            more = f" (more: rackless help {row.topic})" if row.topic else ""
            out.text(f"  {row.node}, {row.check}: {row.fix}{more}")
    out.text(f"{count_of(len(bad), 'problem')} found" if bad else "")
    return 1 if bad else 0
