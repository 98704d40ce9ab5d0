"""Forecast of a data parallel step against steps over shaped links, at 1, 2.5 and 10 Gb/s.

    $PY -m tests.bench.bench_plan_network            # needs root and iproute2, no GPU

Three unlike ranks, each in a network namespace of its own with a link shaped on both ends. A
layer's work is a sleep, since what is forecast here is the network; splitting, overlapping and
sending are the trainer's own code over Gloo. The gradients are those of LoRA r=16 of an 8B model on
q, k, v and o (54.5 MB) or on all linear layers (168 MB), at two speeds of the ranks. Ends with exit
code 1 when a forecast is off by more than 8 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from agents.shared.micro_shapes import group_examples
from agents.trainer.parallel.shares import split_batch
from agents.trainer.rank.group import Group, Ranks
from app.planning.hardware.cluster import ethernet
from app.planning.hardware.network import hide, ring_s, statistics_s
from tests.bench import bench_unlike
from tests.bench.bench_unlike import MICRO_TOKENS, UNLIKE, Clock, Links, Net, choose_lengths
from tests.cluster.namespaces import SYSTEM_PATH

GOAL = 0.08
RATES_GBIT = (1.0, 2.5, 10.0)
WIDTHS = {"qkvo": 104, "all-linear": 320}
"""Rows of 4,096 values in each of 32 layers: 54.5 and 168 MB."""
FASTER = (1.0, 4.0)
"""Times the speed of an RTX 5070 Ti, a 4070 and a 3070 Ti: less compute to hide behind."""


def be_rank(speeds: list[float], width: int, steps: int) -> None:
    """Be one rank; rank 0 prints the speeds of the ranks alone and the seconds of each step."""
    bench_unlike.SHAPE = (width, 4096)
    ranks, device = Ranks.from_environment(), torch.device("cpu")
    torch.set_num_threads(1)
    group = Group(ranks, [f"rank {rank}" for rank in range(ranks.world_size)])
    group.join("gloo", device)
    group.sum(torch.zeros(1))
    clock = Clock(device)
    net = Net(clock, speeds[ranks.rank])
    net(64).backward()
    began_s = time.perf_counter()
    net(MICRO_TOKENS).backward()
    mine = {"solo": MICRO_TOKENS / (time.perf_counter() - began_s)}
    solo = [float(told["solo"]) for told in group.exchange("solo", mine)]
    found = bench_unlike.run_ours(Net(clock, speeds[ranks.rank]), clock, group, solo, steps)
    if ranks.rank == 0:
        seconds = [sum(choose_lengths(step)) / one for step, one in enumerate(found)]
        print(json.dumps({"solo": solo, "seconds": seconds[1:]}), flush=True)
    group.exchange("done", {})
    torch.distributed.barrier()
    os._exit(0)


def forecast_s(solo: list[float], num_bytes: float, gbit: float, step: int) -> float:
    """Return the seconds of a step by the planner's formulas."""
    lengths = choose_lengths(step)
    link = ethernet(gbit, 0.0002)
    busy_s, last_s = [], []
    for part, speed in zip(split_batch(lengths, solo), solo, strict=True):
        mine = [lengths[place] for place in part]
        micros = group_examples(mine, MICRO_TOKENS)
        busy_s.append(sum(mine) / speed)
        last_s.append(sum(mine) / len(micros) / speed)
    reduce_s = ring_s(num_bytes, link, len(solo))
    return max(busy_s) + hide(reduce_s, min(last_s)) + statistics_s(link, len(solo))


def run_case(gbit: float, width: int, faster: float, steps: int) -> dict[str, Any]:
    """Return the figures of rank 0."""
    speeds = [speed * faster for speed in UNLIKE]
    links = Links(len(speeds), f"{int(gbit * 1000)}mbit")
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, namespace in enumerate(links.names):
            environ = {
                **os.environ, "PATH": SYSTEM_PATH, "PYTHONPATH": str(Path(__file__).parents[2]),
                "RANK": str(rank), "WORLD_SIZE": str(len(speeds)), "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29513",
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }  # fmt: skip
            command = ["ip", "netns", "exec", namespace, sys.executable, "-m",
                       "tests.bench.bench_plan_network", "--rank-of", json.dumps([speeds, width]),
                       "--steps", str(steps)]  # fmt: skip
            started.append(
                subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE)
            )
        output = [process.communicate(timeout=280)[0] for process in started]
        figures: dict[str, Any] = json.loads(output[0].splitlines()[-1])
        return figures
    finally:
        for process in started:
            process.kill()
        links.close()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gradients", nargs="*", choices=tuple(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--faster", nargs="*", type=float, default=list(FASTER))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        be_rank(*json.loads(args.rank_of), args.steps)
    worst = 0.0
    print("gradients   speed  Gb/s  measured  forecast  error")
    for name, faster, gbit in product(args.gradients, args.faster, RATES_GBIT):
        width = WIDTHS[name]
        found = run_case(gbit, width, faster, args.steps)
        num_bytes = 4.0 * 32 * width * 4096
        forecast = statistics.mean(
            forecast_s(found["solo"], num_bytes, gbit, step) for step in range(1, args.steps)
        )
        measured = statistics.mean(found["seconds"])
        error = forecast / measured - 1
        worst = max(worst, abs(error))
        row = f"{name:<11} {faster:5.0f} {gbit:5.1f} {measured:8.2f}s {forecast:8.2f}s"
        print(f"{row} {error:+6.1%}", flush=True)
    print(f"worst {worst:.1%} (goal {GOAL:.0%})")
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
