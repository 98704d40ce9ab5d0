"""How long a plan takes: ten unlike PCs and all modes, by model. Run by hand; needs no GPU.

    $PY -m tests.bench.bench_plan_search

Ends with exit code 1 when the slowest median is over 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from agents.contract.spec import AdapterKind
from app.planning.hardware.cluster import Cluster, ethernet
from app.planning.plan import PlanRequest, make_plan
from tests.app.planning.clusters import ask, make_node

GOAL_S = 0.050
CARDS = (
    "RTX 5090", "RTX 4090", "RTX 5070 Ti", "RTX 3090", "RTX 4070", "RTX 3080", "RTX 3070 Ti",
    "RTX 4070 Laptop GPU", "RTX 4060", "RTX 3060",
)  # fmt: skip


def measure(question: PlanRequest, repeats: int) -> float:
    """Return the median seconds of a plan."""
    make_plan(question)
    times_s = []
    for _ in range(repeats):
        started = time.perf_counter()
        make_plan(question)
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    nodes = tuple(make_node(f"pc{i}", card) for i, card in enumerate(CARDS))
    cluster = Cluster(nodes=nodes, default_link=ethernet(1.0))
    slowest_s = 0.0
    kinds: tuple[AdapterKind, ...] = ("lora", "qlora", "full")
    for size in ("7B", "13B", "70B"):
        for kind in kinds:
            seconds = measure(ask(cluster, size, kind), repeats)
            slowest_s = max(slowest_s, seconds)
            print(f"{size:>4} {kind:<6} {seconds * 1000:6.1f} ms")
    print(f"slowest {slowest_s * 1000:.1f} ms (goal {GOAL_S * 1000:.0f})")
    return 0 if slowest_s <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
