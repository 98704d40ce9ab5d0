"""The chunks of one transfer that this node has: read, write, verify and wait for them.

A receiving node writes chunks to their final offsets in partial files of the store. After a kill,
each chunk there is hashed again, so no list of finished chunks has to be kept or trusted; at most
one chunk was cut off and is fetched again.
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

from agents.contract import chunks
from agents.errors import ExpectedError, explain_os_error
from agents.node.file_store import FileStore
from agents.shared.files.folder_files import open_regular
from agents.state import locked

LOCK_TIMEOUT_S = 10.0
"""Maximum wait for a killed transfer of the same file to end, in seconds."""
WRITES_AHEAD = 4
"""Maximum number of received blocks that wait to be hashed and written."""


class DamagedChunk(Exception):
    """Raised when the bytes of a chunk do not match its hash."""


class Holdings:
    """Chunks of `files`, numbered consecutively over all files; thread-safe."""

    def __init__(self, files: Sequence[chunks.ChunkedFile]) -> None:
        self.files = files
        self.chunks = chunks.list_chunks(files)
        self.received_bytes = 0
        # Current path of each file, and its path once it is complete.
        self._paths: list[tuple[Path, Path]] = []
        self._missing: set[int] = set()
        self._missing_of = [0] * len(files)
        self._changed = threading.Condition()

    @classmethod
    @contextlib.contextmanager
    def of_store(cls, store: FileStore, files: Sequence[chunks.ChunkedFile]) -> Iterator[Holdings]:
        """Yield the complete and partial files of the store, locked within the block.

        Raises:
            ExpectedError: another transfer receives one of them, or the disk is too full.
        """
        found = cls(files)
        with contextlib.ExitStack() as locks:
            try:
                # Opened before the check of space: present chunks need no more of it.
                first = 0
                for index, file in enumerate(files):
                    found._open(index, first, store, locks)
                    first += chunks.num_chunks(file.size_bytes)
            except OSError as error:
                raise explain_os_error(error, f"preparing {store.root}") from error
            found._require_room(store)
            yield found  # the locks are held until the transfer ends

    @classmethod
    def of_files(cls, paths: Sequence[Path], files: Sequence[chunks.ChunkedFile]) -> Holdings:
        """Return the holdings of complete files, which the caller has just hashed."""
        found = cls(files)
        found._paths = [(path, path) for path in paths]
        return found

    def _open(self, index: int, first: int, store: FileStore, locks: contextlib.ExitStack) -> None:
        file = self.files[index]
        whole = store.find(file.sha256, file.size_bytes)
        partial = store.partial(file.sha256)
        if whole is None:
            busy = "Another transfer of the same files to this node is in progress."
            locks.enter_context(locked(Path(f"{partial}.lock"), LOCK_TIMEOUT_S, busy))
            # Another transfer may have completed the file during the wait for the lock.
            whole = store.find(file.sha256, file.size_bytes)
        self._paths.append((whole or partial, store.path(file.sha256)))
        if whole is None:
            missing = set(self._find_missing(partial, first, chunks.num_chunks(file.size_bytes)))
            self._missing |= missing
            self._missing_of[index] = len(missing)

    def _find_missing(self, partial: Path, first: int, count: int) -> Iterator[int]:
        """Yield the numbers of the chunks that are missing or incomplete in a partial file."""
        # O_NOFOLLOW: a symlink in the store must not redirect writes.
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
                f"The disk of this node is too full: {needed / 1e9:.2f} GB are needed and "
                f"{free / 1e9:.2f} GB are free in {store.root.parent}.",
                "Free some space on this node and try again",
            )

    # ------------------------------------------------------------ present chunks

    def is_complete(self) -> bool:
        with self._changed:
            return not self._missing

    def held_bytes(self) -> int:
        with self._changed:
            missing = sum(self.chunks[number].size_bytes for number in self._missing)
        return sum(file.size_bytes for file in self.files) - missing

    def held(self) -> str:
        """Return the present chunks as a bitmap."""
        with self._changed:
            return chunks.to_bitmap(n for n in range(len(self.chunks)) if n not in self._missing)

    def wanted(self) -> str:
        """Return the missing chunks as a bitmap."""
        with self._changed:
            return chunks.to_bitmap(sorted(self._missing))

    def wait_complete(self, index: int, timeout_s: float) -> bool:
        """Wait until all chunks of a file are present; return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._missing_of[index], timeout_s)

    def sync(self, index: int) -> None:
        """Flush the received part of a file to the disk.

        Raises:
            OSError: the disk refuses.
        """
        file = os.open(self._paths[index][0], os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(file)
        finally:
            os.close(file)

    def supply(self, wanted: str, beat_s: float) -> Iterator[tuple[int, bytes] | None]:
        """Yield each wanted chunk as soon as it is present, and None after `beat_s` without one.

        Raises:
            ValueError: a wanted chunk does not exist.
            OSError: the disk refuses.
        """
        left = deque(sorted(chunks.from_bitmap(wanted)))
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
        # Outside the lock: only this request's thread uses `left`.
        left.remove(number)
        return number

    def read(self, number: int) -> bytes:
        """Return the bytes of a present chunk.

        Raises:
            OSError: the file was truncated, or is not a regular file any more.
        """
        chunk = self.chunks[number]
        arriving, whole = self._paths[chunk.file]
        try:
            file = open_regular(arriving)
        except FileNotFoundError:  # the partial file was completed and moved meanwhile
            file = open_regular(whole)
        with file:
            file.seek(chunk.offset)
            data = file.read(chunk.size_bytes)
        if len(data) != chunk.size_bytes:
            raise OSError(f"{arriving} became shorter while it was sent")
        return data

    # ------------------------------------------------------------ arriving chunks

    def writing(self, number: int, pool: ThreadPoolExecutor) -> ChunkWriter:
        """Return the writer for an arriving chunk."""
        chunk = self.chunks[number]
        return ChunkWriter(self, number, self._paths[chunk.file][0], pool)

    def add(self, number: int) -> None:
        """Record that a chunk is present and verified."""
        with self._changed:
            # Two sources may deliver the same chunk when the master redirects this node.
            if number in self._missing:
                self._missing.remove(number)
                self._missing_of[self.chunks[number].file] -= 1
            self._changed.notify_all()


class ChunkWriter:
    """Writer that hashes and stores the blocks of a chunk in another thread while more arrive."""

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
        """Queue a block, which must not change afterwards.

        Raises:
            ExpectedError: the disk refuses.
        """
        # Backpressure: a slow disk slows the sender down instead of filling the memory.
        while len(self._pending) >= WRITES_AHEAD:
            self._wait()
        self._pending.append(self._pool.submit(self._store, block, self._offset))
        self._offset += len(block)
        self._holdings.received_bytes += len(block)

    def _wait(self) -> None:
        try:
            self._pending.popleft().result()
        except OSError as error:  # of this node's disk, not of the stream
            raise explain_os_error(error, "storing received data") from error

    def _store(self, block: memoryview, offset: int) -> None:
        # The pool has one thread, so blocks are hashed in order.
        self._digest.update(block)
        while block:  # a write may be short
            done = os.pwrite(self._file, block, offset)
            block, offset = block[done:], offset + done

    def finish(self) -> None:
        """Verify the chunk and add it.

        Raises:
            DamagedChunk: its bytes do not match the announced hash.
            ExpectedError: the disk refuses.
        """
        while self._pending:
            self._wait()
        if self._digest.hexdigest() != self._holdings.chunks[self._number].sha256:
            raise DamagedChunk(f"chunk {self._number} arrived damaged")
        self._holdings.add(self._number)

    def close(self) -> None:
        """Close the file once all queued blocks are written."""
        for future in self._pending:
            with contextlib.suppress(OSError):
                future.result()
        os.close(self._file)
