"""A master for transfers, inside the master's namespace: spreads a folder, prints lines of JSON.

First {"ready"} once all nodes answer; then, after a line on stdin, {"progress": {node: bytes}}, and
at the end {"report"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.contract.chunks import ChunkedFile, hash_chunks
from app.events import NodeTransfer
from app.nodes.archive import build_archive
from app.nodes.client import NodeClient
from app.nodes.files.chunk_readers import Place
from app.nodes.files.spread import spread_local
from app.nodes.link import Link, open_link
from app.nodes.node import Node, SshAddress


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def show(progress: Sequence[NodeTransfer]) -> None:
    say(progress={one.node: one.held_bytes for one in progress})


def read_files(root: Path) -> tuple[list[Place], list[ChunkedFile]]:
    """Return the files of a folder and their content."""
    places = [Place(root=root, path=path.name) for path in sorted(root.iterdir())]
    files = []
    for place in places:
        with (root / place.path).open("rb") as file:
            files.append(hash_chunks(file))
    return places, files


async def connect(options: argparse.Namespace) -> tuple[list[NodeClient], list[Link]]:
    gate, archive = asyncio.Semaphore(8), build_archive()

    async def open_one(text: str) -> tuple[NodeClient, Link]:
        name, host, fingerprint = text.split(",")
        node = Node(name=name, address=SshAddress(host=host, user="root", key=options.key))
        link = await open_link(
            node, archive, home=options.home, gate=gate, accept_host_key=fingerprint
        )

        async def get() -> Link:
            return link

        return NodeClient(name, get), link

    found = [await open_one(text) for text in options.node]
    return [client for client, _ in found], [link for _, link in found]


async def main(options: argparse.Namespace) -> None:
    places, files = await asyncio.to_thread(read_files, options.folder)
    clients, links = await connect(options)
    say(ready=True)
    await asyncio.to_thread(sys.stdin.readline)
    began_s = time.monotonic()
    report = await spread_local(places, files, clients, {}, show)
    say(
        report={
            "took_s": time.monotonic() - began_s,
            "seconds": report.seconds,
            "received": report.received_bytes,
            "problems": {name: str(problem) for name, problem in report.problems.items()},
            "notes": report.notes,
        }
    )
    await asyncio.gather(*(link.close() for link in links), return_exceptions=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", action="append", required=True, help="NAME,HOST,FINGERPRINT")
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    asyncio.run(main(parser.parse_args()))
