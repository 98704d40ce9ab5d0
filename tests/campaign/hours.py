"""A day of telemetry and watching in minutes: memory, descriptors and disk have to stay flat.

Each loop runs in a process of its own, without its pauses: the recorder takes a sample for every
simulated second, the agent reads and encodes it, the supervisor checks the heartbeats of two living
ranks twice a second, and `watch` takes the samples of three nodes as the window does. What a loop
holds after a tenth of the time, when its rings and series are full, is compared with the end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.contract.node import Sample
from agents.contract.wire import from_wire, to_wire
from agents.state import Home, Identity, boot_id, open_home
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.leases import find_uses
from agents.supervisor.ownership import OwnershipWatch
from agents.supervisor.ranks import RankProcess
from agents.supervisor.stalls import StallWatch
from agents.telemetry.gpu import open_gpus
from agents.telemetry.host import Host
from agents.telemetry.recorder import take_sample
from agents.telemetry.ring import RingReader, RingWriter
from app.telemetry.stream import Telemetry

MAX_GROWTH_BYTES = 2 << 20
"""Growth of a loop's memory that counts as flat, in bytes: the allocator's own."""
MAX_DISK_BYTES = 64 << 10
"""Growth of what a loop has on the disk that counts as flat, in bytes."""

WARM_SHARE = 0.1
NODES = ("node1", "node2", "node3")


def simulate(folder: Path, num_hours: float) -> tuple[str, bool]:
    """Run the four loops for so many simulated hours; return a sentence, and whether it is kept."""
    os.environ["RACKLESS_AGENT_HOME"] = str(folder / "agent")
    home = open_home()
    loops = (_recorder, _agent, _supervisor, _watch)
    # A fresh interpreter each: what one loop imports must not be counted for another.
    context = multiprocessing.get_context("spawn")
    found = []
    for loop in loops:
        results = context.Queue()
        process = context.Process(target=_measure, args=(loop, home, num_hours, results))
        process.start()
        process.join()
        if process.exitcode:
            return f"the loop of the {loop.__name__.strip('_')} failed", False
        found.append(results.get(timeout=10))
    parts = [
        f"{one['loop']} {one['grown_bytes'] / (1 << 20):+.2f} MiB of {one['bytes'] >> 20}, "
        f"{one['grown_files']:+d} descriptors, {one['grown_disk_bytes'] >> 10:+d} KiB on the disk"
        for one in found
    ]
    is_flat = all(
        one["grown_bytes"] <= MAX_GROWTH_BYTES
        and one["grown_files"] <= 0
        and one["grown_disk_bytes"] <= MAX_DISK_BYTES
        for one in found
    )
    return f"{num_hours:g} simulated hours: {'; '.join(parts)}", is_flat


def _measure(
    loop: Callable[[Home], Callable[[int], None]], home: Home, num_hours: float, results: Any
) -> None:
    """Do a loop's work for each second; report what it holds after the warm-up and at the end."""
    num_seconds = round(num_hours * 3600)
    step = loop(home)
    before = (0, 0, 0)
    for second in range(num_seconds):
        if second == round(WARM_SHARE * num_seconds):
            before = _held(home)
        step(second)
    after = _held(home)
    results.put(
        {
            "loop": loop.__name__.strip("_"),
            "bytes": after[0],
            "grown_bytes": after[0] - before[0],
            "grown_files": after[1] - before[1],
            "grown_disk_bytes": after[2] - before[2],
        }
    )


def _held(home: Home) -> tuple[int, int, int]:
    """Return this process's resident bytes, its open files, and the bytes on disk of its home."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    blocks = sum(path.lstat().st_blocks for path in home.path.rglob("*"))
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), blocks * 512


def _recorder(home: Home) -> Callable[[int], None]:
    gpus = open_gpus(lambda: None)
    ring, host = RingWriter(home.telemetry / "samples", 0), Host(home.path)
    ownership = OwnershipWatch(home)

    def step(second: int) -> None:
        ring.append(take_sample(host, gpus, ring.next_seq, find_uses(home, ["cpu"])))
        if second % 60 == 0:  # reads all of /proc: the slowest part, and without a state of its own
            ownership.look()

    return step


def _agent(home: Home) -> Callable[[int], None]:
    gpus, host = open_gpus(lambda: None), Host(home.path)
    ring, reader = RingWriter(home.telemetry / "samples", 0), RingReader(home.telemetry / "samples")

    def step(second: int) -> None:
        if second % 60 == 0:
            ring.append(take_sample(host, gpus, ring.next_seq))
        json.dumps(reader.read(reader.read_newest_seq()))

    return step


def _supervisor(home: Home) -> Callable[[int], None]:
    attempt = AttemptFolder(home, "hours", 1)
    attempt.folder.mkdir(parents=True)
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    ranks = [
        RankProcess(
            rank=rank,
            device="cpu",
            identity=Identity(sleeper.pid, 0, boot_id()),
            attempt=attempt,
            started_s=0.0,
            process=sleeper,
        )
        for rank in range(2)
    ]
    watch = StallWatch(ranks, _intent())

    def step(second: int) -> None:
        for rank in range(2):
            beat = {"step": second, "phase": "training", "monotonic_s": float(second)}
            (attempt.folder / f"rank-{rank}.heartbeat").write_text(json.dumps(beat))
        for now_s in (second + 0.2, second + 0.7):
            stall = watch.check(now_s) or watch.find_standstill(now_s)
            if stall is not None:
                raise AssertionError(f"second {second}: a living rank was called a standstill")

    return step


def _intent() -> Any:
    from agents.contract.run import AttemptIntent, RankPlacement
    from agents.contract.spec import DataSpec, RunSpec

    return AttemptIntent(
        run_id="hours",
        attempt=1,
        node="a",
        spec=RunSpec(model="org/tiny", data=DataSpec(train="rows.jsonl")),
        python=sys.executable,
        ranks=tuple(RankPlacement(rank=n, local_rank=n, node="a", device="cpu") for n in range(2)),
        master_address="127.0.0.1",
        master_port=1,
        address="127.0.0.1",
        model_path="org/tiny",
        train_path="rows.jsonl",
    )


def _watch(home: Home) -> Callable[[int], None]:
    telemetry = Telemetry()
    taken = to_wire(take_sample(Host(home.path), open_gpus(lambda: None), 0))

    def step(second: int) -> None:
        sample = from_wire(Sample, {**taken, "time_s": float(second), "seq": second}, "sample")
        for node in NODES:
            telemetry.take(node, sample, float(second))

    return step
