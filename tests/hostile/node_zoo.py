"""Drive the hostile node of `tests/hostile/zoo.py` for as long as you like, and print a table.

    python -m tests.hostile.node_zoo --minutes 10 --seed 7
    python -m tests.hostile.node_zoo --minutes 1 --only runs.

The same seed tells the same lies. It exits with 1 when an action broke a promise.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from app.doctor.report import collect_report
from tests.hostile.zoo import Zoo, list_requests, snapshot


async def drive(zoo: Zoo, seconds: float, seed: int, only: str = "") -> list[str]:
    """Perform actions in turn until the time is up, at least each one once; return findings."""
    findings: list[str] = []
    before = snapshot(zoo.folder, zoo.home)
    end_s = time.monotonic() + seconds
    for number in itertools.count(seed):
        zoo.restore(number)
        async with zoo.open():
            names = [name for name in zoo.actions() if only in name]
            # Deletions last, since the others need what they delete.
            for name in sorted(names, key=lambda name: ("delete" in name, name)):
                if found := await zoo.perform(name, number):
                    findings.append(f"{found} (seed {number})")
            requests = [one for one in list_requests() if only in one.kind]
            broken = [await zoo.ask(request, number) for request in requests]
            broken.append(await zoo.follow(number))
            findings += [f"{found} (seed {number})" for found in broken if found]
        if only in "doctor":
            await collect_report(zoo.home)
            zoo.started.clear()  # it looks for libraries of this PC
        if time.monotonic() > end_s:
            break
    after = snapshot(zoo.folder, zoo.home)
    if after != before:
        changed = sorted(set(after.items()) ^ set(before.items()))
        findings.append(f"changed outside the home: {changed}")
    links = [str(path) for path in zoo.home.rglob("*") if path.is_symlink()]
    if links:
        findings.append(f"links in the home: {links}")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of the actions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        zoo = Zoo(folder=Path(folder))
        zoo.prepare(patch)
        found = asyncio.run(drive(zoo, 60 * args.minutes, args.seed, args.only))
        patch.undo()
    outcomes = ", ".join(f"{n} {name}" for name, n in zoo.outcomes.most_common())
    print(f"{sum(zoo.outcomes.values()):,} actions with seed {args.seed}: {outcomes}")
    print(f"{sum(zoo.asked.values()):,} requests of {len(zoo.asked)} kinds were answered")
    for line, times in Counter(found).most_common():
        print(f"BROKEN {times} times: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
