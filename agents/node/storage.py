"""List the files on this node's disk with their users, and delete those that can be fetched again.

Checkpoints and artifacts are listed, too, but not deleted here: only the master knows whether
another copy exists. Models and data are needed by each run on this node that is not done, because
its next attempt starts with them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents.contract.names import MAX_TIME_S, is_safe_name
from agents.contract.requests.storage import MAX_ITEMS, StorageItem, StorageKind, StorageReport
from agents.contract.run_layout import CHECKPOINTS, EXIT_FILE, INTENT_FILE, step_of_checkpoint
from agents.disk_space import freed_bytes, walk_files
from agents.errors import ExpectedError, explain_os_error
from agents.node.file_store import STORE, FileStore
from agents.node.files import split_path
from agents.node.kept_environments import is_locked, list_kept
from agents.state import Home, locked, read_json
from agents.supervisor.attempt import find_attempts, is_over
from agents.supervisor.leases import find_job, is_any_held

DAY_S = 24 * 3600.0
"""Time without use before partial transfers and unnamed files may be deleted, in seconds."""
SETTLED_S = 3600.0
"""Time after its arrival during which a model may be waiting for its run to start, in seconds."""
UNNAMED = f"{STORE}/files"
"""Name of the item for all stored files without another hard link."""
_FOLDERS: dict[str, StorageKind] = {"models": "model", "data": "data", "artifacts": "artifact"}
_CACHE = "cache"
_BUILT = ("environments", "wheels", "pythons", "tools")
"""Folders of builds of environments, which are listed by `kept_environments`."""
_WORK = "work that is running"
_COMING = "a transfer that is running or may resume"


@dataclass(kw_only=True)
class _Disk:
    """Sizes of folders on disk, with each file counted once."""

    seen: set[tuple[int, int]] = field(default_factory=set)

    def weigh(self, place: Path, wants: Callable[[os.stat_result], bool] | None = None) -> int:
        total = 0
        for found in walk_files(place):
            key = (found.st_dev, found.st_ino)
            if key not in self.seen and (wants is None or wants(found)):
                self.seen.add(key)
                total += found.st_blocks * 512  # blocks, because files may be sparse
        return total


def list_storage(home: Home) -> StorageReport:
    """Return the items below the agent's home, largest first."""
    disk = _Disk()
    items = [_of_place(disk, *found) for found in _find_places(home)]
    items += [
        StorageItem(
            kind=kept.kind,
            name=kept.name,
            size_bytes=kept.size_bytes,
            used_s=kept.used_s,
            needed_by=kept.needed_by,
        )
        for kept in list_kept(home)
    ]
    items += _list_unnamed(home, disk)
    # Last: files that count in an item do not count again.
    rest = sum(disk.weigh(path) for path in home.path.iterdir() if path.name not in _BUILT)
    items.append(
        StorageItem(
            kind="other", name="agents", size_bytes=rest, used_s=0.0, needed_by="Rackless itself"
        )
    )
    items.sort(key=lambda item: -item.size_bytes)
    usage = shutil.disk_usage(home.path)
    return StorageReport(
        items=tuple(items[:MAX_ITEMS]),
        size_bytes=sum(item.size_bytes for item in items),
        disk_bytes=usage.total,
        disk_free_bytes=usage.free,
    )


def delete_storage(home: Home, names: Sequence[str]) -> int:
    """Delete items that can be fetched again, by name; return the bytes freed.

    Raises:
        ExpectedError: an item is needed by now or of another kind, or the disk refuses.
    """
    freed = 0
    for name in names:
        path = home.path.joinpath(*split_stored(name))
        try:
            if name == UNNAMED:
                freed += _delete_unnamed(home)
            elif path.exists():
                freed += _delete(home, name, path)
        except OSError as error:
            raise explain_os_error(error, f"deleting {path}") from error
    return freed


def split_stored(name: str) -> list[str]:
    """Return the components of an item's name that `delete_storage` accepts.

    Raises:
        ExpectedError: the name is invalid or of another kind.
    """
    parts = name.split("/")
    # `split_path` refuses names of partial transfers, to which no transfer may write directly.
    last = parts[-1].removeprefix(".partial-") or "."
    split_path("/".join([*parts[:-1], last]), "The name")
    is_known = (
        name == UNNAMED
        or (len(parts) == 2 and parts[0] in (*_FOLDERS, _CACHE))
        or (len(parts) == 3 and parts[:2] == [STORE, "partial"])
    )
    is_artifact = parts[0] == "artifacts" and not parts[-1].startswith(".partial-")
    if not is_known or is_artifact:
        raise ExpectedError(f"{name} is not an item that can be deleted.")
    return parts


# ---------------------------------------------------------------- items

_Found = tuple[StorageKind, str, Path, float, str]
"""Kind, name, path, time of the last use, and user of an item."""


@dataclass(frozen=True)
class _User:
    """The newest attempt of a run."""

    run_id: str
    intent: str
    used_s: float
    is_active: bool
    is_done: bool


def _find_places(home: Home) -> Iterator[_Found]:
    job, is_busy = find_job(home), is_any_held(home)
    users = _find_users(home)
    for top, kind in _FOLDERS.items():
        for path in _inside(home.path / top):
            name = f"{top}/{path.name}"
            if path.name.startswith(".partial-"):
                yield "partial", name, path, _newest(path), _need_of_partial(path)
            elif path.name[:1] != ".":
                # A search in the intent's text finds a path in any of its fields.
                named = [user for user in users if name in user.intent]
                used_s = max([path.stat().st_mtime, *(user.used_s for user in named)])
                yield kind, name, path, used_s, job or _need_of_bundle(top, path, named)
    active = {user.run_id for user in users if user.is_active}
    for run in _inside(home.runs):
        if is_safe_name(run.name):
            yield from _find_of_run(run, job, run.name in active)
    for path in _inside(home.path / _CACHE):
        yield "cache", f"{_CACHE}/{path.name}", path, path.stat().st_mtime, _WORK * is_busy
    for path in sorted((home.path / STORE / "partial").glob("*")):
        if path.is_file() and path.suffix != ".lock":
            name = f"{STORE}/partial/{path.name}"
            yield "partial", name, path, path.stat().st_mtime, _need_of_partial(path)


def _need_of_bundle(top: str, path: Path, users: Sequence[_User]) -> str:
    for user in users:
        if not user.is_done:
            return f"run {user.run_id}"
    if top != "artifacts" and time.time() - path.stat().st_mtime < SETTLED_S:
        return "a start that it may have been sent for"
    return ""


def _find_of_run(run: Path, job: str, is_active: bool) -> Iterator[_Found]:
    need = f"run {run.name}" if is_active else job
    for path in _inside(run / CHECKPOINTS):
        if step_of_checkpoint(path.name) is not None:
            name = f"runs/{run.name}/{CHECKPOINTS}/{path.name}"
            yield "checkpoint", name, path, path.stat().st_mtime, need
    for path in _inside(run / "exports"):
        if path.name[:1] != ".":
            name = f"runs/{run.name}/exports/{path.name}"
            yield "artifact", name, path, path.stat().st_mtime, need
    # Last: files of a checkpoint or an export do not count again.
    yield "run", f"runs/{run.name}", run, run.stat().st_mtime, "its history"


def _find_users(home: Home) -> list[_User]:
    # Attempts are sorted by number, so the newest one stays.
    newest = {attempt.run_id: attempt for attempt in find_attempts(home)}
    found = []
    for attempt in newest.values():
        file = attempt.file(INTENT_FILE)
        try:
            text, used_s = file.read_text(encoding="utf-8", errors="replace"), _newest(file.parent)
        except FileNotFoundError:  # the run is being deleted
            continue
        has_ended = is_over(attempt)
        ended = read_json(attempt.file(EXIT_FILE)) or {}
        is_done = has_ended and ended.get("state") == "done"
        found.append(_User(attempt.run_id, text, used_s, not has_ended, is_done))
    return found


def _of_place(
    disk: _Disk, kind: StorageKind, name: str, path: Path, used_s: float, need: str
) -> StorageItem:
    size = disk.weigh(path)
    # A file may have any mtime, but the master refuses an answer with an impossible time.
    used_s = min(max(used_s, 0.0), MAX_TIME_S)
    return StorageItem(kind=kind, name=name, size_bytes=size, used_s=used_s, needed_by=need)


def _list_unnamed(home: Home, disk: _Disk) -> list[StorageItem]:
    """Return the stored files without another hard link as at most two items, old and new."""
    store = FileStore(home.path)
    old, new, used_s = 0, 0, 0.0
    for stored in store.files():
        if stored.references:
            continue
        size = disk.weigh(store.path(stored.sha256))
        if _is_given_up(stored.used_s):
            old, used_s = old + size, max(used_s, stored.used_s)
        else:
            new += size
    items = []
    if old:
        items.append(StorageItem(kind="store", name=UNNAMED, size_bytes=old, used_s=used_s))
    if new:
        items.append(
            StorageItem(
                kind="store",
                name=f"{UNNAMED}-of-today",
                size_bytes=new,
                used_s=time.time(),
                needed_by=_COMING,
            )
        )
    return items


def _need_of_partial(path: Path) -> str:
    lock = path.with_name(f"{path.name}.lock")
    if (lock.exists() and is_locked(lock)) or not _is_given_up(_newest(path)):
        return _COMING
    return ""


def _is_given_up(used_s: float) -> bool:
    return time.time() - used_s > DAY_S


def _newest(place: Path) -> float:
    return max((found.st_mtime for found in walk_files(place)), default=place.lstat().st_mtime)


def _inside(place: Path) -> Iterator[Path]:
    if place.is_dir() and not place.is_symlink():
        yield from (f for f in sorted(place.iterdir()) if f.is_dir() and not f.is_symlink())


# ---------------------------------------------------------------- deletion


def _delete(home: Home, name: str, path: Path) -> int:
    busy = f"{name} is not deleted: it is being written."
    bundle = path.name.removeprefix(".partial-")
    is_bundle = path.parent.name in _FOLDERS
    lock = path.with_name(f".partial-{bundle}.lock" if is_bundle else f"{path.name}.lock")
    with locked(lock, 0.0, busy):
        # Checked again under the lock, while no transfer can write it.
        need = _need_now(home, name)
        if need:
            raise ExpectedError(f"{name} is not deleted: {need} needs it by now.")
        if not is_bundle and not path.is_dir():
            freed = path.lstat().st_blocks * 512
            path.unlink()
        else:
            freed = _delete_folder(home, path, is_bundle)
        # Lock files of the store stay, because other transfers may wait for them.
        if is_bundle:
            lock.unlink(missing_ok=True)
    return freed


def _need_now(home: Home, name: str) -> str:
    for kind, found, path, _, need in _find_places(home):
        if found == name:
            is_old = kind == "partial" and _is_given_up(_newest(path))
            return "" if is_old else need
    return ""


def _delete_folder(home: Home, folder: Path, is_bundle: bool) -> int:
    # First, because links to the folder's files are found by its inodes.
    if is_bundle:
        FileStore(home.path).release(folder)
    doomed = folder.with_name(f".deleted-{folder.name}-{os.getpid()}")
    # Renamed first, so that an interrupted deletion leaves no folder that looks complete.
    os.rename(folder, doomed)
    # Files with other hard links, such as in the hub's cache, stay there.
    freed = freed_bytes(doomed)
    shutil.rmtree(doomed)
    return freed


def _delete_unnamed(home: Home) -> int:
    store, freed = FileStore(home.path), 0
    for stored in list(store.files()):
        if not stored.references and _is_given_up(stored.used_s):
            freed += store.delete(stored.sha256)
    return freed
