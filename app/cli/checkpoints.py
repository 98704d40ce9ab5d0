"""`rackless checkpoints`: list checkpoints on all nodes."""

from __future__ import annotations

import argparse
import time

from app.cli.kit.command import with_core
from app.cli.kit.output import Output
from app.core.action import CoreApi
from app.core.runs import FindCheckpoints
from app.text import show_bytes, show_duration, show_moment

_VERIFIED = {True: "yes", False: "NO", None: "not verified"}


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_list))
    parser.add_argument("run", nargs="?", metavar="RUN", help="run id; default: all runs")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every copy and compare its hashes; exit code 1 if one is damaged",
    )


async def _list(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    found = await core.do(FindCheckpoints(run_id=args.run, verify=args.verify))
    out.document(found)
    now_s = time.time()
    out.table(
        ["RUN", "STEP", "SAVED", "SIZE", "STALL", "NODES", "VERIFIED", "PROBLEM"],
        [
            [
                item.run_id,
                str(item.step),
                show_moment(item.created_s, now_s),
                show_bytes(item.size_bytes),
                show_duration(item.stall_s) if item.stall_s is not None else "",
                ", ".join(item.nodes),
                _VERIFIED[item.verified],
                item.problem,
            ]
            for item in found
        ],
        "No checkpoints on the nodes that answer.",
    )
    # Only where it was asked for: a list that shows damage is a list all the same.
    return 1 if args.verify and any(item.verified is False for item in found) else 0
