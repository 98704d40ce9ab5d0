"""The files of a node by content: each is stored once, under any number of names.

    store/files/ab/abcd...      the file whose SHA-256 is abcd...
    store/chunks/ab/abcd...     the list of its chunks, if known
    store/partial/abcd...       a file that is arriving

Folders of models, data and artifacts contain hard links to these files, so that no file is stored
or sent twice. Hard links share content: writing to a file of a model would change the stored file,
too. So stored files are read-only, and the nanoseconds of their mtime encode a part of their hash.
A file with another mtime is hashed before it is used again, and deleted if the hash differs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agents.contract.chunks import ChunkedFile, describe_small
from agents.contract.wire import WireError
from agents.disk_space import walk_files
from agents.shared.files.full_disk import removing_half
from agents.state import fsync_folder

STORE = "store"
_READ_ONLY = 0o400
_SECOND_NS = 1_000_000_000
# Errors of a file system without hard links, or with no more of them for this file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    sha256: str
    size_bytes: int
    references: int
    """Number of other hard links to the file."""
    used_s: float
    """Time when it was last placed in a folder, in seconds since 1970."""


class FileStore:
    """The store below an agent's home; it creates its folders when it writes."""

    def __init__(self, home: Path) -> None:
        self.root = home / STORE
        self._files = self.root / "files"
        self._lists = self.root / "chunks"
        self._partial = self.root / "partial"

    def path(self, sha256: str) -> Path:
        """Return the path of a file, even if it is not stored."""
        return self._files / _plain(sha256)[:2] / sha256

    def partial(self, sha256: str) -> Path:
        """Return the path for an arriving file, and create its folder."""
        self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._partial / _plain(sha256)

    def find(self, sha256: str, size_bytes: int) -> Path | None:
        """Return the path of a stored file, or None if it is missing or altered."""
        path = self.path(sha256)
        try:
            found = os.lstat(path)
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
            return None
        # Writing through another hard link changes the mtime, so the stamp no longer matches.
        if found.st_mtime_ns % _SECOND_NS != _stamp(sha256) and not self._is_intact(sha256):
            return None
        return path

    def _is_intact(self, sha256: str) -> bool:
        path = self.path(sha256)
        if _hash(path) == sha256:
            _mark(path, sha256)
            return True
        path.unlink(missing_ok=True)
        return False

    def adopt(self, sha256: str, path: Path) -> bool:
        """Store a verified file by a hard link; return whether the file system supports it."""
        place = self._prepare(sha256)
        try:
            os.link(path, place, follow_symlinks=False)
        except FileExistsError:
            return True  # the same content, already stored
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise
        _seal(place, sha256)
        return True

    def take_partial(self, file: ChunkedFile) -> None:
        """Move an arrived file, whose chunks are verified, to its final path.

        Raises:
            OSError: the disk refuses.
        """
        partial, place = self.partial(file.sha256), self._prepare(file.sha256)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        # Before the rename, so that a stored file has its list.
        self.keep_chunks(file)
        os.replace(partial, place)
        _seal(place, file.sha256)
        fsync_folder(place.parent)

    def _prepare(self, sha256: str) -> Path:
        place = self.path(sha256)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place

    def place(self, sha256: str, name: str, folder: int) -> None:
        """Place a stored file in an open folder as a hard link, else as a copy.

        Raises:
            OSError: it is not stored, or the disk refuses.
        """
        path = self.path(sha256)
        try:
            os.link(path, name, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            _copy(path, name, folder)
        _mark(path, sha256)

    # ------------------------------------------------------------ lists of chunks

    def keep_chunks(self, file: ChunkedFile) -> None:
        """Store the list of chunks of a file; that of a small file is computed instead."""
        if describe_small(file.size_bytes, file.sha256) is None:
            path = self._lists / _plain(file.sha256)[:2] / file.sha256
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Renamed in one step: a reader must not see a part of the list.
            with removing_half(path.with_name(f".{path.name}.{os.getpid()}")) as half:
                half.write_text(file.chunks, encoding="ascii")
                os.replace(half, path)

    def chunks(self, sha256: str, size_bytes: int) -> ChunkedFile | None:
        """Return the chunks of a file, or None if they are unknown."""
        small = describe_small(size_bytes, sha256)
        if small is not None:
            return small
        with contextlib.suppress(OSError, ValueError):
            path = self._lists / _plain(sha256)[:2] / sha256
            text = path.read_text(encoding="ascii")
            file = ChunkedFile(size_bytes=size_bytes, sha256=sha256, chunks=text)
            file.check_foreign()
            return file
        return None

    # ------------------------------------------------------------ contents

    def files(self) -> Iterator[StoredFile]:
        """Yield all stored files."""
        for path in self._files.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                yield StoredFile(
                    sha256=path.name,
                    size_bytes=found.st_size,
                    references=found.st_nlink - 1,
                    used_s=found.st_atime,
                )

    def delete(self, sha256: str) -> int:
        """Delete a stored file; return the bytes freed, which is 0 while it has other hard links.

        Raises:
            OSError: the disk refuses.
        """
        path = self.path(sha256)
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            path.unlink()
            (self._lists / sha256[:2] / sha256).unlink(missing_ok=True)
            # With other hard links, the content stays on the disk.
            return found.st_size if found.st_nlink == 1 else 0
        return 0

    def release(self, folder: Path) -> None:
        """Delete the stored files whose only other hard link is in `folder`."""
        # Exactly two links: one in the store, one in the folder.
        inside = {found.st_ino for found in walk_files(folder) if found.st_nlink == 2}
        for path in self._files.glob("*/*") if inside else ():
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_ino in inside:
                    self.delete(path.name)

    def drop_altered(self, path: Path, sha256: str) -> None:
        """Delete the stored file that is a hard link to `path` if its hash is not `sha256`."""
        with contextlib.suppress(OSError):
            found = path.lstat()
            for stored in self._files.glob("*/*") if found.st_nlink > 1 else ():
                if stored.lstat().st_ino == found.st_ino and stored.name != sha256:
                    self.delete(stored.name)


def _plain(sha256: str) -> str:
    """Return a hash if it is safe as a file name.

    Raises:
        WireError: it is not a SHA-256.
    """
    try:
        ChunkedFile(size_bytes=0, sha256=sha256, chunks="").check_foreign()
    except ValueError as error:
        raise WireError(str(error)) from error
    return sha256


def _stamp(sha256: str) -> int:
    return int(sha256[:12], 16) % _SECOND_NS


def _seal(path: Path, sha256: str) -> None:
    os.chmod(path, _READ_ONLY)
    # Only the nanoseconds carry the stamp; the seconds are those of the file.
    modified_ns = int(path.stat().st_mtime) * _SECOND_NS + _stamp(sha256)
    os.utime(path, ns=(time.time_ns(), modified_ns))


def _mark(path: Path, sha256: str) -> None:
    """Record that the file is used now, and restore its stamp if it was just hashed."""
    with contextlib.suppress(OSError):
        _seal(path, sha256)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _copy(path: Path, name: str, folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        path.open("rb") as source,
        os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as target,
    ):
        left = os.fstat(source.fileno()).st_size
        try:
            # File systems with reflinks, such as btrfs and XFS, share blocks here.
            while left:
                done = os.copy_file_range(source.fileno(), target.fileno(), left)
                if not done:
                    raise OSError(errno.EIO, "the file became shorter")
                left -= done
        except OSError:  # the kernel or the file system lacks copy_file_range
            source.seek(0)
            target.seek(0)
            shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
