"""Copy artifacts to folders, nodes and the hub, from a folder on this PC or else from a node."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agents.contract.requests.runs import DeleteArtifact, HashArtifact
from agents.contract.run import FileEntry
from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.artifacts.verification import compare_files, hash_folder
from app.errors import UsageError, UserError
from app.hub import hub
from app.library.bundles import Source, safe_name
from app.nodes.files.local_copy import copy_folder
from app.paths import whole_path
from app.presentation.result_text import say_bytes, say_transfers
from app.progress import OnMessage
from app.runs.nodes.node_pool import NodeAgent
from app.runs.services import Services
from app.shell_words import command_here
from app.storage.artifacts import content_sha256
from app.text import show_bytes, show_list


async def copy_artifact(
    services: Services, artifact: ArtifactSnapshot, to: str, tell: OnMessage
) -> ArtifactCopy:
    """Copy an artifact to the node `to`, or else to a new folder on this PC.

    Raises:
        UserError: no whole copy can be read, or the destination cannot be written.
    """
    node, folder = _read_place(services, to)
    source = _choose_source(artifact)
    if node is not None:
        made = await _copy_to_node(services, artifact, source, node, tell)
    else:
        assert folder is not None
        progress = say_bytes(tell, f"copying {artifact.label} to {to}")
        made = await _copy_to_folder(services, artifact, source, folder, progress)
    services.artifacts.save_copy(artifact, made)
    return made


def _read_place(services: Services, to: str) -> tuple[str | None, Path | None]:
    if to in services.pool.names():
        return to, None
    if "/" not in to and "\\" not in to and not to.startswith("~"):
        raise UsageError(
            f"there is no node {to}", f"For a folder on this PC write ./{to} or an absolute path."
        )
    try:
        return None, whole_path(Path(to))
    except OSError as error:
        raise UserError(f"{to} is not a usable path: {error.strerror}", "Name a folder.") from error


def _choose_source(artifact: ArtifactSnapshot) -> ArtifactCopy:
    for kind in ("folder", "node"):
        for copy in artifact.copies:
            if copy.kind == kind and copy.counts:
                return copy
    places = [copy.place for copy in artifact.copies]
    raise UserError(
        f"{artifact.label} cannot be read from anywhere: {show_list(places)} known",
        "If you have moved it, register its new folder: rackless artifacts add DIR",
    )


async def push_artifact(
    services: Services, artifact: ArtifactSnapshot, hub_id: str, private: bool, tell: OnMessage
) -> ArtifactCopy:
    """Push an artifact from this PC to the hub.

    Raises:
        UserError: it has no copy on this PC, or the hub refuses it.
    """
    source = _choose_source(artifact)
    if source.kind != "folder":
        raise UserError(
            f"{artifact.label} has no whole copy on this PC",
            "Copy it here: "
            + command_here("rackless", "artifacts", "copy", artifact.label, "--to", "./FOLDER"),
        )
    tell(f"pushing {artifact.label} to {hub_id}: {show_bytes(artifact.size_bytes)}")
    address = await asyncio.to_thread(
        hub.push_folder, Path(source.place), artifact.files, hub_id, private
    )
    made = ArtifactCopy(kind="hub", place=hub_id, path=address, made_s=time.time())
    services.artifacts.save_copy(artifact, made)
    return made


async def _copy_to_node(
    services: Services, artifact: ArtifactSnapshot, source: ArtifactCopy, node: str, tell: OnMessage
) -> ArtifactCopy:
    if source.kind == "node":
        return await _copy_between(services, artifact, source, node, tell)
    # Named by its content, like a bundle, so that a second copy finds the files of the first.
    path = f"artifacts/{safe_name(artifact.name)}-{content_sha256(artifact.files)[:16]}"
    await _clear_damaged(services.pool.agent(node), artifact, path)
    bundle = Source(value=source.place, destination=path, root=source.place, files=artifact.files)
    await services.pool.push(node, bundle, say_bytes(tell, f"copying {artifact.label} to {node}"))
    return ArtifactCopy(kind="node", place=node, path=path, made_s=time.time())


async def _copy_between(
    services: Services, artifact: ArtifactSnapshot, source: ArtifactCopy, node: str, tell: OnMessage
) -> ArtifactCopy:
    """Copy from one node to another; an existing copy is verified instead."""
    agent = services.pool.agent(node)
    if source.place != node:
        await _clear_damaged(agent, artifact, source.path)
        progress = say_transfers(tell, f"copying {artifact.label}")
        for note in await services.pool.copy(source.place, [node], source.path, progress):
            tell(note)
    # Hashed at the destination, since the source's copy may have been damaged.
    if not _is_whole(artifact, (await agent.ask(HashArtifact(path=source.path))).files):
        if source.place != node:
            await agent.ask(DeleteArtifact(path=source.path))
        raise _mark_damaged(services, artifact, source)
    now_s = time.time()
    return replace(source, place=node, made_s=now_s, checked_s=now_s, state="whole", problem="")


async def _clear_damaged(agent: NodeAgent, artifact: ArtifactSnapshot, path: str) -> None:
    """Delete an existing copy at `path` if it is damaged."""
    # A transfer skips files of the right size, so it would keep damaged content.
    here = (await agent.ask(HashArtifact(path=path))).files
    if here and not _is_whole(artifact, here):
        await agent.ask(DeleteArtifact(path=path))


def _is_whole(artifact: ArtifactSnapshot, files: Sequence[FileEntry]) -> bool:
    return compare_files(artifact.files, files)[0] == "whole"


async def _copy_to_folder(
    services: Services,
    artifact: ArtifactSnapshot,
    source: ArtifactCopy,
    folder: Path,
    progress: Callable[[int, int], None],
) -> ArtifactCopy:
    if source.kind == "folder":
        await copy_folder(Path(source.place), folder, artifact.files, progress)
    else:
        await services.pool.fetch(source.place, source.path, folder, expected=artifact.files)
        arrived = await asyncio.to_thread(hash_folder, folder, artifact.files)
        if not _is_whole(artifact, arrived):
            await asyncio.to_thread(shutil.rmtree, folder)
            raise _mark_damaged(services, artifact, source)
    now_s = time.time()
    return ArtifactCopy(kind="folder", place=str(folder), made_s=now_s, checked_s=now_s)


def _mark_damaged(
    services: Services, artifact: ArtifactSnapshot, source: ArtifactCopy
) -> UserError:
    """Store that a node's copy is damaged, and return the error for it."""
    services.artifacts.save_copy(artifact, replace(source, state="damaged"))
    return UserError(
        f"the copy on {source.place} differs from the hashes of {artifact.label}",
        "Verify its copies: " + command_here("rackless", "artifacts", "check", artifact.label),
    )
