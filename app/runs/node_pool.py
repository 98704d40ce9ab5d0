"""What the life of a run needs of the nodes: the seam between `app.runs` and `app.nodes`.

The real ones are `app.nodes.client.NodeClient` and the core's adapter of the fleet; tests put fakes
in their place that lose nodes and answers on purpose. Every method raises UserError when the node
says why not, and NodeUnreachable when it cannot be asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
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
from agents.contract.messages import Progress
from agents.contract.node import Calibration, CalibrationJob, NodeFacts
from agents.contract.run import (
    AttemptIntent,
    AttemptStatus,
    CheckpointInfo,
    ControlRequest,
    FileEntry,
    StreamChunk,
)
from app.library.bundles import Source

OnMessage = Callable[[str], None]
OnProgress = Callable[[Progress], None]
BytesProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes to do."""


class ExportedFiles(Protocol):
    @property
    def path(self) -> str: ...


class NodeAgent(Protocol):
    """One node, as far as runs go."""

    async def facts(self) -> NodeFacts: ...
    async def port_choose(self, address: str) -> int: ...
    async def launch(self, intent: AttemptIntent) -> AttemptStatus: ...
    async def attempt_status(self, run_id: str, attempt: int) -> AttemptStatus: ...
    async def attempt_list(self) -> tuple[AttemptStatus, ...]: ...
    async def stop(self, run_id: str, attempt: int, grace_s: float) -> AttemptStatus: ...
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
    async def run_fence(self, run_id: str, attempt: int) -> int: ...
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
    async def model_config(self, model: str) -> dict[str, Any] | None: ...


class NodePool(Protocol):
    """All nodes, as far as runs go."""

    def names(self) -> tuple[str, ...]:
        """Return every node that was added, in order."""
        ...

    def agent(self, name: str) -> NodeAgent:
        """Return the handle of a node; each call on it connects where needed.

        Raises:
            UserError: no such node was added.
        """
        ...

    async def push(self, name: str, source: Source, progress: BytesProgress | None = None) -> str:
        """Send what of a bundle is missing on the node; return its folder there."""
        ...

    async def fetch(self, name: str, path: str, target: Path) -> None:
        """Copy a folder below the agent's home to the new folder `target`, files checked."""
        ...

    async def copy(self, source: str, target: str, path: str) -> None:
        """Copy a folder below the agent's home from one node to another, files checked."""
        ...
