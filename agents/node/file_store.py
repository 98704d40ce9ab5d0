"""The files of a node by their content: each is there once, under whatever names it is used.

    store/files/ab/abcd...      the file whose SHA-256 is abcd...
    store/chunks/ab/abcd...     the list of its chunks, where it is known
    store/partial/abcd...       a file that is arriving

Folders of models, data and artifacts have hard links to these files, so that nothing is kept twice
and nothing that is here is sent again. A hard link shares its content: who writes into a file of a
model changes the file here too. So files are read-only here, and their time of modification
carries a part of their hash in its nanoseconds. A file with another time is hashed before it is
used again, and dropped where it is not what its name says.
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
from agents.state import fsync_folder

STORE = "store"
_READ_ONLY = 0o400
_SECOND_NS = 1_000_000_000
# What a file system says that has no hard links, or takes no more of this file.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    sha256: str
    size_bytes: int
    references: int
    """Number of other names that the file has on this node."""
    used_s: float
    """Time when it was last placed anywhere, in seconds since 1970."""


class FileStore:
    """The store below an agent's home. Creates its folders when it writes."""

    def __init__(self, home: Path) -> None:
        self.root = home / STORE
        self._files = self.root / "files"
        self._lists = self.root / "chunks"
        self._partial = self.root / "partial"

    def path(self, sha256: str) -> Path:
        """Return where a file is, or would be."""
        return self._files / _plain(sha256)[:2] / sha256

    def partial(self, sha256: str) -> Path:
        """Return where a file arrives; its folder is there afterwards."""
        self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._partial / _plain(sha256)

    def find(self, sha256: str, size_bytes: int) -> Path | None:
        """Return the stored file; None: it is not here, or is no longer what its name says."""
        path = self.path(sha256)
        try:
            found = os.lstat(path)
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
            return None
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
        """Store a verified file under a second name; return whether the file system lets us."""
        place = self._prepare(sha256)
        try:
            os.link(path, place, follow_symlinks=False)
        except FileExistsError:
            return True
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise
        _seal(place, sha256)
        return True

    def take_partial(self, file: ChunkedFile) -> None:
        """Give a file that has arrived, and whose chunks are verified, its place.

        Raises:
            OSError: the disk refuses.
        """
        partial, place = self.partial(file.sha256), self._prepare(file.sha256)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        self.keep_chunks(file)
        os.replace(partial, place)
        _seal(place, file.sha256)
        fsync_folder(place.parent)

    def _prepare(self, sha256: str) -> Path:
        place = self.path(sha256)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place

    def place(self, sha256: str, name: str, folder: int) -> None:
        """Give a stored file the name `name` in an open folder: a hard link, else a copy.

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
        """Remember the chunks of a file."""
        if describe_small(file.size_bytes, file.sha256) is None:
            path = self._lists / _plain(file.sha256)[:2] / file.sha256
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            half = path.with_name(f".{path.name}.{os.getpid()}")
            half.write_text(file.chunks, encoding="ascii")
            os.replace(half, path)

    def chunks(self, sha256: str, size_bytes: int) -> ChunkedFile | None:
        """Return the chunks of a file that was seen before; None: they are not known."""
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

    # ------------------------------------------------------------ what is here

    def files(self) -> Iterator[StoredFile]:
        """Yield every stored file."""
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
        """Delete a file here; return the bytes freed: none while it has another name.

        Raises:
            OSError: the disk refuses.
        """
        path = self.path(sha256)
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            path.unlink()
            (self._lists / sha256[:2] / sha256).unlink(missing_ok=True)
            return found.st_size if found.st_nlink == 1 else 0
        return 0

    def release(self, folder: Path) -> None:
        """Delete the files here that have no other name than one in `folder`, which goes too."""
        inside = {found.st_ino for found in walk_files(folder) if found.st_nlink == 2}
        for path in self._files.glob("*/*") if inside else ():
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_ino in inside:
                    self.delete(path.name)

    def drop_altered(self, path: Path, sha256: str) -> None:
        """Delete the stored file that shares its content with `path` if it is not `sha256`."""
        with contextlib.suppress(OSError):
            found = path.lstat()
            for stored in self._files.glob("*/*") if found.st_nlink > 1 else ():
                if stored.lstat().st_ino == found.st_ino and stored.name != sha256:
                    self.delete(stored.name)


def _plain(sha256: str) -> str:
    """Return a hash that is safe as a name.

    Raises:
        WireError: it is none.
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
    modified_ns = int(path.stat().st_mtime) * _SECOND_NS + _stamp(sha256)
    os.utime(path, ns=(time.time_ns(), modified_ns))


def _mark(path: Path, sha256: str) -> None:
    """Note that the file is used now; what was just hashed gets its stamp back."""
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
            # File systems that can share blocks do so here.
            while left:
                done = os.copy_file_range(source.fileno(), target.fileno(), left)
                if not done:
                    raise OSError(errno.EIO, "the file became shorter")
                left -= done
        except OSError:
            source.seek(0)
            target.seek(0)
            shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
