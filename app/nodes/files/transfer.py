"""Transfer folders to nodes, from nodes, and from one node to others.

A folder that is complete on a node is not sent again, nor is a file that it has under any name. An
interrupted transfer resumes with the missing chunks of large files and the missing small files.
Large files, and those that several nodes lack, go to the nodes' stores first (spread.py), then get
their names. Every file is verified by its SHA-256 on arrival, and a folder gets its final name when
it is complete. A cancelled transfer leaves no temporary files on this PC.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.contract.chunks import CHUNK_BYTES, ChunkedFile, hash_chunks
from agents.contract.requests.runs import CompareBundle
from agents.contract.run import FileEntry
from agents.shared.files.folder_files import open_regular, require_own
from agents.shared.files.full_disk import advise_room, name_disk_error
from app.errors import RacklessError, UserError
from app.events import NodeTransfer
from app.nodes.client import NodeClient
from app.nodes.files import local_files
from app.nodes.files.chunk_readers import Place
from app.nodes.files.remote_files import Receiver, Sender, check_entries
from app.nodes.files.route import Link
from app.nodes.files.spread import spread_from, spread_local
from app.nodes.files.spread_state import Giver, OnSpread, SpreadReport
from app.paths import room_bytes
from app.text import show_bytes

BytesProgress = Callable[[int, int], None]
"""Callback with the bytes done and the bytes in total."""
ChunkFile = Callable[[Path, str], ChunkedFile]
"""Callback that returns a file's chunks, given its SHA-256; raises OSError."""
SHARED_BYTES = 8 << 20
"""Size from which files that several nodes lack are forwarded from node to node, in bytes; below
it, connecting the nodes would take longer than sending twice."""


def hash_now(path: Path, sha256: str) -> ChunkedFile:
    """Return the chunks of a file by reading it; `sha256` would be the key of a cache.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        return hash_chunks(file)


async def push(
    client: NodeClient,
    destination: str,
    root: Path,
    files: Sequence[FileEntry],
    progress: BytesProgress | None = None,
    replaced: Mapping[str, bytes] | None = None,
    chunks: ChunkFile = hash_now,
) -> str:
    """Send `files` (below `root`) to `destination` on a node; return the folder there.

    Files of more than one chunk resume where an interrupted transfer ended.

    Args:
        client: client of the node.
        destination: folder below the agent's home, such as `models/tiny-0123456789abcdef`.
        root: folder of the files here.
        files: names and hashes of the files.
        progress: callback with the bytes done and in total.
        replaced: content that replaces that of small files, by path.
        chunks: source of a file's chunks, such as a cache.

    Raises:
        UserError: a file cannot be read or has changed, the node's disk is full, ...
        NodeUnreachable: the connection broke; received data stays for the next try.
    """
    status = await client.ask(CompareBundle(destination=destination, files=tuple(files)))
    if status.complete:
        return status.path
    missing = frozenset(status.missing)
    coming = [entry for entry in files if entry.path in missing]
    done = _ByteCount(coming, progress)
    wish = Wish(client=client, destination=destination, root=root, files=files, replaced=replaced)
    # Only files of several chunks can resume in the middle; small ones are cheaper in one stream.
    stored = {e.sha256: e for e in coming if e.size_bytes > CHUNK_BYTES and wish.is_file(e)}
    if stored:
        pairs = [(Place(root=root, path=entry.path), entry) for entry in stored.values()]
        report = await _stock([client], pairs, {}, chunks, done.take)
        if client.name in report.problems:
            raise report.problems[client.name]
        coming = [entry for entry in coming if entry.sha256 not in stored]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Files to copy from this PC to one node."""

    client: NodeClient
    destination: str
    root: Path
    files: Sequence[FileEntry]
    replaced: Mapping[str, bytes] | None = None

    def is_file(self, entry: FileEntry) -> bool:
        """Return True if the content to send is that of the file on this PC."""
        return entry.path not in (self.replaced or {})


async def share(
    wishes: Sequence[Wish],
    rates: Mapping[Link, float],
    progress: OnSpread | None = None,
    chunks: ChunkFile = hash_now,
) -> tuple[str, ...]:
    """Bring files that several nodes lack into their stores, so that this PC sends them only once.

    This only saves time: `push` sends each missing file, or raises the error.

    Args:
        wishes: files for each node; a node may have several.
        rates: measured rates of links between nodes, in bytes/s.
        progress: callback with the progress of each node.
        chunks: source of a file's chunks, such as a cache.

    Returns:
        Problems that the user may want to solve, as sentences.
    """
    states = await asyncio.gather(
        *(
            wish.client.ask(CompareBundle(destination=wish.destination, files=tuple(wish.files)))
            for wish in wishes
        )
    )
    wanted: dict[str, tuple[Place, FileEntry]] = {}
    takers: dict[str, dict[str, NodeClient]] = {}
    for wish, state in zip(wishes, states, strict=True):
        missing = frozenset(state.missing)
        for entry in wish.files:
            if entry.path in missing and entry.size_bytes and wish.is_file(entry):
                wanted[entry.sha256] = (Place(root=wish.root, path=entry.path), entry)
                takers.setdefault(entry.sha256, {})[wish.client.name] = wish.client
    # One chain for each set of nodes: each file then goes to exactly the nodes that lack it.
    groups: dict[frozenset[str], list[str]] = {}
    for sha256, by_name in takers.items():
        groups.setdefault(frozenset(by_name), []).append(sha256)
    notes: list[str] = []
    for names, group in groups.items():
        pairs = [wanted[sha256] for sha256 in group]
        if len(names) < 2 or sum(entry.size_bytes for _, entry in pairs) < SHARED_BYTES:
            continue
        clients = list(takers[group[0]].values())
        with contextlib.suppress(UserError):  # `push` hits the same error, and raises it
            notes += (await _stock(clients, pairs, rates, chunks, progress)).notes
    return tuple(notes)


async def _stock(
    clients: Sequence[NodeClient],
    pairs: Sequence[tuple[Place, FileEntry]],
    rates: Mapping[Link, float],
    chunks: ChunkFile,
    progress: OnSpread | None,
) -> SpreadReport:
    """Bring files of this PC into the stores of nodes."""
    files = [await local_files.in_thread(_chunk, place, entry, chunks) for place, entry in pairs]
    return await spread_local([place for place, _ in pairs], files, clients, rates, progress)


def _chunk(place: Place, entry: FileEntry, chunks: ChunkFile) -> ChunkedFile:
    path = place.root / place.path
    try:
        require_own(path, place.root)
        found = chunks(path, entry.sha256)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}",
            "Check that it is still there and that you may read it",
        ) from error
    if (found.sha256, found.size_bytes) != (entry.sha256, entry.size_bytes):
        raise UserError(
            f"{path} has changed since it was hashed", "Leave the file alone and try again"
        )
    return found


async def fetch(
    client: NodeClient,
    path: str,
    target: Path,
    progress: BytesProgress | None = None,
    expected: Sequence[FileEntry] | None = None,
) -> None:
    """Copy the folder `path` (below the agent's home) to the new folder `target`.

    Args:
        client: client of the node.
        path: path of the folder there.
        target: new folder here.
        progress: callback with the bytes done and in total.
        expected: files that may be in it; None to accept all that the node lists.

    Raises:
        UserError: it does not exist, `target` exists or cannot be written, a file is damaged, it
            has other files than expected, or more than this disk has room for.
        NodeUnreachable: the connection broke; `target` does not exist then.
    """
    if await local_files.in_thread(target.exists):
        raise UserError(f"{target} exists already", "Choose a new folder")
    # Next to the target, so that the rename stays on one file system; random, so that two fetches
    # of one folder do not collide.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        async with Sender(client, path) as sender:
            entries = await sender.entries()
            _require_expected(client.name, entries, expected)
            await local_files.in_thread(_require_room, client.name, entries, target)
            done = _ByteCount(entries, progress)
            for entry in entries:
                async with local_files.FileWriter(temporary, entry, client.name) as file:
                    async for block in sender.blocks(entry):
                        await file.write(block)
                        done.add(block)
            await sender.finish()
        await local_files.in_thread(local_files.publish_folder, temporary, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {name_disk_error(error)}",
            f"{advise_room(error)}, or choose a folder that you may write to",
        ) from error
    finally:
        await local_files.in_thread(local_files.remove_folder, temporary)


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
    targets: Sequence[NodeClient],
    path: str,
    rates: Mapping[Link, float],
    progress: OnSpread | None = None,
    expected: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """Copy the folder `path` from one node to others, forwarding it between them.

    A failing target does not affect the others.

    Args:
        source: node with the folder.
        targets: nodes that get the folder under the same path.
        path: path below the agents' homes.
        rates: measured rates of links between nodes, in bytes/s.
        progress: callback with the progress of each node.
        expected: files that may be in it with their sizes in bytes; None for all that it lists.

    Returns:
        Problems that the user may want to solve, as sentences.

    Raises:
        UserError: the source failed, or a target did; the other targets are complete then.
        NodeUnreachable: one of them was lost.
    """

    async def lacks(client: NodeClient, entries: Sequence[FileEntry]) -> bool:
        check_entries(source.name, entries)
        if expected is not None:
            known = [entry for entry in entries if expected.get(entry.path) == entry.size_bytes]
            _require_expected(source.name, entries, known)
        return not (
            await client.ask(CompareBundle(destination=path, files=tuple(entries)))
        ).complete

    giver = Giver(client=source, root=path, lacks=lacks)
    report = await spread_from(giver, targets, rates, progress)
    problems = list(report.problems.values())
    reached = [target for target in targets if target.name not in report.problems]
    ends = await asyncio.gather(
        *(_name_files(target, path, report.entries) for target in reached), return_exceptions=True
    )
    for end in ends:
        if isinstance(end, RacklessError):
            problems.append(end)
        elif isinstance(end, BaseException):
            raise end
    if problems:
        raise problems[0]
    return tuple(report.notes)


async def _name_files(client: NodeClient, destination: str, entries: Sequence[FileEntry]) -> None:
    """Name the files of a node's store in their folder."""
    async with await Receiver.open(client, destination, [], entries) as receiver:
        await receiver.finish()


def _blocks_of(root: Path, entry: FileEntry) -> AsyncGenerator[bytes]:
    return local_files.read_blocks(root, entry.path, entry.size_bytes)


async def _one_block(data: bytes) -> AsyncGenerator[bytes]:
    yield data


class _ByteCount:
    """Counter of transferred bytes that reports progress."""

    def __init__(self, coming: Iterable[FileEntry], progress: BytesProgress | None) -> None:
        self._total = sum(entry.size_bytes for entry in coming)
        self._stored = self._sent = 0
        self._progress = progress

    def take(self, progress: Sequence[NodeTransfer]) -> None:
        """Record the progress of files that go to the store of a transfer's single node."""
        # Never backwards: a node reports fewer bytes after it lost its supplier.
        self._stored = max(self._stored, *(one.held_bytes for one in progress))
        self._report()

    def add(self, block: bytes) -> None:
        self._sent += len(block)
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._stored + self._sent, self._total)
