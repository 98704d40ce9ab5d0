"""Adapter that makes the fleet of `app.nodes` a `NodePool` for `app.runs`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.run import FileEntry
from app.errors import UserError
from app.library.bundles import Source
from app.nodes.fleet import Fleet
from app.runs.nodes.node_pool import BytesProgress, NodeAgent, OnTransfers
from app.storage.hashes import HashStore
from app.storage.planning import PlanningStore

if TYPE_CHECKING:
    from app.nodes.files.transfer import Wish


class FleetPool:
    """The fleet, with stored hashes of files and rates of links."""

    def __init__(self, fleet: Fleet, hashes: HashStore, planning: PlanningStore) -> None:
        self._fleet = fleet
        self._hashes = hashes
        self._planning = planning

    def names(self) -> tuple[str, ...]:
        return self._fleet.names()

    def agent(self, name: str) -> NodeAgent:
        return self._fleet.client(name)

    def is_unreachable(self, name: str) -> bool:
        return self._fleet.snapshot(name).state == "unreachable"

    async def push(self, name: str, source: Source, progress: BytesProgress | None = None) -> str:
        # Late, here and below: commands that copy nothing start sooner.
        from app.nodes.files.transfer import push

        wish = await self._wish(name, source)
        return await push(
            wish.client,
            wish.destination,
            wish.root,
            wish.files,
            progress,
            wish.replaced,
            self._hashes.chunks,
        )

    async def share(
        self, wanted: Mapping[str, Sequence[Source]], progress: OnTransfers | None = None
    ) -> tuple[str, ...]:
        from app.nodes.files.transfer import share

        wishes = [
            await self._wish(name, source)
            for name, sources in wanted.items()
            for source in sources
            if source.destination is not None
        ]
        return await share(wishes, self._rates(), progress, self._hashes.chunks)

    async def _wish(self, name: str, source: Source) -> Wish:
        from app.nodes.files.transfer import Wish

        if source.destination is None or source.root is None:
            raise UserError(f"{source.value} is not on this PC", "Give its path on this PC.")
        # An unreadable file is reported by the transfer itself.
        replaced = {}
        with contextlib.suppress(OSError):
            replaced = await asyncio.to_thread(source.read_cleaned)
        return Wish(
            client=self._fleet.client(name),
            destination=source.destination,
            root=Path(source.root),
            files=source.files,
            replaced=replaced,
        )

    def _rates(self) -> dict[tuple[str, str], float]:
        return {
            (link.node, link.peer): link.bytes_per_s
            for link in self._planning.links()
            if link.bytes_per_s is not None
        }

    async def fetch(
        self, name: str, path: str, target: Path, expected: Sequence[FileEntry] | None = None
    ) -> None:
        from app.nodes.files.transfer import fetch

        await fetch(self._fleet.client(name), path, target, expected=expected)

    async def copy(
        self,
        source: str,
        targets: Sequence[str],
        path: str,
        progress: OnTransfers | None = None,
        expected: Mapping[str, int] | None = None,
    ) -> tuple[str, ...]:
        from app.nodes.files.transfer import copy

        clients = [self._fleet.client(target) for target in targets]
        giver = self._fleet.client(source)
        return await copy(giver, clients, path, self._rates(), progress, expected)
