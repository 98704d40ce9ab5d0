"""A master for tests, inside the master's namespace: sets nodes up from a stand-in for the lock.

Arguments are the nodes, as NAME=HOST=FINGERPRINT, set up in this order; all are sources for each
other. Prints one JSON line for each set-up: {"node", "said", "report"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from agents.contract.wire import to_wire
from app.events import EventHub
from app.nodes.fleet import Fleet
from app.nodes.node import Node, SshAddress
from app.provisioning.environment import parse_lock, setup_environment
from app.provisioning.wheels import WheelPlaces


async def main(options: argparse.Namespace) -> None:
    lock = parse_lock(options.lock.read_text())
    named = [one.split("=", 2) for one in options.nodes]
    async with Fleet(options.home, EventHub()) as fleet:
        for name, host, fingerprint in named:
            address = SshAddress(host=host, user="root", key=options.key)
            await fleet.join(Node(name=name, address=address), fingerprint)
        for name in [name for name, _, _ in named] * 2:
            said: list[str] = []
            peers = tuple(fleet.client(one) for one in fleet.names() if one != name)
            places = WheelPlaces(
                store=options.home / "wheels", locks=options.home / "environments", peers=peers
            )
            report = await setup_environment(
                fleet.client(name), places, progress=said.append, lock=lock, candidates=()
            )
            print(json.dumps({"node": name, "said": said, "report": to_wire(report)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("nodes", nargs="+", metavar="NAME=HOST=FINGERPRINT")
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--lock", type=Path, required=True)
    asyncio.run(main(parser.parse_args()))
