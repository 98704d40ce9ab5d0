"""Requests about the files of runs on a node: checkpoints, fences, bundles and artifacts."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.names import MAX_ATTEMPT, check_number
from agents.contract.requests import DELETE_S, HASH_S, NodeRequest
from agents.contract.requests.storage import Freed
from agents.contract.run import BundleStatus, CheckpointInfo, Claim, FileEntry
from agents.contract.wire import WireError, shorten

MAX_ACTIVE = 100
"""Maximum number of attempts of one run with processes on a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    checkpoints: tuple[CheckpointInfo, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListCheckpoints(NodeRequest[Checkpoints]):
    """List the checkpoints of one run or of all."""

    kind = "checkpoint.list"
    run_id: str | None = None

    def check_answer(self, answer: Checkpoints) -> None:
        for info in answer.checkpoints:
            if self.run_id not in (None, info.run_id):
                raise WireError(f"run_id is {shorten(info.run_id)}, not {shorten(self.run_id)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCheckpoint(NodeRequest[CheckpointInfo]):
    """Compare the files of a checkpoint with their hashes; the answer has `verified` filled in."""

    kind = "checkpoint.verify"
    limit_s = HASH_S
    echoes = ("run_id", "step")
    run_id: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteCheckpoint(NodeRequest[None]):
    """Delete a checkpoint of the node."""

    kind = "checkpoint.delete"
    run_id: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fence:
    attempt: int
    """Newest attempt that the node knows."""
    halted: int = 0
    """Newest attempt that a stop by the user forbids to start; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RaiseFence(NodeRequest[Fence]):
    """Refuse checkpoints of attempts older than `attempt` from now on."""

    kind = "run.fence"
    run_id: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimAttempt(NodeRequest[Claim]):
    """Claim an attempt number, which each node grants once, and raise the fence to it."""

    kind = "run.claim"
    run_id: str
    attempt: int
    replaces: int
    """Newest attempt that the claimer knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Halted:
    attempt: int
    """Newest attempt that may not start any more."""
    active: tuple[int, ...] = ()
    """Attempts that still have processes, which a stop has to end."""

    def check_foreign(self) -> None:
        check_number("active", len(self.active), 0, MAX_ACTIVE)
        for attempt in self.active:
            check_number("active", attempt, 1, MAX_ATTEMPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class HaltRun(NodeRequest[Halted]):
    """Start none of the run's attempts up to `attempt`, or up to the newest that the node knows."""

    kind = "run.halt"
    run_id: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteRun(NodeRequest[Freed]):
    """Delete all files of a finished run, and end its remaining processes."""

    kind = "run.delete"
    limit_s = DELETE_S
    run_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareBundle(NodeRequest[BundleStatus]):
    """Find the files of a bundle that the node lacks, by hashing its present files."""

    kind = "bundle.status"
    limit_s = HASH_S
    destination: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HashedFiles:
    files: tuple[FileEntry, ...]
    """Files; empty: the folder is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HashArtifact(NodeRequest[HashedFiles]):
    """Hash the files of an artifact's copy."""

    kind = "artifact.hash"
    limit_s = HASH_S
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteArtifact(NodeRequest[Freed]):
    """Delete an artifact's copy or an export; a missing one frees 0 bytes."""

    kind = "artifact.delete"
    limit_s = DELETE_S
    path: str
