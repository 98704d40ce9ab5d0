"""The chunks of one transfer that this node has: read, written, verified and waited for.

A node that gets files collects them in the store's partial files, at the places where the bytes
belong. After a kill every chunk there is hashed again, so that nothing has to be remembered and
nothing is trusted; what was cut off is fetched again, one chunk at most.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from agents.contract.chunks import (
    ChunkedFile,
    from_bitmap,
    list_chunks,
    num_chunks,
    to_bitmap,
)
from agents.errors import ExpectedError, explain_os_error
from agents.node.file_store import FileStore
from agents.shared.files.folder_files import open_regular
from agents.state import locked

LOCK_TIMEOUT_S = 10.0
"""Time for a killed transfer of the same file to end, in seconds."""
WRITES_AHEAD = 4
"""Number of blocks that may wait to be hashed and written while more arrive."""


class DamagedChunk(Exception):
    """Raised when the bytes of a chunk are not those of its hash."""


class Holdings:
    """Chunks of `files`, numbered over all of them; thread-safe."""

    def __init__(self, files: Sequence[ChunkedFile]) -> None:
        self.files = files
        self.chunks = list_chunks(files)
        self.received_bytes = 0
        # Where each file is, and where it will be once it is whole.
        self._paths: list[tuple[Path, Path]] = []
        self._missing: set[int] = set()
        self._missing_of = [0] * len(files)
        self._changed = threading.Condition()

    @classmethod
    @contextlib.contextmanager
    def of_store(cls, store: FileStore, files: Sequence[ChunkedFile]) -> Iterator[Holdings]:
        """Yield what the store has, whole or in part; its files are locked in the block.

        Raises:
            ExpectedError: another transfer brings one of them, or the disk has no room for them.
        """
        found = cls(files)
        with contextlib.ExitStack() as locks:
            try:
                first = 0
                for index, file in enumerate(files):
                    found._open(index, first, store, locks)
                    first += num_chunks(file.size_bytes)
            except OSError as error:
                raise explain_os_error(error, f"preparing {store.root}") from error
            found._require_room(store)
            yield found

    @classmethod
    def of_files(cls, paths: Sequence[Path], files: Sequence[ChunkedFile]) -> Holdings:
        """Return what files have that the caller has just hashed."""
        found = cls(files)
        found._paths = [(path, path) for path in paths]
        return found

    def _open(self, index: int, first: int, store: FileStore, locks: contextlib.ExitStack) -> None:
        file = self.files[index]
        whole = store.find(file.sha256, file.size_bytes)
        partial = store.partial(file.sha256)
        if whole is None:
            busy = "Another transfer brings the same files to this node."
            locks.enter_context(locked(Path(f"{partial}.lock"), LOCK_TIMEOUT_S, busy))
            # The other one may have finished while we waited.
            whole = store.find(file.sha256, file.size_bytes)
        self._paths.append((whole or partial, store.path(file.sha256)))
        if whole is None:
            missing = set(self._find_missing(partial, first, num_chunks(file.size_bytes)))
            self._missing |= missing
            self._missing_of[index] = len(missing)

    def _find_missing(self, partial: Path, first: int, count: int) -> Iterator[int]:
        """Yield the chunks of a partial file that are not there, or not whole."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o600), "rb") as file:
            for number in range(first, first + count):
                chunk = self.chunks[number]
                file.seek(chunk.offset)
                if hashlib.sha256(file.read(chunk.size_bytes)).hexdigest() != chunk.sha256:
                    yield number

    def _require_room(self, store: FileStore) -> None:
        needed = sum(self.chunks[number].size_bytes for number in self._missing)
        free = shutil.disk_usage(store.root.parent).free
        if needed > free:
            raise ExpectedError(
                f"The disk of this node is too full: {needed / 1e9:.2f} GB are coming and "
                f"{free / 1e9:.2f} GB are free in {store.root.parent}.",
                "Free some space on this node and try again",
            )

    # ------------------------------------------------------------ what is there

    def is_complete(self) -> bool:
        with self._changed:
            return not self._missing

    def held_bytes(self) -> int:
        with self._changed:
            missing = sum(self.chunks[number].size_bytes for number in self._missing)
        return sum(file.size_bytes for file in self.files) - missing

    def held(self) -> str:
        """Return the chunks that are here, as a bitmap."""
        with self._changed:
            return to_bitmap(n for n in range(len(self.chunks)) if n not in self._missing)

    def wanted(self) -> str:
        """Return the chunks that are missing, as a bitmap."""
        with self._changed:
            return to_bitmap(sorted(self._missing))

    def wait_complete(self, index: int, timeout_s: float) -> bool:
        """Wait until all chunks of a file are here; return False if they are not by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._missing_of[index], timeout_s)

    def sync(self, index: int) -> None:
        """Write to disk what has arrived of a file.

        Raises:
            OSError: the disk refuses.
        """
        file = os.open(self._paths[index][0], os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(file)
        finally:
            os.close(file)

    def supply(self, wanted: str, beat_s: float) -> Iterator[tuple[int, bytes] | None]:
        """Yield the wanted chunks as soon as they are here, or None when none came for `beat_s`.

        Raises:
            ValueError: one is asked for that does not exist.
            OSError: the disk refuses.
        """
        left = deque(sorted(from_bitmap(wanted)))
        if left and left[-1] >= len(self.chunks):
            raise ValueError(f"there is no chunk {left[-1]}")
        while left:
            number = self._take_held(left, beat_s)
            yield None if number is None else (number, self.read(number))

    def _take_held(self, left: deque[int], timeout_s: float) -> int | None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: any(number not in self._missing for number in left), timeout_s
            ):
                return None
            number = next(number for number in left if number not in self._missing)
        left.remove(number)
        return number

    def read(self, number: int) -> bytes:
        """Return the bytes of a chunk that is here.

        Raises:
            OSError: the file became shorter, or is no ordinary one any more.
        """
        chunk = self.chunks[number]
        arriving, whole = self._paths[chunk.file]
        try:
            file = open_regular(arriving)
        except FileNotFoundError:  # it has become whole
            file = open_regular(whole)
        with file:
            file.seek(chunk.offset)
            data = file.read(chunk.size_bytes)
        if len(data) != chunk.size_bytes:
            raise OSError(f"{arriving} became shorter while it was sent")
        return data

    # ------------------------------------------------------------ what arrives

    def writing(self, number: int, pool: ThreadPoolExecutor) -> ChunkWriter:
        """Return the writer of a chunk that arrives."""
        chunk = self.chunks[number]
        return ChunkWriter(self, number, self._paths[chunk.file][0], pool)

    def add(self, number: int) -> None:
        """Note that a chunk is here and verified."""
        with self._changed:
            if number in self._missing:
                self._missing.remove(number)
                self._missing_of[self.chunks[number].file] -= 1
            self._changed.notify_all()


class ChunkWriter:
    """Hashes and writes the blocks of a chunk in another thread, while more of them arrive."""

    def __init__(
        self, holdings: Holdings, number: int, path: Path, pool: ThreadPoolExecutor
    ) -> None:
        self._holdings = holdings
        self._number = number
        self._pool = pool
        self._offset = holdings.chunks[number].offset
        self._digest = hashlib.sha256()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._pending: deque[Future[None]] = deque()

    def write(self, block: memoryview) -> None:
        """Take a block; it must not change afterwards.

        Raises:
            ExpectedError: the disk refuses.
        """
        while len(self._pending) >= WRITES_AHEAD:
            self._wait()
        self._pending.append(self._pool.submit(self._store, block, self._offset))
        self._offset += len(block)
        self._holdings.received_bytes += len(block)

    def _wait(self) -> None:
        try:
            self._pending.popleft().result()
        except OSError as error:  # not one of the stream, which is the other node's
            raise explain_os_error(error, "storing what arrives") from error

    def _store(self, block: memoryview, offset: int) -> None:
        self._digest.update(block)
        while block:
            done = os.pwrite(self._file, block, offset)
            block, offset = block[done:], offset + done

    def finish(self) -> None:
        """Verify the chunk and add it.

        Raises:
            DamagedChunk: it is not what was announced.
            ExpectedError: the disk refuses.
        """
        while self._pending:
            self._wait()
        if self._digest.hexdigest() != self._holdings.chunks[self._number].sha256:
            raise DamagedChunk(f"chunk {self._number} arrived damaged")
        self._holdings.add(self._number)

    def close(self) -> None:
        """Let go of the file; what is still to be written is written first."""
        for future in self._pending:
            with contextlib.suppress(OSError):
                future.result()
        os.close(self._file)
