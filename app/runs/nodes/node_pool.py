"""Protocols for what runs need from nodes: the seam between `app.runs` and `app.nodes`.

They are implemented by `app.nodes.client.NodeClient` and `app.runs.nodes.fleet_pool.FleetPool`;
tests use fakes that lose nodes and answers on purpose. Every method raises UserError when the
node refuses, and NodeUnreachable when it cannot be reached.
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
"""Callback that gets the bytes done and the bytes in total."""
OnTransfers = Callable[[Sequence[NodeTransfer]], None]
"""Callback that gets how far each node is."""


class NodeAgent(Protocol):
    """One node, as far as runs need it."""

    async def ask(self, request: NodeRequest[Answer], progress: OnProgress | None = None) -> Answer:
        """Send a request and return its answer."""
        ...

    def follow_streams(
        self, run_id: str, attempt: int, offsets: Mapping[str, int]
    ) -> AsyncIterator[StreamChunk]:
        """Yield what is appended to the streams of an attempt from `offsets` on."""
        ...


class NodePool(Protocol):
    """All nodes, as far as runs need them."""

    def names(self) -> tuple[str, ...]:
        """Return the names of all nodes, in the order in which they were added."""
        ...

    def agent(self, name: str) -> NodeAgent:
        """Return the handle of a node; its methods connect when needed.

        Raises:
            UserError: no such node was added.
        """
        ...

    def is_unreachable(self, name: str) -> bool:
        """Return whether the node did not answer last time; False before the first contact."""
        ...

    async def push(self, name: str, source: Source, progress: BytesProgress | None = None) -> str:
        """Send the files of a bundle that the node lacks; return the folder there."""
        ...

    async def share(
        self, wanted: Mapping[str, Sequence[Source]], progress: OnTransfers | None = None
    ) -> tuple[str, ...]:
        """Bring files that several nodes lack to them, from node to node, before each is pushed.

        Whatever a node does not get, `push` sends it, or says why not.

        Args:
            wanted: what each node is to get, by its name.
            progress: gets how far each node is.

        Returns:
            What a person may want to mend, in sentences.
        """
        ...

    async def fetch(
        self, name: str, path: str, target: Path, expected: Sequence[FileEntry] | None = None
    ) -> None:
        """Copy a folder below the agent's home to the new folder `target`, verified by hash.

        Args:
            name: of the node.
            path: of the folder there.
            target: of the folder here.
            expected: files that are known to be in it; a node that offers others is refused.
        """
        ...

    async def copy(
        self,
        source: str,
        targets: Sequence[str],
        path: str,
        progress: OnTransfers | None = None,
    ) -> tuple[str, ...]:
        """Copy a folder below the agent's home from one node to others, verified by hash.

        Returns:
            What a person may want to mend, in sentences.
        """
        ...
