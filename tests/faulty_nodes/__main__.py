"""`python -m tests.faulty_nodes`: put faults into nodes, check, and print what the check named.

Then clean checks, of which none may fail. Needs root, iproute2, openssh-server and a C compiler;
takes about ten minutes. Exits with 1 where a fault was not named, a row failed without a reason, or
a clean check failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faulty_nodes.fault import Fault, Verdict, try_fault
from tests.faulty_nodes.network_faults import NETWORK_FAULTS
from tests.faulty_nodes.site import FaultySite
from tests.faulty_nodes.system_faults import SYSTEM_FAULTS

FAULTS: tuple[Fault, ...] = (*NETWORK_FAULTS, *SYSTEM_FAULTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Try the faults, then the clean checks; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faulty_nodes", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of faults")
    parser.add_argument("--clean", type=int, default=20, help="number of clean checks")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the clean checks")
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    args = parser.parse_args(argv)
    chosen = [fault for fault in FAULTS if not args.only or fault.name in args.only]
    if args.list:
        print("\n".join(f"{fault.name:34} {fault.check}" for fault in chosen))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(HF_HUB_OFFLINE="1", PYTHON_KEYRING_BACKEND="keyring.backends.null.Keyring")
    verdicts = []
    for needs_torch in (False, True):
        some = [fault for fault in chosen if fault.needs_torch is needs_torch]
        verdicts += try_all(some, with_torch=needs_torch) if some else []
    named = sum(verdict.is_good for verdict in verdicts)
    print(f"{named} of {len(verdicts)} faults named with their cause", flush=True)
    num_false = run_clean(args.clean, args.nodes) if args.clean else 0
    return 0 if named == len(verdicts) and not num_false else 1


def try_all(faults: Sequence[Fault], *, with_torch: bool) -> list[Verdict]:
    """Try faults one after the other on three nodes, and print a line for each."""
    verdicts = []
    with (
        tempfile.TemporaryDirectory() as folder,
        FaultySite(Path(folder), 3, with_torch=with_torch) as site,
    ):
        healthy = site.check()
        for fault in faults:
            verdict = try_fault(site, fault, healthy)
            print(describe(verdict), flush=True)
            verdicts.append(verdict)
    return verdicts


def describe(verdict: Verdict) -> str:
    """Return the fault, the row that named it, and the time of the check in one line."""
    fault, row = verdict.fault, verdict.found
    head = f"{'ok  ' if verdict.is_good else 'MISS'} {verdict.seconds:5.1f} s  {fault.name:34}"
    if row is None:
        return f"{head} no row {fault.check} {fault.status} says {fault.says!r}"
    place = f"{row['check']} {row['node']}" + (f" -> {row['peer']}" if row["peer"] else "")
    others = f"  also failed: {', '.join(verdict.others)}" if verdict.others else ""
    return f"{head} {place}: {row['status']}: {row['message']}{others}"


def run_clean(number: int, num_nodes: int) -> int:
    """Check healthy nodes that many times; return how many rows failed."""
    num_false = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        FaultySite(Path(folder), num_nodes, with_torch=True) as site,
    ):
        seconds = []
        for turn in range(number):
            checked = site.check()
            seconds.append(checked.seconds)
            count = Counter(row["status"] for row in checked.rows)
            num_false += count["fail"]
            print(f"clean {turn + 1}: {checked.seconds:.1f} s, {dict(count)}", flush=True)
            for row in checked.rows:
                if row["status"] == "fail":
                    print(f"  false: {row['check']} {row['node']}: {row['message']}", flush=True)
    longest = max(seconds, default=0.0)
    print(f"{number} clean checks: {num_false} false failures, at most {longest:.1f} s", flush=True)
    return num_false


if __name__ == "__main__":
    sys.exit(main())
