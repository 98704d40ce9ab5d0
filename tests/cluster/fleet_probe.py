"""A master for tests, inside the master's namespace: prints each change of a node's state.

One JSON line each: {"time_s", "state"}; at the end of a push also {"pushed_s"}. Ends with stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from pathlib import Path

from agents.contract.requests.connection import Ping
from agents.contract.run import FileEntry
from app.events import Event, EventHub, NodeChanged
from app.nodes.files import transfer
from app.nodes.fleet import Fleet
from app.nodes.node import Node, SshAddress


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


async def main(options: argparse.Namespace) -> None:
    states: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, NodeChanged) and [event.node.state] != states[-1:]:
            states.append(event.node.state)
            say(time_s=time.monotonic(), state=event.node.state)

    hub = EventHub()
    address = SshAddress(host=options.host, user="root", key=options.key)
    with hub.listening(note):
        async with Fleet(options.home, hub) as fleet:
            await fleet.join(Node(name="pc", address=address), options.fingerprint)
            await fleet.connect()
            client = fleet.client("pc")
            await client.ask(Ping())
            if options.push is not None:
                data = options.push.read_bytes()
                sha256 = hashlib.sha256(data).hexdigest()
                entry = FileEntry(path=options.push.name, size_bytes=len(data), sha256=sha256)
                began_s = time.monotonic()
                await transfer.push(client, "data/d", options.push.parent, [entry])
                say(pushed_s=time.monotonic() - began_s)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--push", type=Path)
    asyncio.run(main(parser.parse_args()))
