"""Layers as files, made once and kept for the next run.

Each file is a safetensors file with one tensor of bytes, the layer's block, that begins a page: so
it can be read past the system's cache. The folder is named by all that decides the bytes: the
model's files, how they are quantized, the kind of device that did it, our format.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from agents.errors import explain_os_error
from agents.trainer.streaming.layout import PAGE_BYTES, BlockLayout

# Raised when files of earlier versions would be read wrongly.
_FORMAT = 1
# Disk space that writing leaves free, in bytes.
_LEFT_BYTES = 4 << 30
# Folders of models that nobody has streamed for so long are removed, in seconds.
_KEPT_S = 30 * 86400.0
_TENSOR = "layer"
# Limit of the head of a file, in bytes: one that claims more is damaged.
_MAX_HEADER_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFile:
    """A layer on a disk."""

    path: Path
    layout: BlockLayout
    start: int
    """First byte of its block."""


class LayerFiles:
    """Files of the layers of one model.

    Args:
        folder: Of such folders of all models.
        about: All that decides the bytes of the layers.
    """

    def __init__(self, folder: Path, about: dict[str, str]) -> None:
        text = json.dumps({**about, "format": _FORMAT}, sort_keys=True)
        self._folder = folder / hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]

    def find(self, place: int) -> LayerFile | None:
        """Return the file of a layer, or None if it has to be made."""
        path = self._path(place)
        try:
            with path.open("rb") as file:
                num_bytes = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)
                header = json.loads(file.read(num_bytes))
                layout = BlockLayout.from_text(header["__metadata__"]["layout"])
                start = file.tell()
            is_whole = path.stat().st_size == start + layout.num_bytes
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return LayerFile(path=path, layout=layout, start=start) if is_whole else None

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the disk has room for so many bytes, and some to spare."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        try:
            return shutil.disk_usage(self._folder).free > num_bytes + _LEFT_BYTES
        except OSError:
            return False

    def write(self, place: int, layout: BlockLayout, block: Tensor) -> LayerFile:
        """Write a layer, which then appears at once and whole.

        Raises:
            ExpectedError: the disk does not take it.
        """
        path = self._path(place)
        # Ranks of one node make the same file, each under a name of its own.
        partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        header = _make_header(layout)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(header)
                file.write(memoryview(block.numpy()))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise explain_os_error(error, f"writing {path}") from error
        return LayerFile(path=path, layout=layout, start=len(header))

    def mark_used(self) -> None:
        """Remember that these files were used, and remove those that nobody uses any more."""
        with suppress(OSError):
            os.utime(self._folder)
        oldest_s = time.time() - _KEPT_S
        with suppress(OSError):
            for other in self._folder.parent.iterdir():
                if other.stat().st_mtime < oldest_s:
                    shutil.rmtree(other, ignore_errors=True)

    def _path(self, place: int) -> Path:
        return self._folder / f"layer-{place:04}.safetensors"


def _make_header(layout: BlockLayout) -> bytes:
    """Return the head of a safetensors file, padded with blanks so that a page begins behind it."""
    tensor = {"dtype": "U8", "shape": [layout.num_bytes], "data_offsets": [0, layout.num_bytes]}
    text = json.dumps({"__metadata__": {"layout": layout.to_text()}, _TENSOR: tensor}).encode()
    num_bytes = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    return num_bytes.to_bytes(8, "little") + text.ljust(num_bytes)
