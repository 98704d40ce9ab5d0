"""Fuzz every reader of foreign input for as long as you like, and print a table.

    python -m tests.hostile.fuzz --minutes 10 --seed 7
    python -m tests.hostile.fuzz --minutes 1 --only decode

The same seed makes the same inputs. It exits with 1 when a reader raised what it does not declare,
or took too long, and prints the smallest input that it found for it.
"""

from __future__ import annotations

import argparse
import sys

from tests.hostile.fuzzing import find_targets, run_target


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of the targets")
    args = parser.parse_args()
    targets = [target for target in find_targets() if args.only in target.name]
    num_findings = total = 0
    for target in targets:
        outcome = run_target(target, 60 * args.minutes / len(targets), args.seed)
        errors = ", ".join(f"{n} {name}" for name, n in outcome.errors.most_common()) or "no errors"
        mark = "BROKEN" if outcome.finding else "ok"
        print(f"{mark:7}{target.name:36}{outcome.inputs:>9,} inputs: {errors}", flush=True)
        if outcome.finding:
            print(f"       {outcome.finding}", flush=True)
        num_findings += bool(outcome.finding)
        total += outcome.inputs
    print(f"{total:,} inputs with seed {args.seed}, {num_findings} findings")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
