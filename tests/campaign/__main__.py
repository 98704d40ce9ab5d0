"""`python -m tests.campaign`: draw faults, attack runs with them, print and store the table.

What was found is stored after each run. The same command with the same `--out` goes on there, also
with more faults: a seed draws the same ones. Exits with 1 if any promise broke or a fault is
missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.campaign.attack import Attack, record_undisturbed
from tests.campaign.draw import Drawn, draw_faults, is_possible
from tests.campaign.faults import FAULTS
from tests.campaign.history import Step
from tests.campaign.record import Record
from tests.campaign.report import write_part
from tests.campaign.site import EVERY_STEPS, NUM_STEPS, Site
from tests.campaign.table import Campaign, Session, as_markdown, as_text, join, row_of
from tests.campaign.verdict import Finding
from tests.cluster.namespaces import run_tool

FIRST_STEP = EVERY_STEPS + 5
"""First step after which a fault may strike."""
LEAST_STEPS = 2 * FIRST_STEP
PARTS = ("faults", "saves", "starts", "hours", "torchrun")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part of the campaign; return the exit code."""
    args = _parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(HF_HUB_OFFLINE="1", PYTHON_KEYRING_BACKEND="keyring.backends.null.Keyring")
    if args.list:
        for name, kind in FAULTS.items():
            print(f"{name:28} {kind.does}")
        return 0
    if args.table:
        return _show_table(args)
    if args.peer:
        from tests.campaign import peer

        return peer.main(args)
    if args.part != "faults":
        from tests.campaign import parts

        return parts.main(args)
    return _attack(args)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--faults", type=int, default=10, help="number of faults (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all draws (default: 1)")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=[*FAULTS],
        default=[],
        metavar="KIND",
        help="draw from these kinds alone; see --list",
    )
    parser.add_argument("--list", action="store_true", help="list the kinds of faults and end")
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: 2)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of each run")
    parser.add_argument(
        "--cut",
        type=float,
        default=8.0,
        metavar="SECONDS",
        help="longest cut of a cable, up to 600 (default: as short as its kind allows)",
    )
    parser.add_argument("--minutes", type=float, help="begin no case after so many minutes")
    parser.add_argument(
        "--out", type=Path, help="file for the table as JSON; one that exists goes on"
    )
    parser.add_argument("--write", action="store_true", help="put the table into RELIABILITY.md")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="attack nothing; show one table of these campaigns",
    )
    parser.add_argument("--folder", type=Path, help="keep all files in this new folder")
    parser.add_argument("--peer", choices=["torchrun"], help="compare with its own restarts")
    parser.add_argument(
        "--part",
        choices=PARTS[:4],
        default="faults",
        help="saves: kills while saving; starts: two starts at once; hours: "
        "memory over simulated hours; --count says how many, and --out goes on",
    )
    parser.add_argument("--count", type=int, default=1000, help="kills, starts (default: 1000)")
    parser.add_argument("--hours", type=float, default=24.0, help="simulated hours (default: 24)")
    args = parser.parse_args(argv)
    if args.steps < LEAST_STEPS:
        parser.error(
            f"argument --steps: {args.steps} is too few, take {LEAST_STEPS} or more: faults strike "
            f"after step {FIRST_STEP}, when a checkpoint is there, in the first half of a run"
        )
    return args


def _attack(args: argparse.Namespace) -> int:
    possible = [name for name in args.kinds or FAULTS if is_possible(FAULTS[name], args.nodes)]
    for name in set(args.kinds or FAULTS) - set(possible):
        print(f"left out: {name} (needs {FAULTS[name].needs})", flush=True)
    settings = {
        "seed": args.seed,
        "kinds": possible,
        "nodes": args.nodes,
        "steps": args.steps,
        "cut": args.cut,
    }
    record = Record(args.out, settings, this_session())
    drawn = draw_faults(
        args.faults,
        args.seed,
        num_nodes=args.nodes,
        steps=(FIRST_STEP, args.steps // 2),
        kinds=possible,
        max_cut_s=args.cut,
    )
    with tempfile.TemporaryDirectory(prefix="campaign-") as made:
        try:
            _play_all(args, drawn, args.folder or Path(made), record)
        except KeyboardInterrupt:
            print("ended early", flush=True)  # what was found until then is worth its table
    campaign = record.campaign
    print(f"\n{as_text(campaign)}")
    missing = args.faults - len(campaign.findings)
    if missing > 0:
        more = "the same command goes on" if args.out else "with --out FILE it could go on"
        print(f"{missing} of {args.faults} faults are missing: {more}")
    if args.write:
        write_part("table", as_markdown(campaign))
    return 1 if campaign.num_broken or missing > 0 else 0


def _show_table(args: argparse.Namespace) -> int:
    """Show what several campaigns found, as one."""
    campaign = join([Campaign.from_dict(json.loads(path.read_text())) for path in args.table])
    print(as_text(campaign))
    if args.write:
        write_part("table", as_markdown(campaign))
    return 1 if campaign.num_broken else 0


def _play_all(
    args: argparse.Namespace, drawn: Sequence[Drawn], folder: Path, record: Record
) -> None:
    """Play all faults, on a new site wherever the run before was left unfit."""
    began_s = time.monotonic()
    undisturbed: list[Step] = []
    first = len(record.findings)
    while len(record.findings) < len(drawn) and not _is_over(args, began_s):
        with Site(folder / f"site-{len(record.findings)}", args.nodes, args.steps) as site:
            undisturbed = undisturbed or record_undisturbed(site)
            while len(record.findings) < len(drawn) and not _is_over(args, began_s):
                done = len(record.findings)
                found = Attack(site, done + 1, undisturbed).play(drawn[done:])
                record.add(found)
                _show(found)
                spent_s = time.monotonic() - began_s
                _show_progress(len(record.findings), len(drawn), first, spent_s)
                if not is_fit(found[-1]):
                    break  # the next run must not pay for this one


def is_fit(last: Finding) -> bool:
    """Return whether a site can be used again after the last fault of a run."""
    return last.state == "done" and not last.orphans and not last.leftovers


def _show(found: Sequence[Finding]) -> None:
    for finding in found:
        print("  ".join(row_of(finding)), flush=True)
        if finding.breaks:
            print("\n".join(f"      {line}" for line in finding.story), flush=True)


def _show_progress(done: int, count: int, first: int, spent_s: float) -> None:
    left_s = spent_s / (done - first) * (count - done)
    print(f"{done} of {count}, about {left_s / 60:.0f} minutes left", flush=True)


def _is_over(args: argparse.Namespace, began_s: float) -> bool:
    return args.minutes is not None and time.monotonic() - began_s > 60.0 * args.minutes


def this_session() -> Session:
    """Return date, PC and version of this call."""
    return Session(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=f"{platform.system()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        version=run_tool("git", "describe", "--always", "--dirty", check=False).strip()
        or "unknown",
    )


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
