"""Download a model or data set of the hub into the cache of this PC, in a program of its own."""

from __future__ import annotations

import json
from pathlib import Path

from agents.contract.requests.hub import FetchData, FetchSnapshot
from agents.contract.wire import to_wire
from app.errors import UserError
from app.progress import OnMessage
from app.runs.nodes.local_program import run_program


async def download_here(request: FetchSnapshot | FetchData, home: Path, report: OnMessage) -> str:
    """Download into the hub's cache on this PC; return the folder of the revision.

    Cancelling it ends the program; what has arrived is kept, and the next download continues it.

    Raises:
        UserError: it cannot be downloaded.
    """
    ended = await run_program("agents.trainer.data.hub_fetch", to_wire(request), home, report)
    if ended.code == 0:
        return str(json.loads(ended.report)["folder"])
    if ended.failed is None:
        last = ended.last_error or "it said nothing"
        raise UserError(f"this PC: the download ended with code {ended.code}: {last}")
    message = str(ended.failed.get("message", "")).replace("this node", "this PC")
    hint = str(ended.failed.get("hint", "")).replace("the node your token", "this PC your token")
    raise UserError(f"this PC: {message}", hint, topic="model-download")
