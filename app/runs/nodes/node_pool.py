"""Protocols of nodes for runs: the seam between `app.runs` and `app.nodes`.

They are implemented by `app.nodes.client.NodeClient` and `app.runs.nodes.fleet_pool.FleetPool`;
tests use fakes that lose nodes and answers on purpose. Every method raises UserError if the node
refuses, and NodeUnreachable if it cannot be reached.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agents.contract.requests import Answer, NodeRequest
from agents.contract.run import FileEntry, StreamChunk
from app.events import NodeTransfer
from app.library.bundles import Source
from app.progress import OnProgress

BytesProgress = Callable[[int, int], None]
"""Callback with the bytes done and the bytes in total."""
OnTransfers = Callable[[Sequence[NodeTransfer]], None]
"""Callback with the progress of each node."""


class NodeAgent(Protocol):
    """Requests of runs to one node."""

    async def ask(self, request: NodeRequest[Answer], progress: OnProgress | None = None) -> Answer:
        """Send a request and return its answer."""
        ...

    def follow_streams(
        self, run_id: str, attempt: int, offsets: Mapping[str, int]
    ) -> AsyncIterator[StreamChunk]:
        """Yield the bytes appended to an attempt's streams from `offsets`."""
        ...


class NodePool(Protocol):
    """Access of runs to all nodes."""

    def names(self) -> tuple[str, ...]:
        """Return the names of all nodes, in the order in which they were added."""
        ...

    def agent(self, name: str) -> NodeAgent:
        """Return the handle of a node; its methods connect on demand.

        Raises:
            UserError: no such node was added.
        """
        ...

    def is_unreachable(self, name: str) -> bool:
        """Return True if the node did not answer last time; False before the first contact."""
        ...

    async def push(self, name: str, source: Source, progress: BytesProgress | None = None) -> str:
        """Send the files of a bundle that the node lacks; return the folder there."""
        ...

    async def share(
        self, wanted: Mapping[str, Sequence[Source]], progress: OnTransfers | None = None
    ) -> tuple[str, ...]:
        """Distribute files that several nodes lack, from node to node, before each node's `push`.

        `push` then sends each missing file, or raises the error.

        Args:
            wanted: sources for each node, by its name.
            progress: callback with the progress of each node.

        Returns:
            Problems that the user may want to solve, as sentences.
        """
        ...

    async def fetch(
        self, name: str, path: str, target: Path, expected: Sequence[FileEntry] | None = None
    ) -> None:
        """Copy a folder below the agent's home to the new folder `target`, verified by hash.

        Args:
            name: name of the node.
            path: path of the folder there.
            target: new folder here.
            expected: files that may be in it; a node that offers others is refused.
        """
        ...

    async def copy(
        self,
        source: str,
        targets: Sequence[str],
        path: str,
        progress: OnTransfers | None = None,
        expected: Mapping[str, int] | None = None,
    ) -> tuple[str, ...]:
        """Copy a folder below the agent's home from one node to others, verified by hash.

        Args:
            source: name of the node that has it.
            targets: names of the nodes that get it.
            path: path below the agents' homes.
            progress: callback with the progress of each node.
            expected: files that may be in it with their sizes in bytes; None for all of them.

        Returns:
            Problems that the user may want to solve, as sentences.
        """
        ...
