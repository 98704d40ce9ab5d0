"""From `rackless start` to the first training step on three loopback nodes, in parts.

Each node is a real SSH server with a home of its own; the run is the demo's model. Times are read
from the journals of the attempt, whose clock is this PC's. Importing torch and transformers is
shown but not counted: that time is theirs, and three ranks on few cores stretch it. The nodes share
this PC's cores, and OMP_NUM_THREADS in their logins says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.core.core import Core
from app.core.new_nodes import AddNode
from app.core.nodes import SetUpNode
from app.nodes.node import SshAddress
from app.nodes.transport.loopback import LoopbackNode, power_cut, start_loopback

ROOT = Path(__file__).resolve().parents[2]
TARGET_S = 3.0
RUN_FILE = f"""
name: bench-launch
model: {ROOT}/resources/demo/model
data: {{train: {ROOT}/resources/demo/train.jsonl, format: chat}}
adapter: {{kind: lora, rank: 8, alpha: 16, dropout: 0.0, targets: all-linear}}
sequence_tokens: 64
batch_sequences: 6
max_steps: 3
"""
PARTS = (
    ("command, checks and sending", "spawned", "launched"),
    ("supervisors and ranks start", "launched", "loading"),
    ("imports of the trainer (not counted)", "loading", "imported"),
    ("group, model and data", "imported", "warmup"),
    ("warm-up: shares measured", "warmup", "training"),
    ("first step", "training", "step"),
)


def records(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_bytes().splitlines()]


def read_times(folder: Path, num_nodes: int) -> dict[str, float]:
    """Return when each mark was passed by the last of the ranks, from the nodes' own journals."""
    attempts = list(folder.glob("node*/.local/share/rackless-agent/runs/*/attempts/1"))
    assert len(attempts) == num_nodes, attempts
    marks = [read_marks(attempt) for attempt in attempts]
    names = {name for _, begin, end in PARTS for name in (begin, end)} - {"spawned"}
    return {name: max(mark[name] for mark in marks) for name in names}


def read_marks(attempt: Path) -> dict[str, float]:
    """Return when one node launched, and when its rank first passed each mark."""
    marks = {"launched": records(attempt / "supervisor.jsonl")[0]["time_s"]}
    for record in records(next(attempt.glob("rank-*.jsonl"))):
        name = record["phase"] if record["kind"] == "phase" else record["kind"]
        marks.setdefault(name, record["time_s"])
    return marks


async def start_nodes(folder: Path, num_nodes: int) -> list[LoopbackNode]:
    homes = [folder / f"node{number}" for number in range(1, num_nodes + 1)]
    for home in homes:
        home.mkdir()
    return [await start_loopback(home, folder / "key.pub") for home in homes]


async def add_nodes(home: Path, servers: list[LoopbackNode], key: Path) -> None:
    """Add the loopback servers as nodes and adopt this Python on each."""
    async with Core.open(home) as core:
        for server in servers:
            name = server.home.name
            address = SshAddress(host=server.address, port=server.port, user=server.user, key=key)
            await core.do(AddNode(name=name, address=address, accept_host_key=server.fingerprint))
            await core.do(SetUpNode(name=name, python=sys.executable))


def start_and_wait(home: Path, run_file: Path) -> float:
    """Run `rackless start --watch` to its end; return when it was spawned."""
    command = [sys.executable, "-P", "-m", "app", "start", str(run_file), "--watch", "--json"]
    environ = {**os.environ, "RACKLESS_HOME": str(home), "PYTHONPATH": str(ROOT)}
    spawned = time.time()
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    return spawned


async def measure(folder: Path, num_nodes: int) -> dict[str, float]:
    home = folder / "master"
    run_file = folder / "run.yaml"
    run_file.write_text(RUN_FILE)
    num_cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(max(1, num_cores // num_nodes))
    servers = await start_nodes(folder, num_nodes)  # they end when these objects do
    try:
        await add_nodes(home, servers, folder / "key")
        spawned = await asyncio.to_thread(start_and_wait, home, run_file)
        return {"spawned": spawned, **read_times(folder, num_nodes)}
    finally:
        for server in servers:
            power_cut(server.home)


def report(times: dict[str, float]) -> bool:
    """Print the parts and the sum; tell whether the target is met."""
    for name, begin, end in PARTS:
        print(f"{name:38} {times[end] - times[begin]:6.2f} s")
    imports_s = times["imported"] - times["loading"]
    counted_s = times["step"] - times["spawned"] - imports_s
    print(
        f"{'start to first step without imports':38} {counted_s:6.2f} s (target < {TARGET_S:.0f} s)"
    )
    return counted_s < TARGET_S


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as name:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{name}/key"], check=True
        )
        met = report(asyncio.run(measure(Path(name), arguments.nodes)))
    sys.exit(0 if met else 1)
