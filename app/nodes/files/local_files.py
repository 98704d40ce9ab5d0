"""Read and write files of this PC for transfers, in threads, so that the event loop is not
blocked.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

from agents.contract.run import FileEntry
from agents.shared.files.folder_files import open_regular
from agents.shared.files.full_disk import removing_half
from app.errors import UserError

BLOCK_BYTES = 1 << 20
"""Size of the blocks that are read and sent, in bytes."""
P = ParamSpec("P")
T = TypeVar("T")


# A thread cannot be cancelled: waiting for it means that no thread touches the files afterwards.
async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a thread; if cancelled, wait for it to finish first."""
    return await in_stoppable_thread(partial(function, *args, **kwargs), lambda: None)


async def in_stoppable_thread(function: Callable[[], T], stop: Callable[[], None]) -> T:
    """Run `function` in a thread; if cancelled, call `stop` and wait for it to finish first."""
    task = asyncio.create_task(asyncio.to_thread(function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would log it
        raise


async def read_blocks(root: Path, name: str, size_bytes: int) -> AsyncGenerator[bytes]:
    """Yield the first `size_bytes` of a file below `root` on this PC, reading one block ahead.

    Raises:
        UserError: it cannot be read, is shorter, or has become a link that leads out of `root`.
    """
    path = root / name
    try:
        file = await in_thread(open_regular, path, root)
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        left = size_bytes
        ahead = asyncio.create_task(asyncio.to_thread(file.read, min(left, BLOCK_BYTES)))
        try:
            while left:
                block = await asyncio.shield(ahead)
                left -= len(block)
                if not block:
                    raise UserError(
                        f"{path} became shorter while it was sent",
                        "Leave the file alone and try again",
                    )
                ahead = asyncio.create_task(asyncio.to_thread(file.read, min(left, BLOCK_BYTES)))
                yield block
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            # The read-ahead must finish before the file is closed.
            await asyncio.wait({ahead})


class FileWriter:
    """Writer of one file: in threads, hashed, verified and synced to disk on close."""

    def __init__(self, folder: Path, entry: FileEntry, node: str) -> None:
        self._path = folder / entry.path
        self._entry = entry
        self._node = node
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None

    async def __aenter__(self) -> FileWriter:
        self._file = await in_thread(self._open)
        return self

    async def write(self, block: bytes) -> None:
        await in_thread(self._append, block)

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await in_thread(self._close, kind is None)

    def _open(self) -> BinaryIO:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # "x": a name that a node lists twice must not overwrite the first file.
        return self._path.open("xb")

    def _append(self, block: bytes) -> None:
        assert self._file is not None
        self._digest.update(block)
        self._file.write(block)

    def _close(self, is_whole: bool) -> None:
        assert self._file is not None
        with removing_half(self._path):
            with self._file:
                if is_whole:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            self._expect_intact(is_whole)

    def _expect_intact(self, is_whole: bool) -> None:
        if not is_whole:
            self._path.unlink(missing_ok=True)
            return
        if self._digest.hexdigest() != self._entry.sha256:
            raise UserError(
                f"{self._entry.path} from {self._node} arrived damaged: its hash does not match",
                "Try again; if it happens again, check that PC's memory and disk",
            )


def publish_folder(temporary: Path, target: Path) -> None:
    """Rename a finished folder to its final name and sync the rename to disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(temporary, target)
    # Windows cannot open a folder to sync it.
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its contents; a missing one is not an error."""
    shutil.rmtree(folder, ignore_errors=True)


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be read: {error.strerror or error}",
        "Check that it is still there and that you may read it",
    )
