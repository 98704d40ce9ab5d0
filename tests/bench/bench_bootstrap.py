"""From nothing to the agent's hello over SSH on loopback, beside what SSH alone costs.

Each round measures, one after another on the same server: login and `true`; login and
`python3 -I -c pass`; the agent already there (warm); the agent pushed first (cold). Medians over
the rounds, and ratios within this one run.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from app.nodes.archive import AgentArchive, build_archive
from app.nodes.link import open_link
from app.nodes.node import Node
from app.nodes.transport.connection import connect
from tests.bench.rigs.ssh_server import MeasuredServer, measured_server

WARM_TARGET_S = 0.4
COLD_TARGET_S = 2.0


class Bootstrap:
    """The four ways to begin; each returns its seconds."""

    def __init__(self, server: MeasuredServer, master: Path, archive: AgentArchive) -> None:
        self._server = server
        self._master = master
        self._archive = archive

    async def command(self, *argv: str) -> float:
        began_s = time.perf_counter()
        connection = await connect(self._server.address, home=self._master)
        process = await connection.open(argv)
        await process.wait()
        took_s = time.perf_counter() - began_s
        await connection.close()
        return took_s

    async def warm(self) -> float:
        began_s = time.perf_counter()
        link = await open_link(
            Node(name="pc", address=self._server.address),
            self._archive,
            home=self._master,
            gate=asyncio.Semaphore(8),
        )
        took_s = time.perf_counter() - began_s
        await link.close()
        return took_s

    async def cold(self) -> float:
        await asyncio.to_thread(shutil.rmtree, self._server.agent_home / "agents", True)
        return await self.warm()


async def measure(rounds: int) -> int:
    """Print a row per way and the ratios; return 1 when a target is missed."""
    began_s = time.perf_counter()
    archive = build_archive()
    built_s = time.perf_counter() - began_s
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as folder:
        master = Path(folder, "master")
        async with measured_server(Path(folder, "node"), master) as server:
            ways = Bootstrap(server, master, archive)
            steps: dict[str, Callable[[], Awaitable[float]]] = {
                "ssh true": lambda: ways.command("true"),
                "ssh python3": lambda: ways.command("python3", "-I", "-c", "pass"),
                "hello, cold": ways.cold,
                "hello, warm": ways.warm,
            }
            await ways.warm()  # the first login of a process imports and warms up
            taken: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(rounds):
                for name, step in steps.items():
                    taken[name].append(await step())
            print(f"server: {server.name}; archive: {len(archive.data) / 1000:.0f} kB", end="")
            print(f", built in {built_s * 1000:.1f} ms; {rounds} rounds")
    return report({name: statistics.median(times) for name, times in taken.items()}, taken)


def report(medians: dict[str, float], taken: dict[str, list[float]]) -> int:
    bare_s = medians["ssh true"]
    for name, median_s in medians.items():
        best_s = min(taken[name])
        print(
            f"{name:12} median {median_s * 1000:6.0f} ms  best {best_s * 1000:6.0f} ms"
            f"  {median_s / bare_s:5.2f} x ssh true"
        )
    warm_s, cold_s = medians["hello, warm"], medians["hello, cold"]
    print(f"warm / ssh python3: {warm_s / medians['ssh python3']:.2f}; cold / warm: ", end="")
    print(f"{cold_s / warm_s:.2f}")
    met = warm_s < WARM_TARGET_S and cold_s < COLD_TARGET_S
    print(f"targets (warm < 400 ms, cold < 2 s): {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    sys.exit(asyncio.run(measure(parser.parse_args().rounds)))
