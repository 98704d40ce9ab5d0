"""Checkpoints of a run on one node, written so that a kill at any instant does no harm.

A checkpoint is written under a temporary name, every file is fsynced and hashed into a manifest,
then one rename makes it visible, and the folder is fsynced. Only a folder with a final name and a
manifest is a checkpoint. Deletion is the reverse: rename first, then remove. So half a checkpoint
is never visible. (Writing in place broke the newest checkpoint in 179 of 300 kills.)

An attempt that is no longer the newest of its run must not commit: the fence is read right before
the rename. Standard library only; `state` defines the content of the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.mandate import checkpoint_bytes
from agents.contract.run import FileEntry
from agents.contract.run_layout import MANIFEST_FILE, checkpoint_name, step_of_checkpoint
from agents.contract.signatures import sign
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.checkpoints import ASIDE_PREFIX, hash_entries
from agents.node.files import describe_file
from agents.node.manifest import read_manifest, write_manifest
from agents.shared.files.full_disk import describe_full
from agents.state import fsync_folder, sync_file, tells_full_disk
from agents.trainer.rank.failpoints import Failpoints

_DISCARDED = ".deleted-"
_PARTIAL = ".partial-"


class CannotWrite(ExpectedError):
    """Raised when the system refuses to write a checkpoint; no part of it remains."""


class NoRoom(CannotWrite):
    """Raised when the disk is full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a checkpoint's `manifest.json`."""

    run_id: str
    attempt: int
    step: int
    created_s: float
    files: tuple[FileEntry, ...]
    spec_sha256: str
    data_sha256: str
    model_sha256: str
    versions: dict[str, str]
    at_loss: bool = False
    """True if one rank saved it alone after the loss of another rank or a layer."""
    node: str = ""
    """Node that wrote it; empty: attempts without keys of nodes."""
    signature: str = ""
    """Its signature of `checkpoint_bytes`, by which other nodes accept copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def age(self) -> tuple[int, int]:
        """Sort key, oldest first: a later attempt is newer than any step of an earlier one."""
        return self.manifest.attempt, self.manifest.step

    def verify(self) -> str:
        """Hash every file; return the first problem, or an empty text if all are intact."""
        for entry in self.manifest.files:
            try:
                found = describe_file(self.path, self.path / entry.path)
            except ExpectedError as error:
                return error.message
            if found != entry:
                return f"{entry.path} is not what was written"
        return ""


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in the folder.

    Raises:
        ExpectedError: the manifest is missing or damaged.
    """
    try:
        manifest = from_wire(Manifest, read_manifest(path))
    except WireError as error:
        raise ExpectedError(
            f"{path} is not a complete checkpoint: {MANIFEST_FILE} cannot be used: {error}.",
            "Resume from another one: rackless checkpoints lists them",
        ) from error
    return Checkpoint(path=path, manifest=manifest)


class CheckpointFolder:
    """All checkpoints of one run on this node. Only one process at a time may write."""

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        attempt: int,
        fence: Path,
        failpoints: Failpoints,
        node: str = "",
        node_seed: str = "",
    ) -> None:
        self.path = path
        self._run_id = run_id
        self._attempt = attempt
        self._fence = fence
        self._failpoints = failpoints
        self._node, self._node_seed = node, node_seed

    def path_of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which may not exist."""
        return self.path / checkpoint_name(step)

    def holds(self, step: int) -> bool:
        """Return whether this attempt has committed a checkpoint of the step."""
        try:
            return read_checkpoint(self.path_of(step)).manifest.attempt == self._attempt
        except ExpectedError:
            return False

    def find_all(self) -> list[Checkpoint]:
        """Return the checkpoints from which a run can resume, oldest first."""
        # Damaged ones are left out: a resume could not use them.
        return sorted(self._read_all(), key=lambda checkpoint: checkpoint.age)

    def _read_all(self) -> Iterator[Checkpoint]:
        for _, path in self._find_folders():
            with contextlib.suppress(ExpectedError):
                yield read_checkpoint(path)

    def _find_folders(self) -> Iterator[tuple[int, Path]]:
        """Yield step and path of every folder that is named like a checkpoint."""
        if self.path.is_dir():
            for path in self.path.iterdir():
                step = step_of_checkpoint(path.name)
                if step is not None:
                    yield step, path

    def clean(self) -> None:
        """Remove half-written and half-deleted checkpoints of earlier attempts."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if entry.name.startswith((_PARTIAL, _DISCARDED)):
                    shutil.rmtree(entry, ignore_errors=True)

    def commit(
        self, step: int, write_files: Callable[[Path], None], about: dict[str, Any]
    ) -> Checkpoint:
        """Write a checkpoint and make it visible.

        Args:
            step: number of finished optimizer steps.
            write_files: called with a folder; writes every file except the manifest into it.
            about: `spec_sha256`, `data_sha256`, `model_sha256`, `versions` and `at_loss` of the
                manifest.

        Raises:
            CannotWrite: the disk is full or refuses writes; older checkpoints are untouched.
            ExpectedError: a newer attempt of the run has started.
        """
        partial = self.path / f"{_PARTIAL}{step:08d}-{self._attempt}-{os.getpid()}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.mkdir(mode=0o700)
            self._failpoints.reach("folder-made")
            write_files(partial)
            self._failpoints.reach("files-written")
            manifest = self._write_manifest(partial, step, about)
            self._failpoints.reach("manifest-written")
            # As late as possible: a newer attempt may have started while the files were written.
            self._check_fence()
            self._appear(partial, step)
        # Also on an interrupt: no part of an unfinished checkpoint may remain.
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            explained = _explain(error, self.path)
            if explained is error:
                raise
            raise explained from error
        return Checkpoint(path=self.path_of(step), manifest=manifest)

    def _write_manifest(self, partial: Path, step: int, about: dict[str, Any]) -> Manifest:
        entries = []
        for path in sorted(partial.iterdir()):
            # Written by libraries that do not sync, such as safetensors.
            sync_file(path)
            self._failpoints.reach("file-synced")
            entries.append(describe_file(partial, path))
        manifest = Manifest(
            run_id=self._run_id,
            attempt=self._attempt,
            step=step,
            created_s=time.time(),
            files=tuple(entries),
            **about,
            **self._sign(step, entries),
        )
        sync_file(write_manifest(partial, to_wire(manifest)))
        fsync_folder(partial)
        return manifest

    def _sign(self, step: int, entries: list[FileEntry]) -> dict[str, Any]:
        if not self._node_seed:
            return {}
        about = self._run_id, self._attempt, step, hash_entries(entries), self._node
        return {"node": self._node, "signature": sign(self._node_seed, checkpoint_bytes(*about))}

    def _check_fence(self) -> None:
        newest = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            newest = int(self._fence.read_text(encoding="ascii"))
        # The agent raises the fence before it starts an attempt. A rank that was cut off from the
        # master, and still trains, must not overwrite checkpoints of the newer attempt.
        if newest > self._attempt:
            raise ExpectedError(
                f"Attempt {newest} of run {self._run_id} has begun on this node, so attempt "
                f"{self._attempt} may no longer write checkpoints.",
                "Nothing to do: this attempt is out of date and ends here",
            )

    def _appear(self, partial: Path, step: int) -> None:
        final = self.path_of(step)
        # An earlier attempt reached this step, but this one resumed from before it.
        if final.exists():
            self._discard(final)
            self._failpoints.reach("old-discarded")
        os.rename(partial, final)
        self._failpoints.reach("renamed")
        fsync_folder(self.path)
        self._failpoints.reach("committed")

    def prune(self, keep: int, spare_step: int | None = None) -> None:
        """Delete all but the `keep` newest, later steps of earlier attempts, and old damaged ones.

        Call it only after a commit, when the newest checkpoint is known to be complete.

        Args:
            keep: number of checkpoints to keep.
            spare_step: additional step to keep: the newest one that every node has.
        """
        checkpoints = self.find_all()
        newest_step = checkpoints[-1].manifest.step if checkpoints else 0
        # Later steps of an abandoned attempt: this attempt has resumed from before them.
        ahead = [c for c in checkpoints if c.manifest.step > newest_step]
        behind = [c for c in checkpoints if c.manifest.step <= newest_step]
        old = [c for c in behind[:-keep] if c.manifest.step != spare_step]
        doomed = [c.path for c in [*ahead, *old]]
        if len(behind) >= keep:
            # Unreadable checkpoints do not count, and are useless if older than the kept ones.
            oldest_step = behind[-keep].manifest.step
            readable = {c.manifest.step for c in checkpoints}
            doomed += [p for s, p in self._find_folders() if s < oldest_step and s not in readable]
        # Replaced by another node's copy at a recovery; training has continued from that one.
        doomed += self.path.glob(f"{ASIDE_PREFIX}*")
        for path in doomed:
            with contextlib.suppress(OSError):  # the next call tries again
                self._discard(path)
            self._failpoints.reach("pruned")

    def _discard(self, path: Path) -> None:
        # Hidden by one rename, so that a kill during the removal leaves no visible half.
        hidden = path.with_name(f"{_DISCARDED}{path.name}-{time.monotonic_ns()}")
        os.rename(path, hidden)
        self._failpoints.reach("hidden")
        shutil.rmtree(hidden, ignore_errors=True)


def _explain(error: BaseException, folder: Path) -> BaseException:
    """Return errors of the system as ones that a user can act on, all others unchanged."""
    if tells_full_disk(error):
        lack, advice = describe_full(folder)
        return NoRoom(
            f"{lack}: no checkpoint could be written to {folder}.",
            f"{advice}; the next checkpoint is tried at its usual time",
        )
    if isinstance(error, OSError):
        return CannotWrite(
            f"No checkpoint could be written to {folder}: {error}.",
            "Check that the disk works and that the folder may be written",
        )
    return error
