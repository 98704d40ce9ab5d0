"""Read the weights of a model directly to its GPU, in several threads.

Transformers maps safetensors files into memory and copies each tensor from there: every page is
faulted in, the driver stages unpinned memory, and one thread does all of it if bitsandbytes
quantizes while loading. Here each tensor is cut into pieces, which a pool of threads reads into
pinned buffers and copies asynchronously; type conversion happens on the GPU.

Only reading is replaced: Transformers still finds the files, maps and converts names, casts,
quantizes and ties. Its function that opens a file is replaced inside a block, because it takes no
reader as an argument. Unknown content is read by the original.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_utils

from agents.trainer.streaming.disk_reader import read_piece

Report = Callable[[int, int], None]
"""Called with the bytes read and the total bytes of all files; from any thread, often."""

# Number of reading threads. More gain nothing if a disk or the bus is the limit.
_NUM_READERS = 4
# Bounds of the size of a piece, in bytes. Passing a smaller one to a thread takes longer than
# reading.
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 1 << 20, 1 << 24
# Larger tensors are read by the original: Transformers may convert them on the CPU; in bytes.
_MAX_TENSOR_BYTES = 1 << 32
# Names of types in safetensors files, limited to PyTorch types with one size per element.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@contextmanager
def read_by_threads(device: torch.device, report: Report | None = None) -> Iterator[None]:
    """Let `from_pretrained` read safetensors files to this device in several threads.

    The whole model must be loaded to this one device. Other threads that load a model at the same
    time use the reader, too.
    """
    plain = modeling_utils.safe_open
    with _WeightReader(device, report) as reader:
        modeling_utils.safe_open = lambda path, *rest, **more: _ShardFile(
            plain(path, *rest, **more), os.fspath(path), reader
        )
        try:
            yield
        finally:
            modeling_utils.safe_open = plain


class _WeightReader:
    """Reads ranges of files to one device, in pieces for several threads."""

    def __init__(self, device: torch.device, report: Report | None) -> None:
        self._device = device
        self._report = report
        self._pool = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="weights")
        self._staging: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        if device.type == "cuda":
            # Two per thread: one is filled while the other one is copied.
            for _ in range(2 * _NUM_READERS):
                self._staging.put(_Staging(device))
        self._files: list[int] = []
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = 0

    def __enter__(self) -> _WeightReader:
        return self

    def __exit__(self, *error: object) -> None:
        # After an error, threads of Transformers may still wait for pieces: none is cancelled,
        # because `wait` would never return.
        self._pool.shutdown()
        while not self._staging.empty():
            self._staging.get().copied.synchronize()
        for file in self._files:
            os.close(file)
        if self._device.type == "cuda":
            _release_pinned()

    def open(self, path: str) -> int:
        """Return a descriptor of a file."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with self._lock:
            self._files.append(file)
        return file

    def expect(self, num_bytes: int) -> None:
        """Count bytes that will be read."""
        with self._lock:
            self._total_bytes += num_bytes

    def read(self, file: int, offset: int, num_bytes: int) -> Tensor:
        """Return the bytes of a file from `offset` on, as a tensor on the device (num_bytes,).

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        piece_bytes = choose_piece(num_bytes)
        jobs: list[Future[None]] = []
        for start in range(0, num_bytes, piece_bytes):
            piece = target[start : start + piece_bytes]
            jobs.append(self._pool.submit(self._read_piece, file, offset + start, piece))
        wait(jobs)  # for all: none may write into memory that is freed after an error
        for job in jobs:
            job.result()
        return target

    def _read_piece(self, file: int, offset: int, piece: Tensor) -> None:
        if self._device.type == "cuda":
            staging = self._staging.get()
            try:
                staging.copied.synchronize()
                part = staging.buffer[: len(piece)]
                read_piece(file, offset, part)
                # On the current stream, like everything that uses, or has used, this memory.
                piece.copy_(part, non_blocking=True)
                staging.copied.record(torch.cuda.current_stream(self._device))
            finally:
                self._staging.put(staging)
        else:
            read_piece(file, offset, piece)
        with self._lock:
            self._done_bytes += len(piece)
            done_bytes, total_bytes = self._done_bytes, self._total_bytes
        if self._report is not None:
            self._report(done_bytes, total_bytes)


class _Staging:
    """A pinned buffer, and the event after which it may be filled again."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(_MAX_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.device(device):
            self.copied = torch.cuda.Event()


class _ShardFile:
    """Stand-in for an open safetensors file, whose slices the threads read."""

    def __init__(self, plain: Any, path: str, reader: _WeightReader) -> None:
        self._plain = plain
        self._reader = reader
        self._ranges = find_ranges(path)
        self._file = reader.open(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __enter__(self) -> _ShardFile:
        self._plain.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._plain.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        """Return an object that reads a tensor when it is indexed."""
        plain = self._plain.get_slice(name)
        start, end = self._ranges[name]
        if plain.get_dtype() not in _DTYPES or end - start > _MAX_TENSOR_BYTES:
            return plain
        self._reader.expect(end - start)
        return _Slice(plain, self._reader, self._file, start, end)


class _Slice:
    """Stand-in for a tensor of a safetensors file."""

    def __init__(self, plain: Any, reader: _WeightReader, file: int, start: int, end: int) -> None:
        self._plain = plain
        self._reader = reader
        self._file, self._start, self._end = file, start, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __getitem__(self, index: Any) -> Tensor:
        # Transformers reads a whole tensor with an ellipsis; parts are read by the original.
        if index is not ...:
            part: Tensor = self._plain[index]
            return part
        raw = self._reader.read(self._file, self._start, self._end - self._start)
        return raw.view(_DTYPES[self._plain.get_dtype()]).reshape(self._plain.get_shape())


def choose_piece(num_bytes: int) -> int:
    """Return the size of the pieces in which the threads read `num_bytes`.

    >>> [choose_piece(num_bytes) for num_bytes in (100, 6 << 20, 1 << 30)]
    [1048576, 1572864, 16777216]
    """
    share = math.ceil(num_bytes / _NUM_READERS)
    return min(max(share, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)


def find_ranges(path: str) -> dict[str, tuple[int, int]]:
    """Return the start and end of each tensor of a safetensors file, in bytes.

    The file starts with the length of its header (8 bytes, little-endian), then the header, whose
    offsets count from its own end: https://huggingface.co/docs/safetensors
    """
    with open(path, "rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes))
    first = 8 + num_bytes
    return {
        name: (first + about["data_offsets"][0], first + about["data_offsets"][1])
        for name, about in header.items()
        if name != "__metadata__"
    }


def _release_pinned() -> None:
    """Return pinned buffers to the system if torch can: other programs may need the memory."""
    release = getattr(torch.accelerator, "empty_host_cache", None)  # since torch 2.12
    if release is not None:
        release()
