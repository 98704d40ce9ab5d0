"""`python -m tests.campaign`: draw faults, attack runs with them, print and store the table.

Exits with 1 if any promise broke.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.campaign.case import Case, record_undisturbed
from tests.campaign.draw import Drawn, draw_faults, is_possible
from tests.campaign.faults import FAULTS
from tests.campaign.history import Step
from tests.campaign.report import write_part
from tests.campaign.site import EVERY_STEPS, NUM_STEPS, Site
from tests.campaign.table import Campaign, as_markdown, as_text, row_of
from tests.campaign.verdict import Finding
from tests.cluster.namespaces import run_tool

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
    parser.add_argument("--out", type=Path, help="file for the table as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into RELIABILITY.md")
    parser.add_argument("--folder", type=Path, help="keep all files in this new folder")
    parser.add_argument("--peer", choices=["torchrun"], help="compare with its own restarts")
    parser.add_argument(
        "--part",
        choices=PARTS[:4],
        default="faults",
        help="saves: kills while saving; starts: two starts at once; hours: "
        "memory over simulated hours; --count says how many",
    )
    parser.add_argument("--count", type=int, default=1000, help="kills, starts (default: 1000)")
    parser.add_argument("--hours", type=float, default=24.0, help="simulated hours (default: 24)")
    return parser.parse_args(argv)


def _attack(args: argparse.Namespace) -> int:
    possible = [name for name in args.kinds or FAULTS if is_possible(FAULTS[name])]
    for name in set(args.kinds or FAULTS) - set(possible):
        print(f"left out: {name} (this PC cannot make it)", flush=True)
    drawn = draw_faults(
        args.faults,
        args.seed,
        num_nodes=args.nodes,
        steps=(EVERY_STEPS + 5, args.steps // 2),
        kinds=possible,
        max_cut_s=args.cut,
    )
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as made:
        try:
            _play_all(args, drawn, args.folder or Path(made), findings)
        except KeyboardInterrupt:
            print("ended early", flush=True)  # what was found until then is worth its table
    campaign = Campaign(
        seed=args.seed,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=describe_machine(),
        version=run_tool("git", "describe", "--always", "--dirty", check=False).strip()
        or "unknown",
        findings=tuple(findings),
    )
    print(f"\n{as_text(campaign)}")
    if args.out:
        args.out.write_text(json.dumps(campaign.as_dict(), indent=1))
    if args.write:
        write_part("table", as_markdown(campaign))
    return 1 if campaign.num_broken else 0


def _play_all(
    args: argparse.Namespace, drawn: Sequence[Drawn], folder: Path, findings: list[Finding]
) -> None:
    """Play all cases, on a new site wherever the one before was left unfit; add to `findings`."""
    began_s = time.monotonic()
    undisturbed: list[Step] = []
    while len(findings) < len(drawn) and not _is_over(args, began_s):
        with Site(folder / f"site-{len(findings)}", args.nodes, args.steps) as site:
            undisturbed = undisturbed or record_undisturbed(site)
            for one in drawn[len(findings) :]:
                if _is_over(args, began_s):
                    break
                print(f"{len(findings) + 1}: {one.fault.name} {one.fault.detail}", flush=True)
                finding = Case(site, one, len(findings) + 1, undisturbed).play()
                findings.append(finding)
                print(f"   {'  '.join(row_of(finding)[2:])}", flush=True)
                if finding.breaks:
                    print("\n".join(f"      {line}" for line in finding.story), flush=True)
                if finding.state != "done" or finding.orphans:
                    break  # the next case must not pay for this one


def _is_over(args: argparse.Namespace, began_s: float) -> bool:
    return args.minutes is not None and time.monotonic() - began_s > 60.0 * args.minutes


def describe_machine() -> str:
    """Return kernel, cores and load of this PC."""
    load = os.getloadavg()[0]
    return (
        f"{platform.system()} {platform.release()}, {os.cpu_count()} cores "
        f"(load {load:.1f} at the end), Python {platform.python_version()}"
    )


if __name__ == "__main__":
    sys.exit(main())
