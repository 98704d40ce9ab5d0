"""One file to a node over SSH on loopback: our push, beside `cat` over the same connection and
OpenSSH's own client.

All with aes128-gcm, onto the same disk. Our push also hashes every byte on the node and fsyncs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agents.contract.run import FileEntry
from app.nodes.archive import build_archive
from app.nodes.files import transfer
from app.nodes.files.local_files import BLOCK_BYTES, read_blocks
from app.nodes.link import open_link
from app.nodes.node import Node
from app.nodes.transport.connection import connect
from tests.bench.rigs.ssh_server import MeasuredServer, measured_server
from tests.fakes.ssh import client_of


async def push(server: MeasuredServer, master: Path, entry: FileEntry, root: Path) -> float:
    link = await open_link(
        Node(name="pc", address=server.address),
        build_archive(),
        home=master,
        gate=asyncio.Semaphore(8),
    )
    began_s = time.perf_counter()
    await transfer.push(client_of(link), f"models/{time.time_ns()}", root, [entry])
    took_s = time.perf_counter() - began_s
    await link.close()
    return took_s


async def cat(server: MeasuredServer, master: Path, entry: FileEntry, root: Path) -> float:
    connection = await connect(server.address, home=master)
    began_s = time.perf_counter()
    process = await connection.open(["sh", "-c", f"exec cat > {server.agent_home}/cat"])
    async for block in read_blocks(root, entry.path, entry.size_bytes):
        await process.write(block)
    process.write_eof()
    await process.wait()
    took_s = time.perf_counter() - began_s
    await connection.close()
    return took_s


async def openssh(server: MeasuredServer, master: Path, entry: FileEntry, root: Path) -> float:
    options = (
        *("-F", "none", "-c", "aes128-gcm@openssh.com", "-p", str(server.address.port)),
        *("-o", f"UserKnownHostsFile={master / 'known_hosts'}", "-i", str(server.address.key)),
    )
    place = f"{server.address.user}@{server.address.host}"
    began_s = time.perf_counter()
    with (root / entry.path).open("rb") as file:
        process = await asyncio.create_subprocess_exec(
            *("ssh", *options, place, f"cat > {server.agent_home}/ssh-cat"), stdin=file
        )
        if await process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode or 1, "ssh")
    return time.perf_counter() - began_s


async def measure(megabytes: int, rounds: int) -> int:
    ways = {"ours: push": push, "ours: cat": cat, "OpenSSH: ssh cat": openssh}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as folder:
        root, master = Path(folder), Path(folder, "master")
        data = os.urandom(BLOCK_BYTES) * megabytes
        (root / "weights").write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        entry = FileEntry(path="weights", size_bytes=len(data), sha256=sha256)
        async with measured_server(Path(folder, "node"), master) as server:
            await push(server, master, entry, root)
            for _ in range(rounds):
                for name, way in ways.items():
                    taken[name].append(await way(server, master, entry, root))
            print(f"server: {server.name}; {megabytes} MiB, {rounds} rounds")
    base_s = statistics.median(taken["ours: cat"])
    for name, times in taken.items():
        median_s = statistics.median(times)
        rate = len(data) / median_s / 1e6
        print(f"{name:18} {rate:6.0f} MB/s  {base_s / median_s:5.2f} x our cat")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(measure(arguments.megabytes, arguments.rounds)))
