"""A model to one, four and seven nodes on shaped links: our chain beside a plain socket, parallel
scp and rsync; then the master killed and started again, and a node cut off in the middle.

Each node is a network namespace with an sshd of its own; needs root, iproute2 and openssh-server,
rsync where it is to be compared. All nodes share the cores and the disk of this PC, so a rate that
they cannot bear is a rate of this PC, not of the chain: use --rate for slower links then.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agents.contract.chunks import CHUNK_BYTES
from tests.bench.rigs.role_cpu import CpuMeter
from tests.cluster.namespaces import Cluster, Node

ROOT = Path(__file__).resolve().parents[2]
HOME = ".local/share/rackless-agent"
_RECEIVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 9000)); print("ready", flush=True)
connection, _ = listener.accept()
buffer, left = bytearray(1 << 20), int(sys.argv[2])
while left: left -= connection.recv_into(buffer)
connection.sendall(b"!")
"""
_SENDER = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9000))
block, left, began = bytes(1 << 20), int(sys.argv[2]), time.monotonic()
while left: left -= connection.send(block[:left])
connection.recv(1); print(time.monotonic() - began)
"""


@dataclass(frozen=True)
class Job:
    cluster: Cluster
    folder: Path
    size_bytes: int
    home: Path


class Master:
    """A probe in the master's namespace."""

    def __init__(self, job: Job, nodes: Sequence[Node]) -> None:
        places = [
            word
            for node in nodes
            for word in ("--node", f"{node.name},{node.address},{job.cluster.fingerprint(node)}")
        ]
        self._process = job.cluster.start(
            job.cluster.master,
            *(sys.executable, "-m", "tests.cluster.spread_probe", *places),
            *("--key", str(job.cluster.key), "--home", str(job.home)),
            *("--folder", str(job.folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._lines = map(json.loads, self._process.stdout or ())
        next(self._lines)

    def run(self, interrupt: Callable[[dict[str, int]], bool] | None = None) -> dict[str, Any]:
        """Transfer; return the report, or the last progress once `interrupt` returned True."""
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        last: dict[str, int] = {}
        for line in self._lines:
            if "report" in line:
                self._process.wait()
                report: dict[str, Any] = line["report"]
                return report
            last = line["progress"]
            if interrupt is not None and interrupt(last):
                return last
        raise SystemExit("the probe ended without a report")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def forget(cluster: Cluster) -> None:
    """Remove what the nodes have received."""
    for node in cluster.nodes:
        shutil.rmtree(node.home / HOME / "store", ignore_errors=True)


def time_socket(job: Job, node: Node) -> float:
    size = str(job.size_bytes)
    receiver = job.cluster.start(
        node, sys.executable, "-c", _RECEIVER, node.address, size, stdout=subprocess.PIPE
    )
    receiver.stdout.readline()
    took_s = job.cluster.run(job.cluster.master, sys.executable, "-c", _SENDER, node.address, size)
    receiver.wait()
    return float(took_s)


def time_tools(job: Job, nodes: Sequence[Node], tool: str) -> float:
    """Return how long one process of a tool per node takes, all at the same time."""
    options = ["-o", f"UserKnownHostsFile={job.cluster.key.parent}/known_hosts"]
    options += ["-i", str(job.cluster.key), "-c", "aes128-gcm@openssh.com"]
    began_s = time.monotonic()
    running = []
    for node in nodes:
        target = f"root@{node.address}:{node.home}/{tool}"
        if tool == "scp":
            argv = ["scp", "-q", *options, "-r", str(job.folder), target]
        else:
            rsh = " ".join(["ssh", *options])
            there = f"--rsync-path={shutil.which('rsync')}"
            argv = ["rsync", "-a", "--whole-file", there, "-e", rsh, f"{job.folder}/", target]
        running.append(job.cluster.start(job.cluster.master, *argv))
    if any([process.wait() for process in running]):
        raise SystemExit(f"{tool} failed")
    took_s = time.monotonic() - began_s
    for node in nodes:
        shutil.rmtree(node.home / tool, ignore_errors=True)
    return took_s


@dataclass(frozen=True)
class Round:
    """One measurement of one way."""

    took_s: float
    cpu: Mapping[str, float]
    """CPU seconds per GiB of the master and of each node, by their names."""


def touch_memory(size_bytes: int) -> None:
    """Use and free so much memory, as fresh pages of a virtual machine cost its host a fault each.

    Whoever is measured first would pay that for all: 2.3 s of CPU time per GiB where it was seen.
    """
    with mmap.mmap(-1, size_bytes) as memory:
        for at in range(0, size_bytes, mmap.PAGESIZE):
            memory[at] = 1


def metered(job: Job, nodes: Sequence[Node], transfer: Callable[[], float]) -> Round:
    """Measure what `transfer` returns the duration of."""
    touch_memory(len(nodes) * job.size_bytes)
    with CpuMeter({n.name: n.namespace for n in (job.cluster.master, *nodes)}) as meter:
        took_s = transfer()
    return Round(took_s, {name: s * 2**30 / job.size_bytes for name, s in meter.seconds.items()})


def show_cpu(cpu: Mapping[str, float]) -> str:
    """Return the CPU time of the master, the first node, the mean relay and the last node."""
    master, *nodes = cpu.values()
    parts = [f"master {master:.1f}", f"first node {nodes[0]:.1f}"]
    if len(nodes) > 2:
        parts.append(f"each relay {statistics.mean(nodes[1:-1]):.1f}")
    if len(nodes) > 1:
        parts.append(f"last {nodes[-1]:.1f}")
    return f"CPU s/GiB: {', '.join(parts)}"


def sent_by_master(job: Job) -> int:
    shown = job.cluster.run(job.cluster.master, "cat", "/sys/class/net/eth0/statistics/tx_bytes")
    return int(shown)


def measure(job: Job, counts: Sequence[int], tools: Sequence[str], rounds: int) -> bool:
    """Print the fastest round of each; whatever else uses this PC only ever adds to it."""
    plain: list[float] = []
    ours: dict[int, list[Round]] = {count: [] for count in counts}
    theirs: dict[tuple[int, str], list[Round]] = {}
    for _ in range(rounds):
        plain.append(time_socket(job, job.cluster.nodes[0]))
        for count in counts:
            nodes = job.cluster.nodes[:count]
            ours[count].append(time_ours(job, nodes))
            for tool in tools:
                run = partial(time_tools, job, nodes, tool)
                theirs.setdefault((count, tool), []).append(metered(job, nodes, run))
    plain_s, size = min(plain), job.size_bytes
    print(f"plain socket to one node   {plain_s:7.2f} s  {size / plain_s / 1e6:7.1f} MB/s")
    times = {count: fastest(found).took_s for count, found in ours.items()}
    for count in counts:
        took_s = times[count]
        print(
            f"our chain to {count} node(s)     {took_s:7.2f} s  "
            f"{size / took_s / 1e6:7.1f} MB/s  {plain_s / took_s:5.2f} of the socket, "
            f"{took_s / times[counts[0]]:5.2f} x one node; {show_cpu(fastest(ours[count]).cpu)}"
        )
        for tool in tools:
            best = fastest(theirs[count, tool])
            print(
                f"  {tool:5} to {count} at once      {best.took_s:7.2f} s  "
                f"{best.took_s / took_s:5.2f} x ours; {show_cpu(best.cpu)}"
            )
    resumed = measure_resume(job)
    cut = measure_cut(job, times[counts[-1]])
    good = max(times.values()) / times[counts[0]] <= 1.15
    return good and plain_s / times[counts[0]] >= 0.9 and resumed and cut


def fastest(rounds: Sequence[Round]) -> Round:
    return min(rounds, key=lambda one: one.took_s)


def time_ours(job: Job, nodes: Sequence[Node]) -> Round:
    """Measure our chain until the last node has stored everything."""
    forget(job.cluster)
    master = Master(job, nodes)  # connects, and hashes the files

    def transfer() -> float:
        report = master.run()
        if report["problems"] or len(report["seconds"]) != len(nodes):
            raise SystemExit(f"failed: {report}")
        return float(max(report["seconds"].values()))

    found = metered(job, nodes, transfer)
    forget(job.cluster)
    return found


def measure_resume(job: Job) -> bool:
    """Kill the master in the middle, start it again, and count what came twice."""
    forget(job.cluster)
    nodes = job.cluster.nodes[:4]
    before = sent_by_master(job)
    first = Master(job, nodes)
    held = first.run(lambda now: min(now.values(), default=0) > 0.4 * job.size_bytes)
    first.kill()
    time.sleep(1.0)
    report = Master(job, nodes).run()
    wire = sent_by_master(job) - before - job.size_bytes
    came = max(report["received"].values())
    print(
        f"killed at {min(held.values()) / job.size_bytes:.0%}: {came / 1e6:.1f} MB came after it; "
        f"the master sent {wire / 1e6:.1f} MB more than the files have, headers and the second "
        f"start included ({wire / CHUNK_BYTES:.2f} chunks)"
    )
    return not report["problems"]


def measure_cut(job: Job, undisturbed_s: float) -> bool:
    """Cut off the second node in the middle; the others have to end in time."""
    forget(job.cluster)
    nodes = job.cluster.nodes
    second = nodes[1].name
    done = False

    def cut(now: dict[str, int]) -> bool:
        nonlocal done
        if not done and now.get(second, 0) > 0.4 * job.size_bytes:
            job.cluster.cut(nodes[1])
            done = True
        return False

    report = Master(job, nodes).run(cut)
    job.cluster.heal(nodes[1])
    others = [took for name, took in report["seconds"].items() if name != second]
    ratio = max(others) / undisturbed_s
    print(
        f"{second} of {len(nodes)} cut off at 40 %: {len(others)} others after "
        f"{max(others):.2f} s, {ratio:.2f} x undisturbed; {report['problems']}"
    )
    return len(others) == len(nodes) - 1 and ratio <= 1.3


def make_files(folder: Path, size_bytes: int) -> None:
    """Write a model in two files."""
    folder.mkdir()
    for number in range(2):
        block = os.urandom(1 << 20)
        with (folder / f"part-{number}.safetensors").open("wb") as file:
            for at in range(size_bytes // 2 >> 20):
                file.write(at.to_bytes(8, "little") + block[8:])


def scratch(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rackless-bench-", dir=parent) as folder:
        yield Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--nodes", default="1,4,7")
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc writes it")
    parser.add_argument("--rounds", type=int, default=2, help="of which the best time counts")
    parser.add_argument("--tools", default="scp,rsync", help="to compare with")
    parser.add_argument("--folder", type=Path, help="on the disk to use; default: the system's")
    options = parser.parse_args()
    counts = [int(count) for count in options.nodes.split(",")]
    tools = [tool for tool in options.tools.split(",") if tool and shutil.which(tool)]
    for folder in scratch(options.folder):
        make_files(folder / "model", options.megabytes << 20)
        with Cluster(folder / "cluster", num_nodes=max(counts), rate=options.rate) as cluster:
            job = Job(cluster, folder / "model", options.megabytes << 20, folder / "master")
            print(f"{options.megabytes} MiB, links of {options.rate}, {os.cpu_count()} cores")
            return 0 if measure(job, counts, tools, options.rounds) else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
