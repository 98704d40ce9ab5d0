"""Adapter that gives `app.runs` the fleet of `app.nodes` as a `NodePool`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from agents.contract.run import FileEntry
from app.errors import UserError
from app.library.bundles import Source
from app.nodes.files import transfer
from app.nodes.fleet import Fleet
from app.runs.node_pool import BytesProgress, NodeAgent


class FleetPool:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def names(self) -> tuple[str, ...]:
        return self._fleet.names()

    def agent(self, name: str) -> NodeAgent:
        return self._fleet.client(name)

    async def push(self, name: str, source: Source, progress: BytesProgress | None = None) -> str:
        if source.destination is None or source.root is None:
            raise UserError(f"{source.value} is not on this PC", "Give its path on this PC.")
        client = self._fleet.client(name)
        root = Path(source.root)
        # A file that cannot be read is reported by the transfer itself.
        replaced = {}
        with contextlib.suppress(OSError):
            replaced = await asyncio.to_thread(source.read_cleaned)
        return await transfer.push(
            client, source.destination, root, source.files, progress, replaced
        )

    async def fetch(
        self, name: str, path: str, target: Path, expected: Sequence[FileEntry] | None = None
    ) -> None:
        await transfer.fetch(self._fleet.client(name), path, target, expected=expected)

    async def copy(self, source: str, target: str, path: str) -> None:
        await transfer.copy(self._fleet.client(source), [self._fleet.client(target)], path)
