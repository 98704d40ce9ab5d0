"""From a node without any package to a trained step over SSH on loopback: where the time goes.

Two nodes one after the other, with the real lock for CPUs and a warm download cache (a folder of
this PC stands for the package index): the first fetches from the cache, the second gets all from
the first, and reaches no index at all. Beside each other: what uv and the trial's imports take, and
what is Rackless's own: connecting, sending the agent, looking, fetching, copying.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from agents.contract.environments import this_target
from agents.contract.requests import NodeRequest
from agents.contract.requests.environment import (
    EnvironmentBuild,
    EnvironmentQuery,
    FetchWheels,
    FindBuildTools,
    LookForWheels,
    TryEnvironment,
    UnpackUv,
)
from agents.contract.requests.node import ReadFacts
from agents.contract.requests.runs import CompareBundle
from agents.shared.packages.lock import read_lock_text
from agents.shared.packages.package_index import PackageIndex, read_index_settings
from agents.shared.packages.wheel_progress import show_size
from agents.shared.packages.wheel_store import WheelSet, fetch
from app.nodes.archive import build_archive
from app.nodes.client import NodeClient
from app.nodes.link import open_link
from app.nodes.node import Node
from app.provisioning.environment import read_lock, read_train_lock, setup_environment
from app.provisioning.torch_build import TorchBuild
from app.provisioning.wheels import WheelPlaces
from tests.bench.rigs.ssh_server import measured_server

TARGET_OWN_S, TARGET_S = 20.0, 180.0
PHASES: dict[type[NodeRequest[Any]], str] = {
    FindBuildTools: "look",
    EnvironmentQuery: "look",
    ReadFacts: "look",
    LookForWheels: "look",
    UnpackUv: "look",
    FetchWheels: "fetch",
    CompareBundle: "copy",
    EnvironmentBuild: "uv",
    TryEnvironment: "trial",
}
NOT_OURS = ("uv", "trial")


class TimedClient:
    """A client whose requests are added to the seconds of their phases."""

    def __init__(self, client: NodeClient, seconds: dict[str, float]) -> None:
        self._client = client
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def ask(self, request: NodeRequest[Any], *progress: Any) -> Any:
        with self._timing(PHASES.get(type(request))):
            return await self._client.ask(request, *progress)

    async def open_command(self, *arguments: str) -> Any:
        with self._timing("copy"):
            return await self._client.open_command(*arguments)

    @contextlib.contextmanager
    def _timing(self, phase: str | None) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            if phase is not None:
                took_s = time.perf_counter() - began_s
                self._seconds[phase] = self._seconds.get(phase, 0.0) + took_s


def warm(cache: Path, lock_texts: Sequence[str]) -> int:
    """Fetch all wheels into a folder, each once; return their size in bytes."""
    version = ".".join(map(str, sys.version_info[:3]))
    index = PackageIndex(read_index_settings(os.environ, Path.home(), TorchBuild.CPU.index_url))
    size = 0
    for text in lock_texts:
        wheels = WheelSet(
            store=cache / "wheels", lock=read_lock_text(text), target=this_target(version)
        )
        fetch(wheels, index, lambda said: print(f"\r{said:79}", end="", file=sys.stderr))
        size += wheels.size_bytes
        for file in wheels.present().values():
            if not (cache / file.name).exists():
                os.link(file, cache / file.name)
    print(file=sys.stderr)
    return size


@asynccontextmanager
async def connected(folder: Path, name: str, *, cache: Path | None) -> AsyncIterator[Any]:
    """A node without any package; yields its client and the seconds until it said hello."""
    master = folder / f"{name}-master"
    async with measured_server(folder / name, master) as server:
        home = folder / name / "home"
        home = home if home.exists() else server.agent_home.parents[2]
        config = home / ".config" / "pip" / "pip.conf"
        config.parent.mkdir(parents=True)
        links = f"find-links = {cache}\n" if cache else ""
        config.write_text(f"[global]\nno-index = true\n{links}")
        began_s = time.perf_counter()
        archive = build_archive()
        link = await open_link(
            Node(name=name, address=server.address), archive, home=master, gate=asyncio.Semaphore(8)
        )
        took_s = time.perf_counter() - began_s

        async def keep() -> Any:
            return link

        try:
            yield NodeClient(name, keep), took_s
        finally:
            await link.close()


async def measure(cache: Path) -> int:
    """Print a column per node; return 1 when a target is missed."""
    locks = (read_train_lock(TorchBuild.CPU).text, read_lock("uv").text)
    size = await asyncio.to_thread(warm, cache, locks)
    columns: list[dict[str, float]] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rackless-bench-")))
        peers: list[NodeClient] = []
        for name, source in (("first", cache), ("second", None)):
            client, hello_s = await stack.enter_async_context(connected(folder, name, cache=source))
            seconds = {"hello": hello_s}
            timed: Any = TimedClient(client, seconds)
            places = WheelPlaces(store=folder / "store", locks=folder / "locks", peers=tuple(peers))
            began_s = time.perf_counter()
            report = await setup_environment(timed, places, candidates=())
            total_s = time.perf_counter() - began_s
            assert report.built_with is not None
            # What passes through this PC between requests is copying, too.
            seconds["copy"] = total_s - sum(
                value for phase, value in seconds.items() if phase not in ("hello", "copy")
            )
            again_s = time.perf_counter()
            await setup_environment(timed, places, candidates=())
            seconds["again"] = time.perf_counter() - again_s
            seconds["total"] = hello_s + total_s
            seconds["own"] = seconds["total"] - sum(seconds.get(one, 0.0) for one in NOT_OURS)
            columns.append(seconds)
            peers.append(client)
            print(f"{name}: {report.built_with}, {report.python_version}", file=sys.stderr)
    return report_all(columns, size)


def report_all(columns: list[dict[str, float]], size: int) -> int:
    print(f"packages: {show_size(size)}; a warm cache for the first node, none for the second")
    print(f"{'phase':8}{'first':>9}{'second':>9}")
    for phase in ("hello", "look", "fetch", "copy", "uv", "trial", "total", "own", "again"):
        print(f"{phase:8}" + "".join(f"{one.get(phase, 0.0):8.1f}s" for one in columns))
    met = all(one["own"] < TARGET_OWN_S and one["total"] < TARGET_S for one in columns)
    print(f"targets (own < 20 s, total < 180 s): {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, help="folder for packages; default: a new one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rackless-cache-") as made:
        place = (options.cache or Path(made)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        sys.exit(asyncio.run(measure(place)))
