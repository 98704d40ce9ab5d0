"""Receive and send files as raw bytes, each command in its own SSH channel.

Paths from the other side are not trusted: every component is checked, and folders are opened one by
one without following symlinks. A bundle (all files of one manifest) is collected in `.partial-NAME`
in its parent folder, and renamed in one step once it is complete; a file gets its name only after
its bytes are hashed and fsynced. So an interrupted transfer keeps finished files and no partial
ones, and the next transfer sends only missing files. Files that the node has already
(agents/node/file_store.py) are not sent: the bundle gets hard links to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from agents.contract.json_text import parse_json
from agents.contract.run import BundleStatus, FileEntry
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.node.file_store import FileStore
from agents.shared.files.folder_files import open_regular, require_own
from agents.state import Home, fsync_folder, identify, locked, take_lock

ROOTS = ("models", "data", "runs", "artifacts", "wheels")
KEPT_ROOTS = ("models", "data", "artifacts")
"""Roots whose files are kept in the store, too; files of the others are deleted by name."""
MAX_HEADER_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
MAX_PATH_CHARACTERS = 1024
_JOB_PREFIX = ".job-"
LAYERS_PREFIX = ".layers-"
"""Prefix of folders with the finished layers of an interrupted quantization."""


def split_path(path: str, what: str) -> list[str]:
    """Return the components of a relative path that stays below its start.

    Raises:
        ExpectedError: the path is absolute, contains `..`, or has an unsafe component.
    """
    parts = path.split("/")
    if not path or len(path) > MAX_PATH_CHARACTERS or not all(map(_is_plain, parts)):
        raise ExpectedError(
            f"{what} {path[:120]!r} is not allowed.",
            "Use a relative path, with `/` between plain names and without `..`",
        )
    return parts


def _is_plain(part: str) -> bool:
    return (
        part not in ("", ".", "..")
        and part.isprintable()  # excludes lone surrogates, which cannot be encoded
        and len(os.fsencode(part)) <= 200
        and "\\" not in part
        and not part.startswith((".partial-", ".half-"))
    )


def split_destination(destination: str) -> list[str]:
    """Return the components of a path below the agent's home where files may be stored.

    Raises:
        ExpectedError: it is not below one of `ROOTS`.
    """
    parts = split_path(destination, "The destination")
    if parts[0] not in ROOTS or len(parts) < 2:
        raise ExpectedError(
            f"The destination {destination[:120]!r} is not allowed.",
            f"It must be a folder below {', '.join(ROOTS)}",
        )
    return parts


def read_bundle_status(
    home: Home, destination: str, entries: tuple[FileEntry, ...]
) -> BundleStatus:
    """Return which files of a bundle must be sent, by presence and size.

    A bundle is complete only under its final name: files of the store may have to be added first.

    Raises:
        ExpectedError: a path is not allowed.
    """
    final = home.path.joinpath(*split_destination(destination))
    # Checked here, too, so that nothing is sent that `receive` would refuse.
    if final.is_symlink():
        raise ExpectedError(f"{final} is a symbolic link, which is not followed.")
    base = final if final.is_dir() else _partial(final)
    # The size suffices, because a file gets its name only after its bytes were hashed.
    absent = [entry for entry in entries if not _has(base, entry)]
    store = FileStore(home.path)
    missing = tuple(e.path for e in absent if store.find(e.sha256, e.size_bytes) is None)
    return BundleStatus(path=str(final), complete=not absent and base == final, missing=missing)


def _partial(final: Path) -> Path:
    return final.with_name(f".partial-{final.name}")


def _has(base: Path, entry: FileEntry) -> bool:
    path = base
    for part in split_path(entry.path, "The file name"):
        if path.is_symlink():
            return False
        path = path / part
    try:
        state = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(state.st_mode) and state.st_size == entry.size_bytes


# ---------------------------------------------------------------- receive


def receive(home: Home, destination: str, source: BinaryIO) -> str:
    """Store the files from `source` and return the folder; see the module docstring.

    Raises:
        ExpectedError: a path is not allowed, a hash differs, the disk is full, the transfer broke
            off, or another transfer writes the same bundle.
    """
    parts = split_destination(destination)
    coming, manifest = _read_header(source)
    final = home.path.joinpath(*parts)
    _require_room(home, coming)
    with _open_folder(home.path, parts[:-1]) as parent:
        busy = f"Another transfer writes {destination} on this node."
        # Without a wait: the other transfer may take hours.
        with locked(final.with_name(f".partial-{final.name}.lock"), 0.0, busy):
            _refuse_link(final)
            # A complete bundle may have lost files since; they are restored in place.
            base = final.name if final.exists() else _partial(final).name
            with _open_folder_at(parent, [base]) as folder:
                for entry in coming:
                    _store(folder, entry, source)
                    # At once, so that an interrupted transfer has its finished files in the store.
                    if parts[0] in KEPT_ROOTS:
                        _keep(home, final.with_name(base), entry)
                _share(home, final.with_name(base), folder, manifest)
                os.fsync(folder)
            _finish(final, base, manifest)
    return str(final)


def _read_header(source: BinaryIO) -> tuple[list[FileEntry], list[FileEntry]]:
    line = source.readline(MAX_HEADER_BYTES)
    try:
        header = parse_json(line)
        coming = [from_wire(FileEntry, value, "files") for value in header["files"]]
        manifest = [from_wire(FileEntry, value, "manifest") for value in header["manifest"]]
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, WireError) else "no list of files came first"
        raise ExpectedError(
            f"The transfer cannot be read: {reason}. The file names, sizes and hashes come first.",
            "Try again",
        ) from error
    # All paths are checked before anything is written.
    for entry in (*coming, *manifest):
        split_path(entry.path, "The file name")
    return coming, manifest


def _require_room(home: Home, coming: list[FileEntry]) -> None:
    needed = sum(entry.size_bytes for entry in coming)
    free = shutil.disk_usage(home.path).free
    if needed > free:
        raise ExpectedError(
            f"The disk of this node is too full: {needed / 1e9:.2f} GB are needed and "
            f"{free / 1e9:.2f} GB are free in {home.path}.",
            "Free some space on this node and try again",
        )


def _refuse_link(final: Path) -> None:
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise ExpectedError(f"{final} is not a folder, so nothing is stored there.")


@contextlib.contextmanager
def _open_folder(root: Path, parts: list[str]) -> Iterator[int]:
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _open_folder_at(top, parts) as folder:
            yield folder
    finally:
        os.close(top)


@contextlib.contextmanager
def _open_folder_at(top: int, parts: list[str]) -> Iterator[int]:
    """Open a folder below `top`, creating missing folders and following no symlinks."""
    folder = os.dup(top)
    try:
        for part in parts:
            try:
                with contextlib.suppress(FileExistsError):
                    # Relative to the open parent, which cannot be replaced by a symlink meanwhile.
                    os.mkdir(part, 0o700, dir_fd=folder)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                deeper = os.open(part, flags, dir_fd=folder)
            except NotADirectoryError as error:
                raise ExpectedError(
                    f"{part!r} is a file or a symbolic link, not a folder."
                ) from error
            except OSError as error:
                raise explain_os_error(error, f"making the folder {part!r}") from error
            os.close(folder)
            folder = deeper
        yield folder
    finally:
        os.close(folder)


def _store(folder: int, entry: FileEntry, source: BinaryIO) -> None:
    """Write one file under a temporary name, verify it, and rename it."""
    *inner, name = entry.path.split("/")
    with _open_folder_at(folder, inner) as place:
        # With the pid, so that it differs from the leftover of a killed transfer.
        half = f".half-{os.getpid()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(half, flags, 0o600, dir_fd=place)
            try:
                _copy(file, entry, source)
                os.fsync(file)
            finally:
                os.close(file)
            os.rename(half, name, src_dir_fd=place, dst_dir_fd=place)
            os.fsync(place)
        # BaseException: a signal that ends the transfer must not leave a partial file, either.
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(half, dir_fd=place)
            if isinstance(error, OSError):
                disk = Path(f"/proc/self/fd/{place}")
                raise explain_os_error(error, f"storing {entry.path}", disk) from error
            raise


def _copy(file: int, entry: FileEntry, source: BinaryIO) -> None:
    digest = hashlib.sha256()
    left = entry.size_bytes
    while left:
        block = source.read(min(left, BLOCK_BYTES))
        if not block:
            raise ExpectedError(
                f"The transfer broke off in {entry.path}, {left} bytes before its end.",
                "Start it again; complete files are not sent twice",
            )
        digest.update(block)
        left -= len(block)
        view = memoryview(block)
        while view:
            # A write may be short, such as on a disk that is almost full.
            view = view[os.write(file, view) :]
    if digest.hexdigest() != entry.sha256:
        raise ExpectedError(
            f"{entry.path} arrived damaged: its sha256 is not the announced one.", "Send it again"
        )


def _share(home: Home, base: Path, folder: int, manifest: list[FileEntry]) -> None:
    """Place the stored files that a bundle (`base`, open as `folder`) lacks.

    Raises:
        ExpectedError: the disk refuses.
    """
    store = FileStore(home.path)
    for entry in manifest:
        if _has(base, entry) or store.find(entry.sha256, entry.size_bytes) is None:
            continue
        *inner, name = entry.path.split("/")
        try:
            with _open_folder_at(folder, inner) as place:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=place)  # a file of another size
                store.place(entry.sha256, name, place)
                os.fsync(place)
        except OSError as error:
            raise explain_os_error(error, f"storing {entry.path}") from error
    # Checkpoints and wheels are deleted by name, so the store must not keep a second link.
    if base.relative_to(home.path).parts[0] not in KEPT_ROOTS:
        store.release(base)


def _keep(home: Home, base: Path, entry: FileEntry) -> None:
    """Add a file that has just arrived and was verified to the store."""
    try:
        FileStore(home.path).adopt(entry.sha256, base / entry.path)
    except OSError as error:
        raise explain_os_error(error, f"storing {entry.path}") from error


def _finish(final: Path, base: str, manifest: list[FileEntry]) -> None:
    """Rename the bundle to its final name if it is complete."""
    folder = final.with_name(base)
    missing = [entry.path for entry in manifest if not _has(folder, entry)]
    if missing:
        raise ExpectedError(
            f"The bundle {final.name} is incomplete: {len(missing)} files are missing, such as "
            f"{missing[0]}.",
            "Send the missing files",
        )
    try:
        if base != final.name:
            os.rename(folder, final)
        fsync_folder(final.parent)
    except OSError as error:
        raise explain_os_error(error, f"renaming to {final}") from error
    # While the lock is held, because `remove_abandoned` mistakes a lock file for a transfer.
    final.with_name(f".partial-{final.name}.lock").unlink(missing_ok=True)


# ---------------------------------------------------------------- send


def send(home: Home, path: str, out: BinaryIO) -> None:
    """Write one line with names, sizes and hashes of the files, then their bytes.

    Raises:
        ExpectedError: the path does not exist, or a file was truncated meanwhile.
    """
    parts = split_destination(path)
    place = home.path.joinpath(*parts)
    base = place.parent if place.is_file() else place
    # Hashed before the first byte is sent, because the header contains the hashes.
    entries = [describe_file(base, file) for file in list_files(home, place)]
    if not entries:
        raise ExpectedError(f"There is nothing to send at {place} on this node.")
    out.write(json.dumps({"files": to_wire(entries)}).encode("ascii") + b"\n")
    for entry in entries:
        _send_file(base, entry, out)
    out.flush()


def list_files(home: Home, place: Path) -> list[Path]:
    """Return the regular files at or below `place`, which must not be reached through a symlink.

    Raises:
        ExpectedError: a file is not a regular file, or a link leads out of `place`.
    """
    for folder in (place, *place.parents):
        if folder == home.path:
            break
        if folder.is_symlink():
            raise ExpectedError(f"{folder} is a symbolic link, which is not followed.")
    if place.is_file():
        return [place]
    try:
        return sorted(_walk_all(place))
    except OSError as error:
        raise explain_os_error(error, f"listing {place}") from error


def _walk_all(place: Path) -> Iterator[Path]:
    """Yield all files below a folder, including hidden ones, which data folders would skip."""
    for top, folders, names in os.walk(place):
        for name in (*folders, *names):
            require_own(Path(top, name), place)
        yield from (Path(top, name) for name in names)


def describe_file(base: Path, path: Path) -> FileEntry:
    """Return name, size and hash of one file.

    Raises:
        ExpectedError: the file cannot be read, or its name cannot be sent.
    """
    name = path.relative_to(base).as_posix()
    split_path(name, "The file name")
    digest = hashlib.sha256()
    try:
        with open_regular(path, base) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
            size = file.tell()  # the bytes hashed, even if the file grows meanwhile
    except OSError as error:
        raise explain_os_error(error, f"reading {path}") from error
    return FileEntry(path=name, size_bytes=size, sha256=digest.hexdigest())


def _send_file(base: Path, entry: FileEntry, out: BinaryIO) -> None:
    path, left = base / entry.path, entry.size_bytes
    with open_regular(path, base) as file:
        while left:
            block: Any = file.read(min(left, BLOCK_BYTES))
            if not block:
                raise ExpectedError(f"{path} was truncated while it was sent.", "Try again")
            out.write(block)
            left -= len(block)


def remove_layers(destination: Path) -> None:
    """Remove the finished layers of interrupted jobs with this destination.

    Folders of running jobs are locked and stay.
    """
    for path in destination.parent.glob(f"{LAYERS_PREFIX}*"):
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # The kernel frees the lock of a killed job, so no pid has to be checked.
            if take_lock(held, 0.0):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(held)


@contextlib.contextmanager
def job_folder(home: Home) -> Iterator[Path]:
    """Yield a folder for the files of a job; it is removed after the block.

    Raises:
        ExpectedError: the disk is full or read-only.
    """
    try:
        made = tempfile.mkdtemp(prefix=_JOB_PREFIX, suffix=f"-{os.getpid()}", dir=home.path)
    except OSError as error:
        raise explain_os_error(error, f"making a folder in {home.path}") from error
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_job_folders(home: Home) -> None:
    """Remove the folders of jobs whose agent was killed."""
    _remove_of_the_dead(home.path.glob(f"{_JOB_PREFIX}*-*"))


def remove_half_made(home: Home) -> None:
    """Remove partial exports of killed jobs from all runs."""
    for exports in home.runs.glob("*/exports"):
        _remove_abandoned_in(exports)


def remove_abandoned(destination: Path) -> None:
    """Remove partial results of killed jobs in the folder of a destination.

    Bundles that are being received there have a lock file and stay.
    """
    _remove_abandoned_in(destination.parent)


def _remove_abandoned_in(folder: Path) -> None:
    for kind in ("partial", "deleted"):
        found = folder.glob(f".{kind}-*-*")
        # The name of a bundle may itself end in digits, which would look like a pid.
        _remove_of_the_dead(
            path for path in found if not path.with_name(f"{path.name}.lock").exists()
        )


def _remove_of_the_dead(paths: Iterable[Path]) -> None:
    """Remove folders whose names end with the pid of a process that no longer runs."""
    for path in paths:
        pid = path.name.rpartition("-")[2]
        # If the pid was reused, the folder stays until a later start.
        if pid.isdecimal() and identify(int(pid)) is None:
            shutil.rmtree(path, ignore_errors=True)
