"""What the agent costs a node at one sample a second, beside a Python process that only sleeps.

Starts the archive as a node would (`python3 -I ARCHIVE serve NONCE`), follows the telemetry, and
reads CPU time and memory of all its processes from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agents.contract.messages import Event, Request, decode, encode
from app.nodes.archive import build_archive
from tests.bench.rigs.processes import command_of, cpu_s, memory_bytes, processes_with

HOME_VARIABLE = "RACKLESS_AGENT_HOME"
NONCE = "bench"
SLEEPER = "import time\nwhile True:\n    time.sleep(1)\n"
SETTLE_S = 3.0
CPU_TARGET = 0.01
MEMORY_TARGET_BYTES = 40 << 20


@dataclass
class Agent:
    """A served agent; a thread reads what it says and counts the samples."""

    process: subprocess.Popen[bytes]
    num_samples: int = 0
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"RACKLESS "):
                self.ready.set()
            elif b'"telemetry.sample"' in line and isinstance(decode(line), Event):
                self.num_samples += 1


@contextlib.contextmanager
def serving(home: Path, python: str) -> Iterator[Agent]:
    archive = home / "agent.zip"
    archive.write_bytes(build_archive().data)
    process = subprocess.Popen(
        [python, "-I", str(archive), "serve", NONCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, HOME_VARIABLE: str(home)},
    )
    agent = Agent(process)
    reader = threading.Thread(target=agent.read, daemon=True)
    reader.start()
    try:
        assert process.stdin is not None
        if not agent.ready.wait(10):
            raise RuntimeError("the agent did not answer within 10 s")
        process.stdin.write(encode(Request(id=1, kind="telemetry.follow", args={"after_s": None})))
        process.stdin.flush()
        yield agent
    finally:
        for pid in list(processes_with(HOME_VARIABLE, str(home))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()
        reader.join()


def spent_s(pids: list[int]) -> dict[int, float]:
    return {pid: cpu_s(pid) for pid in pids}


def measure(seconds: float, python: str) -> int:
    """Print one row per process, the totals and the ratio; return 1 when a target is missed."""
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as folder:
        sleeper = subprocess.Popen([python, "-I", "-c", SLEEPER])
        try:
            with serving(Path(folder), python) as agent:
                time.sleep(SETTLE_S)
                pids = list(processes_with(HOME_VARIABLE, folder))
                before, samples_before = spent_s([*pids, sleeper.pid]), agent.num_samples
                time.sleep(seconds)
                after = spent_s([*pids, sleeper.pid])
                num_samples = agent.num_samples - samples_before
                names = {pid: command_of(pid)[3] for pid in pids} | {sleeper.pid: "bare sleep"}
                memory = {pid: memory_bytes(pid) for pid in names}
        finally:
            sleeper.kill()
            sleeper.wait()
    shares = {pid: (after[pid] - before[pid]) / seconds for pid in names}
    for pid, name in names.items():
        print(f"{name:12} {shares[pid]:8.3%} of a core  {memory[pid] / 2**20:6.1f} MiB")
    return judge(shares, memory, sleeper.pid, num_samples, seconds)


def judge(
    shares: dict[int, float], memory: dict[int, int], bare: int, num_samples: int, seconds: float
) -> int:
    """Print the totals against the targets; return 1 when one is missed."""
    cpu = sum(share for pid, share in shares.items() if pid != bare)
    total = sum(size for pid, size in memory.items() if pid != bare)
    ratio = cpu / shares[bare]
    print(f"{'agent':12} {cpu:8.3%} of a core  {total / 2**20:6.1f} MiB")
    print(f"agent / bare sleep: CPU {ratio:.0f} x, memory {total / memory[bare]:.1f} x")
    print(f"{num_samples} samples in {seconds:.0f} s")
    missed = [
        *(["CPU"] if cpu >= CPU_TARGET else []),
        *(["memory"] if total >= MEMORY_TARGET_BYTES else []),
        *(["samples"] if num_samples < 0.9 * seconds else []),
    ]
    print(f"targets (< 1 % of a core, < 40 MiB, 1 Hz): {'missed: ' if missed else 'met'}", *missed)
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--python", default="python3", help="the node's interpreter")
    arguments = parser.parse_args()
    sys.exit(measure(arguments.seconds, arguments.python))
