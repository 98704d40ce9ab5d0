"""List the items on a node's disk with the reasons to keep them, and delete some.

Before a checkpoint or an artifact is deleted, the files of another copy are hashed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from agents.contract.requests.environment import PruneKept
from agents.contract.requests.runs import DeleteCheckpoint, ListCheckpoints
from agents.contract.requests.storage import DeleteStorage, ListStorage
from app.artifacts.deletion import delete_artifact
from app.artifacts.storage_rules import (
    BUILT,
    Knowledge,
    NodeStorage,
    StoredItem,
    find_artifact,
    find_checkpoint,
    find_twins,
    judge_item,
)
from app.artifacts.verification import check_artifact
from app.errors import RacklessError
from app.nodes.client import NodeClient
from app.progress import OnMessage
from app.runs.checkpoints import Copy, verify_copies
from app.runs.services import Services


@dataclass(frozen=True, kw_only=True, slots=True)
class FreedStorage:
    """Result of deleting items of a node."""

    node: str
    freed_bytes: int
    deleted: tuple[str, ...]
    kept: tuple[tuple[str, str], ...] = ()
    """Items that were kept after all, each with the reason."""


async def list_storage(services: Services, client: NodeClient) -> NodeStorage:
    """Return the items on a node; other nodes are asked for copies.

    Raises:
        UserError: the node does not answer.
    """
    return (await _look(services, client))[0]


async def free_storage(
    services: Services, client: NodeClient, names: Sequence[str], tell: OnMessage
) -> FreedStorage:
    """Delete items by name; items that have become protected are kept.

    Raises:
        UserError: the node does not answer.
    """
    storage, known = await _look(services, client)
    items = {item.name: item for item in storage.items}
    freed, deleted, kept = 0, [], []
    for name in names:
        item = items.get(name)
        if item is None:  # already deleted
            continue
        tell(f"deleting {name} on {client.name}")
        try:
            reason = item.protected
            if not reason:
                size, reason = await _delete(services, client, item, known, tell)
        except RacklessError as error:
            reason = str(error)
        if reason:
            kept.append((name, reason))
        else:
            freed += size
            deleted.append(name)
    return FreedStorage(
        node=client.name, freed_bytes=freed, deleted=tuple(deleted), kept=tuple(kept)
    )


async def _look(services: Services, client: NodeClient) -> tuple[NodeStorage, Knowledge]:
    report = await client.ask(ListStorage())
    known = Knowledge(node=client.name)
    if any(item.kind in ("checkpoint", "artifact") for item in report.items):
        known = await _ask_others(services, client.name)
    return NodeStorage(
        node=client.name,
        items=tuple(judge_item(item, known) for item in report.items),
        size_bytes=report.size_bytes,
        disk_bytes=report.disk_bytes,
        disk_free_bytes=report.disk_free_bytes,
    ), known


async def _ask_others(services: Services, node: str) -> Knowledge:
    async def ask(name: str) -> tuple[Copy, ...] | None:
        try:
            infos = (await services.pool.agent(name).ask(ListCheckpoints())).checkpoints
        except RacklessError:
            return None
        return tuple(Copy(node=name, info=info) for info in infos)

    names = services.pool.names()
    answers = dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))
    artifacts = services.artifacts.all()
    places = {
        copy.place for artifact in artifacts for copy in artifact.copies if copy.kind == "node"
    }
    # A node that was removed from the list may still have its copies, but cannot be asked.
    silent = [name for name, answer in answers.items() if answer is None]
    return Knowledge(
        node=node,
        checkpoints=[copy for answer in answers.values() for copy in answer or ()],
        silent=(*silent, *sorted(places - set(names))),
        runs={run.run_id: run.state for run in services.runs.store.all()},
        artifacts=artifacts,
    )


async def _delete(
    services: Services, client: NodeClient, item: StoredItem, known: Knowledge, tell: OnMessage
) -> tuple[int, str]:
    """Return the freed bytes, and the reason why the item is kept, if it is."""
    if item.kind in BUILT:
        return (await client.ask(PruneKept(names=(item.name,)))).freed_bytes, ""
    if item.kind == "checkpoint":
        return await _delete_checkpoint(services, client, item, known, tell)
    if item.kind == "artifact":
        return await _delete_artifact(services, item, known, tell)
    return (await client.ask(DeleteStorage(names=(item.name,)))).freed_bytes, ""


async def _delete_checkpoint(
    services: Services, client: NodeClient, item: StoredItem, known: Knowledge, tell: OnMessage
) -> tuple[int, str]:
    copy = find_checkpoint(item.name, known)
    assert copy is not None  # an unknown checkpoint is protected
    twins = find_twins(copy, known)
    tell(f"hashing the other copies of {item.name}")
    checked = await verify_copies(services.pool, twins)
    whole = [
        one
        for one in checked
        if one.info.verified and one.info.manifest_sha256 == copy.info.manifest_sha256
    ]
    if not whole:
        return 0, "no other copy is whole"
    await client.ask(DeleteCheckpoint(run_id=copy.info.run_id, step=copy.info.step))
    return item.size_bytes, ""


async def _delete_artifact(
    services: Services, item: StoredItem, known: Knowledge, tell: OnMessage
) -> tuple[int, str]:
    artifact = find_artifact(item.name, known)
    assert artifact is not None  # an unknown artifact is protected
    checked = await check_artifact(services, artifact, tell)
    if not any(one.state == "whole" and one.place != known.node for one in checked):
        return 0, "no other copy is whole"
    done = await delete_artifact(services, artifact, known.node, even_last=False)
    return done.freed_bytes, ""
