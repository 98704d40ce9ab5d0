"""Protocols for what runs need from nodes: the seam between `app.runs` and `app.nodes`.

They are implemented by `app.nodes.client.NodeClient` and `app.runs.nodes.fleet_pool.FleetPool`;
tests use fakes that lose nodes and answers on purpose. Every method raises UserError when the
node refuses, and NodeUnreachable when it cannot be reached.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agents.contract.artifacts import (
    ChatJob,
    ChatOpened,
    ChatReply,
    ChatTurn,
    MakeJob,
    MergeJob,
    PackagesBuild,
    PackagesReport,
)
from agents.contract.data import DataPreview, PreviewJob
from agents.contract.hub import HubSnapshot, SnapshotPlace
from agents.contract.in_place import PlaceAnswer, PlaceQuery
from agents.contract.messages import Progress
from agents.contract.node import Calibration, CalibrationJob, ModelRefusal, NodeFacts
from agents.contract.run import (
    AttemptIntent,
    AttemptStatus,
    BundleStatus,
    CheckpointInfo,
    Claim,
    ControlRequest,
    FileEntry,
    MasterIdentity,
    StreamChunk,
)
from agents.contract.spec import RunSpec
from app.events import NodeTransfer
from app.library.bundles import Source

OnMessage = Callable[[str], None]
OnProgress = Callable[[Progress], None]
BytesProgress = Callable[[int, int], None]
"""Callback that gets the bytes done and the bytes in total."""
OnTransfers = Callable[[Sequence[NodeTransfer]], None]
"""Callback that gets how far each node is."""


class ExportedFiles(Protocol):
    @property
    def path(self) -> str: ...


class NodeAgent(Protocol):
    """One node, as far as runs need it."""

    async def facts(self) -> NodeFacts: ...
    async def port_choose(self, address: str) -> int: ...
    async def launch(self, intent: AttemptIntent) -> AttemptStatus: ...
    async def confirm(self, run_id: str, attempt: int, *, is_final: bool) -> None: ...
    async def attempt_own(self, run_id: str, attempt: int, master: MasterIdentity) -> None: ...
    async def keep(self, run_id: str, attempt: int, *, is_closed: bool) -> None: ...
    async def attempt_status(self, run_id: str, attempt: int) -> AttemptStatus: ...
    async def attempt_list(self) -> tuple[AttemptStatus, ...]: ...
    async def stop(
        self, run_id: str, attempt: int, grace_s: float, *, at_loss: bool = False
    ) -> AttemptStatus: ...
    async def leave_wish(self, run_id: str, attempt: int, wish: ControlRequest) -> None: ...
    async def stream_list(self, run_id: str, attempt: int) -> dict[str, int]: ...
    async def stream_read(
        self, run_id: str, attempt: int, stream: str, offset: int, max_bytes: int
    ) -> StreamChunk: ...
    def follow_streams(
        self, run_id: str, attempt: int, offsets: Mapping[str, int]
    ) -> AsyncIterator[StreamChunk]: ...
    async def checkpoint_list(self, run_id: str | None = None) -> tuple[CheckpointInfo, ...]: ...
    async def checkpoint_verify(self, run_id: str, step: int) -> CheckpointInfo: ...
    async def checkpoint_delete(self, run_id: str, step: int) -> None: ...
    async def bundle_status(self, destination: str, files: Sequence[FileEntry]) -> BundleStatus: ...
    async def find_places(
        self, queries: Sequence[PlaceQuery], progress: OnMessage | None = None
    ) -> tuple[PlaceAnswer, ...]: ...
    async def run_fence(self, run_id: str, attempt: int) -> int: ...
    async def run_claim(self, run_id: str, attempt: int, replaces: int) -> Claim: ...
    async def run_delete(self, run_id: str) -> int: ...
    async def hash_artifact(self, path: str) -> tuple[FileEntry, ...]: ...
    async def delete_artifact(self, path: str) -> int: ...
    async def export_merged(
        self, job: MergeJob, progress: OnProgress | None = None
    ) -> ExportedFiles: ...

    async def export_made(
        self, job: MakeJob, progress: OnProgress | None = None
    ) -> ExportedFiles: ...

    async def chat_open(self, job: ChatJob, progress: OnMessage | None = None) -> ChatOpened: ...

    async def chat_ask(
        self, chat: str, turn: ChatTurn, piece: OnMessage | None = None
    ) -> ChatReply: ...

    async def chat_stop(self, chat: str) -> None: ...
    async def chat_close(self, chat: str) -> None: ...

    async def build_packages(
        self, job: PackagesBuild, progress: OnMessage | None = None
    ) -> PackagesReport: ...
    async def preview_data(
        self, job: PreviewJob, progress: OnMessage | None = None
    ) -> DataPreview: ...
    async def calibrate(
        self, job: CalibrationJob, progress: OnMessage | None = None
    ) -> Calibration: ...
    async def hub_snapshot(self, model: str) -> HubSnapshot | None: ...
    async def hub_fetch(
        self, model: str, progress: OnMessage | None = None
    ) -> HubSnapshot | None: ...
    async def hub_offer(self, place: SnapshotPlace) -> None: ...
    async def hub_show(self, place: SnapshotPlace) -> None: ...
    async def model_config(self, model: str) -> dict[str, Any] | None: ...
    async def inspect_model(self, model: str, spec: RunSpec) -> tuple[ModelRefusal, ...]: ...


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
