"""Read layers from their files ahead of the passes that need them.

Threads read pieces of a layer, bypassing the system's cache, into one of a few pinned blocks, a
ring. The cache would not help: pinned memory already holds what it could hold, and layers that do
not fit evict each other. It is used only if the file system cannot bypass it.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from agents.errors import ExpectedError
from agents.trainer.streaming.host_memory import HostMemory
from agents.trainer.streaming.layer_files import LayerFile, cut

# An SSD reaches its speed with several requests at once.
_NUM_READERS = 4


class DamagedLayer(ExpectedError):
    """Raised for a layer that cannot be read, or differs from what was written."""


@dataclass(eq=False, slots=True)
class RingBlock:
    """A block of host memory that layers use in turn."""

    content: Tensor
    copied: torch.cuda.Event | None = None
    """Event after which the block may be overwritten; None if it may be now."""


@dataclass(eq=False, slots=True)
class _Reading:
    block: RingBlock
    started_s: float = field(default_factory=time.perf_counter)
    pieces: list[Future[float]] = field(default_factory=list)
    """Futures that return the time of their end."""


class DiskReader:
    """Reads layers into a ring of blocks.

    Args:
        memory: source of the blocks.
        num_bytes: size of the largest layer.
        num_blocks: number of layers that are read ahead, plus the one being copied.
    """

    def __init__(self, memory: HostMemory, num_bytes: int, num_blocks: int) -> None:
        self._free = [RingBlock(memory.take(num_bytes)) for _ in range(num_blocks)]
        self.num_blocks = num_blocks
        self._pool = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="layers")
        self._files: dict[Path, int] = {}
        # Layers that are being read or wait to be copied, the oldest first.
        self._ahead: OrderedDict[Path, _Reading] = OrderedDict()
        self.read_bytes = 0
        """Number of bytes that were read and used."""
        self.reading_s = 0.0
        """Time spent reading, in seconds."""
        self.waited_s = 0.0
        """Time that the rank waited for reads, in seconds."""
        self._last_end_s = 0.0

    def request(self, file: LayerFile) -> None:
        """Start to read a layer if a block is free."""
        if file.path in self._ahead or not self._free:
            return
        reading = _Reading(self._free.pop(0))
        for start, piece in cut(reading.block.content[: file.layout.num_bytes]):
            job = self._pool.submit(self._read, file, reading.block, start, piece)
            reading.pieces.append(job)
        self._ahead[file.path] = reading

    def take(self, file: LayerFile) -> RingBlock:
        """Return a block with the content of a layer; give it back when it is copied.

        Raises:
            DamagedLayer: the file cannot be read.
        """
        if file.path not in self._ahead and not self._free:
            # Read ahead in a direction that the pass did not take.
            _, reading = self._ahead.popitem(last=False)
            wait(reading.pieces)
            self._free.append(reading.block)
        self.request(file)
        reading = self._ahead.pop(file.path)
        started_s = time.perf_counter()
        wait(reading.pieces)  # for all: none may write into a block that is given back
        try:
            ended_s = max([piece.result() for piece in reading.pieces])
        except OSError as error:
            self._free.append(reading.block)
            raise _explain(file, error) from error
        self.waited_s += time.perf_counter() - started_s
        # Reads overlap at their ends, since the threads take pieces in order.
        self.reading_s += ended_s - max(reading.started_s, min(self._last_end_s, ended_s))
        self._last_end_s = ended_s
        self.read_bytes += file.layout.num_bytes
        return reading.block

    def give_back(self, block: RingBlock, copied: torch.cuda.Event | None) -> None:
        """Allow a block to be filled again after the recorded copy."""
        block.copied = copied
        self._free.append(block)

    @property
    def bytes_per_s(self) -> float | None:
        """Measured rate of the disk, in bytes per second; None before the first read."""
        return self.read_bytes / self.reading_s if self.reading_s else None

    def close(self) -> None:
        """Stop reading and close all files."""
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read(self, file: LayerFile, block: RingBlock, start: int, piece: Tensor) -> float:
        if block.copied is not None:
            block.copied.synchronize()
        read_piece(self._open(file.path), file.start + start, piece)
        return time.perf_counter()

    def _open(self, path: Path) -> int:
        if (known := self._files.get(path)) is not None:
            return known
        opened = open_direct(path)
        # Threads may open a file at the same moment: only one descriptor is kept.
        kept = self._files.setdefault(path, opened)
        if kept != opened:
            os.close(opened)
        return kept


def read_block(file: LayerFile, target: Tensor) -> None:
    """Read a layer into page-aligned host memory, in several threads.

    Raises:
        DamagedLayer: the file cannot be read.
    """
    try:
        opened = open_direct(file.path)
        try:
            with ThreadPoolExecutor(_NUM_READERS) as pool:
                pieces = [
                    pool.submit(read_piece, opened, file.start + start, piece)
                    for start, piece in cut(target[: file.layout.num_bytes])
                ]
            for done in pieces:
                done.result()
        finally:
            os.close(opened)
    except OSError as error:
        raise _explain(file, error) from error


def check_block(file: LayerFile, block: Tensor) -> None:
    """Check that a layer is what was written, in several threads.

    Raises:
        DamagedLayer: it is not.
    """
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        pieces = (piece.numpy() for _, piece in cut(block[: file.layout.num_bytes]))
        checksums = tuple(pool.map(zlib.crc32, pieces))
    if checksums != file.checksums:
        raise DamagedLayer(
            f"A layer of the model in {file.path} is not what was written there.",
            "Check that disk, and resume the run: damaged layers are made again",
        )


def _explain(file: LayerFile, error: OSError) -> DamagedLayer:
    return DamagedLayer(
        f"A layer of the model could not be read from {file.path}: {error}.",
        "Check that disk, and resume the run: unreadable layers are made again",
    )


def open_direct(path: Path) -> int:
    """Return a descriptor that bypasses the system's cache if the file system supports it.

    Raises:
        OSError: the file cannot be opened.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_piece(file: int, offset: int, target: Tensor) -> None:
    """Fill host memory with the bytes of a file from `offset` on.

    Raises:
        OSError: it cannot be read, or has become shorter.
    """
    view = memoryview(target.numpy())
    while view:
        num_bytes = os.preadv(file, [view], offset)
        if num_bytes == 0:
            raise OSError("the file became shorter while it was read")
        view, offset = view[num_bytes:], offset + num_bytes
