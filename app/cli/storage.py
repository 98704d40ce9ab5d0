"""`rackless nodes storage`: list the items on a node's disk and why they stay, or delete some."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from app.cli.kit.output import Output, confirm, plain
from app.core.action import CoreApi
from app.core.storage import FreeStorage, ReadStorage
from app.text import count_of, show_bytes, show_moment

if TYPE_CHECKING:
    from app.artifacts.node_storage import FreedStorage


async def show_storage(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    """Print the items on a node, delete the requested ones, and return the exit code.

    Raises:
        UserError: the node does not answer, or an item to delete is missing or protected.
    """
    # On use: a list of nodes, which is declared with this command, needs no artifacts.
    from app.artifacts.storage_rules import choose, describe_storage

    found = await core.do(ReadStorage(node=args.name))
    now_s = time.time()
    rows = [
        [
            item.kind,
            item.name,
            show_bytes(item.size_bytes),
            show_moment(item.used_s or None, now_s),
            item.protected or "no",
        ]
        for item in found.items
    ]
    empty = f"Rackless has left nothing on {args.name}."
    out.table(["KIND", "ITEM", "SIZE", "LAST USED", "PROTECTED"], rows, empty)
    out.text(describe_storage(found))
    chosen = choose(found, args.free) if args.free is not None else ()
    if args.free is not None and not chosen:
        out.text("There is nothing to delete.")
    size = show_bytes(sum(item.size_bytes for item in chosen))
    what = f"{count_of(len(chosen), 'item')} on {args.name}, {size}"
    # Never asked with --json: a program reads the output, and passes --yes.
    is_agreed = args.yes or (not out.as_json and bool(chosen) and confirm(f"Delete {what}?"))
    freed = None
    if chosen and is_agreed:
        freed = await core.do(
            FreeStorage(node=args.name, names=[one.name for one in chosen]), out.report
        )
        _print_freed(freed, out)
    out.document({**plain(found), "freed": plain(freed)})
    return 1 if freed is not None and freed.kept else 0


def _print_freed(freed: FreedStorage, out: Output) -> None:
    out.text(f"{show_bytes(freed.freed_bytes)} are free again on {freed.node}")
    for name, reason in freed.kept:
        out.note(f"{name} stays: {reason}")
