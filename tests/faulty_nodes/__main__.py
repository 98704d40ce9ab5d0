"""`python -m tests.faulty_nodes`: put faults into nodes, check, repair, check again, and undo.

Prints for each fault the row that named it with its cause, the fix, the re-test and the undo. Then
come oddities, which no row may mind, and clean checks, of which none may fail. Needs root,
iproute2, openssh-server and a C compiler; takes about half an hour. Exits with 1 where a fault was
not named or not healed, an undo left something behind, a row failed without a reason, or a clean
check failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faulty_nodes.fault import Fault, Inject
from tests.faulty_nodes.home_faults import HOME_FAULTS, ODDITIES
from tests.faulty_nodes.mending import try_fault, try_oddity
from tests.faulty_nodes.network_faults import NETWORK_FAULTS
from tests.faulty_nodes.report import Results, describe, show_table, summarise, write_report
from tests.faulty_nodes.site import FaultySite
from tests.faulty_nodes.system_faults import SYSTEM_FAULTS

FAULTS: tuple[Fault, ...] = (*NETWORK_FAULTS, *SYSTEM_FAULTS, *HOME_FAULTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Try the faults and oddities, then the clean checks; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faulty_nodes", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of faults")
    parser.add_argument("--clean", type=int, default=20, help="number of clean checks")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the clean checks")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    args = parser.parse_args(argv)
    chosen = [fault for fault in FAULTS if not args.only or fault.name in args.only]
    odd = {name: one for name, one in ODDITIES.items() if not args.only or name in args.only}
    if args.list:
        print("\n".join(f"{fault.name:34} {fault.check}" for fault in chosen))
        print("\n".join(f"{name:34} (an oddity)" for name in odd))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(HF_HUB_OFFLINE="1", PYTHON_KEYRING_BACKEND="keyring.backends.null.Keyring")
    plain = [fault for fault in chosen if not fault.needs_torch]
    trained = [fault for fault in chosen if fault.needs_torch]
    results = Results()
    if plain or odd:
        try_all(plain, odd, results, with_torch=False)
    if trained:
        try_all(trained, {}, results, with_torch=True)
    if args.clean:
        results.clean = run_clean(args.clean, args.nodes)
    print(f"\n{show_table(results.verdicts)}\n\n{summarise(results)}")
    if args.out:
        write_report(args.out, results)
    return 0 if results.are_good else 1


def try_all(
    faults: Sequence[Fault], oddities: Mapping[str, Inject], results: Results, *, with_torch: bool
) -> None:
    """Try faults and oddities one after the other on three nodes, and print each as it is done."""
    with (
        tempfile.TemporaryDirectory() as folder,
        FaultySite(Path(folder), 3, with_torch=with_torch) as site,
    ):
        healthy = site.check()
        for fault in faults:
            results.verdicts.append(try_fault(site, fault, healthy))
            print(describe(results.verdicts[-1]), flush=True)
        for name, inject in oddities.items():
            changed = results.oddities[name] = try_oddity(site, inject, healthy)
            mark = "MISS" if changed else "ok  "
            print(f"{mark} no fault: {name}{''.join(f'; {one}' for one in changed)}", flush=True)
        # What a fault leaves behind would fail beside the next one; this is for the last.
        results.left += sorted(site.check().complaints() - healthy.complaints())


def run_clean(number: int, num_nodes: int) -> list[dict[str, Any]]:
    """Check healthy nodes that many times; return duration, statuses and failed rows of each."""
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        FaultySite(Path(folder), num_nodes, with_torch=True) as site,
    ):
        for turn in range(number):
            checked = site.check()
            count = dict(Counter(row["status"] for row in checked.rows))
            false = [row for row in checked.rows if row["status"] == "fail"]
            print(f"clean {turn + 1}: {checked.seconds:.1f} s, {count}", flush=True)
            for row in false:
                print(f"  false: {row['check']} {row['node']}: {row['message']}", flush=True)
            found.append({"seconds": checked.seconds, "statuses": count, "false": false})
    return found


if __name__ == "__main__":
    sys.exit(main())
