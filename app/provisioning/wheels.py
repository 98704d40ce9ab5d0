"""Bring the wheels of a lock to a node: from another node that has them, or by one download.

No byte is downloaded twice. A node with the whole set sends it; else the node with the most of it
downloads the rest for all, for any interpreter; and if no node reaches a package index, this PC
does. Copies go through `app/nodes/files`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agents.contract.environments import WheelQuery, WheelReport
from agents.contract.requests.environment import FetchWheels, LookForWheels
from agents.contract.run import FileEntry
from agents.shared.files.full_disk import advise_room, name_disk_error
from agents.shared.packages.lock import read_lock_text
from agents.shared.packages.package_index import IndexSettings, PackageIndex, read_index_settings
from agents.shared.packages.wheel_progress import WheelProgress
from agents.shared.packages.wheel_store import WheelProblem, WheelSet, fetch
from app.errors import RacklessError, UserError
from app.filelock import locked
from app.nodes.client import NodeClient
from app.nodes.files.local_files import in_stoppable_thread, in_thread
from app.nodes.files.transfer import BytesProgress, copy, push
from app.progress import OnMessage, messages
from app.storage.hashes import hash_file

PEER_S = 15.0
"""Maximum wait for another node's list of wheels, in seconds; a silent one is left out."""


class NoWheels(UserError):
    """No reachable source has all packages of a lock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelPlaces:
    """Sources of packages other than the node itself."""

    store: Path
    """Folder of this PC for downloaded wheels."""
    locks: Path
    """Folder of this PC for locks that it makes."""
    peers: Sequence[NodeClient] = ()
    """Other nodes."""


async def bring_wheels(
    client: NodeClient, query: WheelQuery, places: WheelPlaces, say: OnMessage
) -> None:
    """Make sure that a node has all wheels of a query.

    Raises:
        NoWheels: no reachable index has them.
        UserError: a file is not the locked one, a disk is full, or the node does not answer.
    """
    own = await client.ask(LookForWheels(query=query))
    if own.is_complete:
        return
    reports = await _ask(places.peers, query)
    for peer, report in reports:
        if report.is_complete and await _copy(peer, client, report, say):
            return
    here = await in_thread(_set_here, places.store, query)
    if here.is_complete:
        await _send(here, client, own, say)
        return
    # The node with the most of the set downloads least; at equal sizes the node itself comes first.
    by_size = sorted([(client, own), *reports], key=lambda one: -one[1].size_bytes)
    troubles: list[str] = []
    for fetcher, _ in by_size:
        report = await _fetch_at(fetcher, client, query, say)
        if report.is_complete and (fetcher is client or await _copy(fetcher, client, report, say)):
            return
        troubles.append(_refuse(report, fetcher.name))
    await _fetch_here(here, query, client.name, troubles, say)
    await _send(here, client, own, say)


async def _ask(
    peers: Sequence[NodeClient], query: WheelQuery
) -> list[tuple[NodeClient, WheelReport]]:
    async def ask(peer: NodeClient) -> tuple[NodeClient, WheelReport] | None:
        try:
            async with asyncio.timeout(PEER_S):
                return peer, await peer.ask(LookForWheels(query=query))
        except (RacklessError, TimeoutError):
            return None

    return [one for one in await asyncio.gather(*map(ask, peers)) if one is not None]


async def _copy(
    source: NodeClient, client: NodeClient, report: WheelReport, say: OnMessage
) -> bool:
    """Copy a set from another node; if that fails, report why and return False."""
    say(f"{source.name} has the packages: copying them from there")
    try:
        count = _bytes_progress(say)
        await copy(
            source,
            [client],
            report.path,
            {},
            lambda nodes: count(nodes[0].held_bytes, nodes[0].total_bytes),
        )
    except RacklessError as error:
        say(f"{source.name} could not send the packages: {error}")
        return False
    return True


async def _fetch_at(
    fetcher: NodeClient, client: NodeClient, query: WheelQuery, say: OnMessage
) -> WheelReport:
    """Let a node download its missing wheels; only for `client` itself is a failure an error."""
    if fetcher is client:
        return await fetcher.ask(FetchWheels(query=query), messages(say))
    try:
        return await fetcher.ask(
            FetchWheels(query=query), messages(lambda text: say(f"{fetcher.name}: {text}"))
        )
    except RacklessError as error:
        return WheelReport(
            path="",
            num_packages=0,
            num_present=0,
            is_complete=False,
            trouble="unreachable",
            message=str(error),
        )


def _refuse(report: WheelReport, name: str) -> str:
    """Return why a node could not download, if another one may succeed; else raise the error."""
    message = f"{name} {report.message}"
    # Other nodes would get the same answers from the index; only an unreachable index differs.
    if report.trouble == "missing":
        raise NoWheels(message, report.hint)
    if report.trouble in ("wrong", "stopped"):
        raise UserError(message, report.hint)
    return message


def _set_here(store: Path, query: WheelQuery) -> WheelSet:
    return WheelSet(store=store, lock=read_lock_text(query.lock_text), target=query.target)


async def _fetch_here(
    here: WheelSet, query: WheelQuery, name: str, troubles: list[str], say: OnMessage
) -> None:
    """Download a set on this PC, for a node that reaches no package index."""
    say(f"no node can fetch them, so this PC does, for {name}")
    stopped, loop = threading.Event(), asyncio.get_running_loop()

    def report(text: str) -> None:
        loop.call_soon_threadsafe(say, text)

    settings = read_index_settings(os.environ, Path.home(), query.index_url)
    work = partial(fill, here, settings, report, stopped.is_set)
    try:
        await in_stoppable_thread(work, stopped.set)
    except WheelProblem as problem:
        kind = UserError if problem.kind in ("wrong", "stopped") else NoWheels
        said = "; ".join((*troubles, f"this PC {problem.message}"))
        raise kind(f"the packages for {name} cannot be had: {said}", problem.hint) from problem
    except OSError as error:
        raise UserError(
            f"{here.store} cannot be written: {name_disk_error(error)}",
            f"{advise_room(error)}: packages with CUDA take 3 GB",
        ) from error


def fill(
    here: WheelSet, settings: IndexSettings, say: OnMessage, is_stopped: Callable[[], bool]
) -> None:
    """Complete a set of this PC; wait for another process that is doing so.

    Raises:
        WheelProblem: it stays incomplete.
        OSError: the disk is full or cannot be written.
    """
    here.store.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(here.store / f"{here.name}.lock", limit_s=None):
        fetch(here, PackageIndex(settings), say, is_stopped)


async def _send(here: WheelSet, client: NodeClient, report: WheelReport, say: OnMessage) -> None:
    def describe() -> list[FileEntry]:
        return [
            FileEntry(path=file.name, size_bytes=file.stat().st_size, sha256=hash_file(file))
            for file in here.present().values()
        ]

    files = await in_thread(describe)
    say(f"sending the packages to {client.name}")
    await push(client, report.path, here.folder, files, _bytes_progress(say))


def _bytes_progress(say: OnMessage) -> BytesProgress:
    """Return a callback that reports the progress of a copy."""
    progress: list[WheelProgress] = []

    def report(done_bytes: int, total_bytes: int) -> None:
        if not progress:
            progress.append(WheelProgress(say, "copying", total_bytes=total_bytes))
        progress[0].reach("", done_bytes)

    return report
