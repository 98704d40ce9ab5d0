"""Keep all nodes of a master connected and print `{"node", "state"}` for every change of one.

A program of its own, because it has to live inside the master's network namespace.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from app.core.core import Core
from app.core.nodes import ConnectNodes
from app.events import Event, NodeChanged


def show(event: Event) -> None:
    if isinstance(event, NodeChanged):
        print(json.dumps({"node": event.node.name, "state": event.node.state}), flush=True)


async def watch(home: Path) -> None:
    async with Core.open(home) as core:
        with core.events.listening(show):
            await core.do(ConnectNodes())
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(watch(Path(os.environ["RACKLESS_HOME"])))
