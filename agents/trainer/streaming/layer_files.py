"""Layers as files, written once and kept for the next run.

Each file is a safetensors file with one tensor of bytes, the layer's page-aligned block, so it can
be read without the system's cache. The folder's name hashes everything that determines the bytes:
the model's files, their quantization, the kind of device that did it, and the format. Checksums
show later changes by a disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from agents.errors import ExpectedError, explain_os_error
from agents.shared.files.full_disk import removing_half
from agents.trainer.streaming.layout import PAGE_BYTES, BlockLayout

# Increased when files of earlier versions would be read wrongly.
_FORMAT = 2
# Disk space that writing leaves free, in bytes.
_LEFT_BYTES = 4 << 30
# Age after which folders of models that are no longer streamed are removed, in seconds.
_KEPT_S = 30 * 86400.0
# Age after which files that a killed process left unfinished are removed, in seconds.
_PARTIAL_S = 3600.0
_TENSOR = "layer"
# Prefix of the names of files that are being written.
_PARTIAL = ".partial-"
# Name of the file by which ranks claim layers.
_CLAIMS = ".claims"
# Limit of a file's header, in bytes: a file that claims more is damaged.
_MAX_HEADER_BYTES = 1 << 26
PIECE_BYTES = 1 << 24
"""Size of the pieces of a block that are read together and share a checksum, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFile:
    """A layer on a disk."""

    path: Path
    layout: BlockLayout
    start: int
    """First byte of its block."""
    checksums: tuple[int, ...]
    """CRC-32 of each piece of the block."""


class StreamedLayerFiles:
    """Files of the layers of one model.

    Args:
        folder: parent of the folders of all models.
        about: everything that determines the bytes of the layers.
    """

    def __init__(self, folder: Path, about: dict[str, str]) -> None:
        text = json.dumps({**about, "format": _FORMAT}, sort_keys=True)
        self._folder = folder / hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]

    @property
    def claims_path(self) -> Path:
        """File by which ranks of one PC claim layers; see `LayerClaims`."""
        return self._folder / _CLAIMS

    def find(self, place: int) -> LayerFile | None:
        """Return the file of a layer, or None if it has to be written."""
        path = self._path(place)
        try:
            with path.open("rb") as file:
                num_bytes = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)
                about = json.loads(file.read(num_bytes))["__metadata__"]
                start = file.tell()
            layout = BlockLayout.from_text(about["layout"])
            known, *checksums = json.loads(about["checksums"])
            is_whole = (
                # The layout decides where tensors are read, so it has its own checksum.
                known == zlib.crc32(about["layout"].encode())
                and len(checksums) == len(range(0, layout.num_bytes, PIECE_BYTES))
                and path.stat().st_size == start + layout.num_bytes
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if not is_whole:
            return None
        return LayerFile(path=path, layout=layout, start=start, checksums=tuple(checksums))

    def prepare(self, num_bytes: int) -> None:
        """Create the folder, and check that the disk has enough space and a margin.

        Raises:
            ExpectedError: it has not, or the folder cannot be written to.
        """
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            free_bytes = shutil.disk_usage(folder).free
        except OSError as error:
            raise explain_os_error(error, f"keeping layers in {folder}") from error
        self._remove_partial()
        if free_bytes < num_bytes + _LEFT_BYTES:
            raise ExpectedError(
                f"{folder} needs {(num_bytes + _LEFT_BYTES) / 2**30:.1f} GiB, with "
                f"{_LEFT_BYTES >> 30} to spare, and its disk has {free_bytes / 2**30:.1f} free.",
                "Free space on that disk",
            )

    def write(self, place: int, layout: BlockLayout, block: Tensor) -> LayerFile:
        """Write a layer, whose file appears atomically.

        Raises:
            ExpectedError: the disk cannot store it.
        """
        path = self._path(place)
        # Two ranks may write the same file, each under its own temporary name.
        own = path.with_name(f"{_PARTIAL}{place}.{os.getpid()}.{threading.get_ident()}")
        checksums = tuple(zlib.crc32(piece.numpy()) for _, piece in cut(block))
        header = _make_header(layout, checksums)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with removing_half(own) as partial:
                with partial.open("wb") as file:
                    file.write(header)
                    file.write(memoryview(block.numpy()))
                    file.flush()
                    os.fsync(file.fileno())
                # Atomic: other ranks find a whole file or none.
                partial.replace(path)
        except OSError as error:
            raise explain_os_error(error, f"writing {path}") from error
        return LayerFile(path=path, layout=layout, start=len(header), checksums=checksums)

    def mark_used(self) -> None:
        """Mark these files as used, and remove those that are no longer used."""
        with suppress(OSError):
            # The folder's time stands for the last use of all its files.
            os.utime(self._folder)
        with suppress(OSError):
            for other in self._folder.parent.iterdir():
                if _is_older(other, _KEPT_S):
                    shutil.rmtree(other, ignore_errors=True)

    def _remove_partial(self) -> None:
        for path in self._folder.glob(f"{_PARTIAL}*"):
            if _is_older(path, _PARTIAL_S):
                with suppress(OSError):
                    path.unlink()

    def _path(self, place: int) -> Path:
        return self._folder / f"layer-{place:04}.safetensors"


def cut(block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of a block (num_bytes,), each with its first byte."""
    for start in range(0, len(block), PIECE_BYTES):
        yield start, block[start : start + PIECE_BYTES]


def _is_older(path: Path, age_s: float) -> bool:
    """Return whether it is older than `age_s`; False if missing."""
    try:
        return path.stat(follow_symlinks=False).st_mtime < time.time() - age_s
    except OSError:
        return False


def _make_header(layout: BlockLayout, checksums: tuple[int, ...]) -> bytes:
    """Return the header of a safetensors file, padded with blanks to the end of a page."""
    tensor = {"dtype": "U8", "shape": [layout.num_bytes], "data_offsets": [0, layout.num_bytes]}
    about = layout.to_text()
    known = [zlib.crc32(about.encode()), *checksums]
    metadata = {"layout": about, "checksums": json.dumps(known)}
    text = json.dumps({"__metadata__": metadata, _TENSOR: tensor}).encode()
    num_bytes = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    return num_bytes.to_bytes(8, "little") + text.ljust(num_bytes)
