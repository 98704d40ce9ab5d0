"""Transfer folders to nodes, from nodes, and from one node to others.

A folder that is complete on a node is not sent again; an interrupted transfer resumes with the
missing files. Every file is verified by its SHA-256 where it arrives, and a folder gets its final
name when it is complete. A cancelled transfer leaves nothing half done on this PC.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from agents.contract.run import FileEntry
from app.errors import RacklessError, UserError
from app.nodes.client import NodeClient
from app.nodes.files.local_files import (
    FileWriter,
    in_thread,
    publish_folder,
    read_blocks,
    remove_folder,
)
from app.nodes.files.remote_files import Receiver, Sender
from app.paths import room_bytes
from app.text import show_bytes

BytesProgress = Callable[[int, int], None]
"""Callback with the bytes done and the bytes in total."""


async def push(
    client: NodeClient,
    destination: str,
    root: Path,
    files: Sequence[FileEntry],
    progress: BytesProgress | None = None,
    replaced: Mapping[str, bytes] | None = None,
) -> str:
    """Send `files` (below `root`) to `destination` on a node; return the folder there.

    Args:
        destination: below the agent's home, such as `models/tiny-0123456789abcdef`.
        replaced: content to send in place of that of small files, by their paths.

    Raises:
        UserError: a file cannot be read or has changed, the node's disk is full, ...
        NodeUnreachable: the connection broke; finished files stay for the next try.
    """
    status = await client.bundle_status(destination, files)
    if status.complete:
        return status.path
    missing = frozenset(status.missing)
    coming = [entry for entry in files if entry.path in missing]
    done = _ByteCount(coming, progress)
    async with await Receiver.open(client, destination, coming, files) as receiver:
        for entry in coming:
            # Closes the file at once if the node refuses, not at some garbage collection.
            instead = (replaced or {}).get(entry.path)
            source = _blocks_of(root, entry) if instead is None else _one_block(instead)
            async with contextlib.aclosing(source) as blocks:
                async for block in blocks:
                    # The node has stopped reading; `finish` raises its reason.
                    if not await receiver.write(block):
                        return await receiver.finish()
                    done.add(block)
        return await receiver.finish()


async def fetch(
    client: NodeClient,
    path: str,
    target: Path,
    progress: BytesProgress | None = None,
    expected: Sequence[FileEntry] | None = None,
) -> None:
    """Copy the folder `path` (below the agent's home) to the new folder `target`.

    Args:
        client: of the node.
        path: of the folder there.
        target: of the folder here.
        progress: gets the bytes done and in total.
        expected: files that are known to be in it; None: whatever the node lists.

    Raises:
        UserError: it does not exist, `target` exists or cannot be written, a file is damaged, it
            has other files than expected, or more than this disk has room for.
        NodeUnreachable: the connection broke; nothing is left of `target`.
    """
    if await in_thread(target.exists):
        raise UserError(f"{target} exists already", "Choose a new folder")
    # Beside the target, so that the rename stays on one file system; random, so that two fetches
    # of one folder do not meet.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        async with Sender(client, path) as sender:
            entries = await sender.entries()
            _require_expected(client.name, entries, expected)
            await in_thread(_require_room, client.name, entries, target)
            done = _ByteCount(entries, progress)
            for entry in entries:
                async with FileWriter(temporary, entry, client.name) as file:
                    async for block in sender.blocks(entry):
                        await file.write(block)
                        done.add(block)
            await sender.finish()
        await in_thread(publish_folder, temporary, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror or error}",
            "Free some space on that disk, or choose a folder that you may write to",
        ) from error
    finally:
        await in_thread(remove_folder, temporary)


def _require_expected(
    name: str, entries: Sequence[FileEntry], expected: Sequence[FileEntry] | None
) -> None:
    known = None if expected is None else frozenset(expected)
    other = next((e for e in entries if known is not None and e not in known), None)
    if other is not None:
        raise UserError(
            f"{name} offers {other.path!a} with {show_bytes(other.size_bytes)}, which is not the "
            "file that is known",
            "Nothing was written. The copy there has changed; take another one",
        )


def _require_room(name: str, entries: Sequence[FileEntry], target: Path) -> None:
    above = next(folder for folder in target.parents if folder.is_dir())
    coming, room = sum(entry.size_bytes for entry in entries), room_bytes(above)
    if coming > room:
        raise UserError(
            f"{name} offers {show_bytes(coming)}, and the disk of {target} has room for "
            f"{show_bytes(max(room, 0))}",
            "Free some space on that disk, or choose a folder on another one",
        )


async def copy(
    source: NodeClient,
    targets: Iterable[NodeClient],
    path: str,
    progress: BytesProgress | None = None,
) -> None:
    """Copy the folder `path` from one node to others, through this PC but not onto its disk.

    The bytes are read once; the slowest target sets the pace. A target that fails does not affect
    the others.

    Raises:
        UserError: the source failed, or a target did; the other targets are complete then.
    """
    problems: list[RacklessError] = []
    async with Sender(source, path) as sender, contextlib.AsyncExitStack() as stack:
        entries = await sender.entries()
        receivers = []
        for target in targets:
            try:
                receiver = await _open_missing(target, path, entries)
                if receiver is not None:
                    receivers.append(await stack.enter_async_context(receiver))
            except RacklessError as error:
                problems.append(error)
        done = _ByteCount(entries, progress)
        for entry in entries if receivers else ():
            # A file that no target wants is read as well: the stream cannot skip it.
            wanted = [receiver for receiver in receivers if receiver.wants(entry)]
            async for block in sender.blocks(entry):
                await asyncio.gather(*(receiver.write(block) for receiver in wanted))
                done.add(block)
        for receiver in receivers:
            try:
                await receiver.finish()
            except RacklessError as error:
                problems.append(error)
    if problems:
        raise problems[0]


def _blocks_of(root: Path, entry: FileEntry) -> AsyncGenerator[bytes]:
    return read_blocks(root, entry.path, entry.size_bytes)


async def _one_block(data: bytes) -> AsyncGenerator[bytes]:
    yield data


async def _open_missing(
    client: NodeClient, destination: str, entries: Sequence[FileEntry]
) -> Receiver | None:
    status = await client.bundle_status(destination, entries)
    if status.complete:
        return None
    missing = frozenset(status.missing)
    coming = [entry for entry in entries if entry.path in missing]
    return await Receiver.open(client, destination, coming, entries)


class _ByteCount:
    """Counter of transferred bytes that reports progress."""

    def __init__(self, coming: Iterable[FileEntry], progress: BytesProgress | None) -> None:
        self._total = sum(entry.size_bytes for entry in coming)
        self._done = 0
        self._progress = progress

    def add(self, block: bytes) -> None:
        self._done += len(block)
        if self._progress is not None:
            self._progress(self._done, self._total)
