"""Rules for deleting items on a node, given the reports of nodes and the registry. Pure.

Protected are items that an active or resumable run needs, and checkpoints and artifacts without
another copy that is known to be whole. A node that does not answer counts as having no copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from agents.contract.environments import KeptKind
from agents.contract.requests.storage import StorageItem, StorageKind
from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.errors import UserError
from app.events import ACTIVE_STATES, RunState
from app.runs.checkpoints import Copy
from app.text import show_bytes, show_bytes_of, show_list

BUILT: frozenset[StorageKind] = frozenset(get_args(KeptKind))
"""Kinds left by building environments, which the node's own rules protect."""
LEFTOVERS: frozenset[StorageKind] = BUILT | {"store", "partial"}
"""Kinds that are deleted if no kind is named; restoring others takes time or a transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredItem:
    """An item on a node's disk, with the reason to keep it, if any."""

    kind: StorageKind
    name: str
    size_bytes: int
    used_s: float
    protected: str = ""
    """Reason not to delete it, without a full stop; empty: it may be deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStorage:
    """Items on a node below the agent's home, the largest first."""

    node: str
    items: tuple[StoredItem, ...]
    size_bytes: int
    """Size of all items, listed or not, in bytes."""
    disk_bytes: int
    disk_free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """Known copies and runs, by which the items of one node are judged."""

    node: str
    checkpoints: Sequence[Copy] = ()
    """Checkpoints of all nodes that answer, this one included."""
    silent: Sequence[str] = ()
    """Nodes that do not answer."""
    runs: Mapping[str, RunState] = field(default_factory=dict)
    artifacts: Sequence[ArtifactSnapshot] = ()


def judge_item(item: StorageItem, known: Knowledge) -> StoredItem:
    """Return an item with the reason to keep it, if any."""
    reason = f"needed by {item.needed_by}" if item.needed_by else ""
    if not reason and item.kind == "checkpoint":
        reason = _guard_checkpoint(item.name, known)
    if not reason and item.kind == "artifact":
        reason = _guard_artifact(item.name, known)
    return StoredItem(
        kind=item.kind,
        name=item.name,
        size_bytes=item.size_bytes,
        used_s=item.used_s,
        protected=reason,
    )


def find_checkpoint(name: str, known: Knowledge) -> Copy | None:
    """Return the checkpoint that is stored as this item of the node, or None."""
    here = (copy for copy in known.checkpoints if copy.node == known.node)
    return next((copy for copy in here if copy.info.path == name), None)


def find_twins(copy: Copy, known: Knowledge) -> tuple[Copy, ...]:
    """Return the same checkpoint on other nodes, by the hash of the manifest."""
    info = copy.info
    return tuple(
        other
        for other in known.checkpoints
        if other.node != copy.node
        and not (other.broken or copy.broken)
        and (other.info.run_id, other.info.step) == (info.run_id, info.step)
        and other.info.manifest_sha256 == info.manifest_sha256
    )


def find_artifact(name: str, known: Knowledge) -> ArtifactSnapshot | None:
    """Return the artifact whose copy is this item of the node, or None."""
    for artifact in known.artifacts:
        for copy in artifact.copies:
            if (copy.kind, copy.place, copy.path) == ("node", known.node, name):
                return artifact
    return None


def _guard_checkpoint(name: str, known: Knowledge) -> str:
    copy = find_checkpoint(name, known)
    if copy is None:
        return "not known as a checkpoint"
    run_id = copy.info.run_id
    state = known.runs.get(run_id)
    if state in ACTIVE_STATES:
        return f"run {run_id} is active"
    newest = max(one.info.step for one in known.checkpoints if one.info.run_id == run_id)
    # A finished run never resumes, so a second copy is enough to delete this one.
    if state != "done" and copy.info.step == newest:
        return f"run {run_id} resumes from it"
    return "" if find_twins(copy, known) else _last("checkpoint", known)


def _guard_artifact(name: str, known: Knowledge) -> str:
    artifact = find_artifact(name, known)
    if artifact is None:
        return "not in the list of artifacts, so other copies are not known"
    return "" if any(_is_safe(copy, known) for copy in artifact.copies) else _last("copy", known)


def _is_safe(copy: ArtifactCopy, known: Knowledge) -> bool:
    """Return whether a copy is on another, reachable node and was whole when last checked."""
    is_reached = copy.kind != "node" or copy.place not in known.silent
    return copy.state == "whole" and copy.place != known.node and is_reached


def _last(what: str, known: Knowledge) -> str:
    if known.silent:
        does = "does" if len(known.silent) == 1 else "do"
        return f"the last {what} that can be reached; {show_list(known.silent)} {does} not answer"
    return f"the last {what}"


def describe_storage(storage: NodeStorage) -> str:
    """Return a sentence on the disk space used by Rackless and in total.

    >>> describe_storage(NodeStorage(node="big", items=(), size_bytes=24 << 30,
    ...     disk_bytes=100 << 30, disk_free_bytes=40 << 30))
    'Rackless uses 24.0 GiB; 60 / 100 GiB of the disk are in use.'
    """
    used_bytes = storage.disk_bytes - storage.disk_free_bytes
    used = show_bytes_of(used_bytes, storage.disk_bytes)
    return f"Rackless uses {show_bytes(storage.size_bytes)}; {used} of the disk are in use."


def choose(storage: NodeStorage, words: Sequence[str]) -> tuple[StoredItem, ...]:
    """Return the items to delete, given kinds and names of items; no words: all leftovers.

    Raises:
        UserError: a word is neither a kind nor an item, or names a protected item.
    """
    chosen: dict[str, StoredItem] = {}
    kinds = {item.kind for item in storage.items} | LEFTOVERS
    for word in words or sorted(LEFTOVERS):
        named = [item for item in storage.items if item.name == word]
        of_kind = [item for item in storage.items if item.kind == word and not item.protected]
        if not named and word not in kinds:
            raise UserError(
                f"{storage.node} has no item called {word}",
                f"List its items: rackless nodes storage {storage.node}",
            )
        if named and named[0].protected:
            raise UserError(f"{word} on {storage.node} is not deleted: {named[0].protected}")
        chosen |= {item.name: item for item in named or of_kind}
    return tuple(chosen.values())
