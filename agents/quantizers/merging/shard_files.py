"""Write the weight files of a model whose tensor sizes are not known in advance.

Quantizing gives tensors of unknown sizes, but a safetensors file begins with the sizes of all. So
tensors are appended to a temporary file; when it has the size of one file of the model, the kernel
copies them behind a header written by the library. In addition to the result, this needs disk space
for one such file, and memory for the largest tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from agents.quantizers.merging.output_files import write_data, write_header

SHARD_BYTES = 5_000_000_000
"""Maximum size of a file, as in Transformers, and the additional space for its tensors, in
bytes."""
_METADATA = {"format": "pt"}
_LOOSE_FILE = ".loose"


class _Loose(NamedTuple):
    offset: int
    outline: Tensor


class ShardFiles:
    """Weight files of one model, in a folder without any.

    Args:
        folder: Folder to write to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loose: dict[str, _Loose] = {}
        self._loose_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Append tensors, on the CPU, to the present file, or begin the next one.

        Raises:
            OSError: the disk is full.
        """
        for name, tensor in tensors.items():
            if self._loose and self._loose_bytes + tensor.nbytes > SHARD_BYTES:
                self._close_shard()
            with (self._folder / _LOOSE_FILE).open("ab", buffering=0) as file:
                write_data(file, tensor)
            self._loose[name] = _Loose(self._loose_bytes, tensor.to("meta"))
            self._loose_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file and, if there are several, the index.

        Raises:
            OSError: the disk is full.
        """
        self._close_shard()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            weight_map.update(dict.fromkeys(names, file))
            final = "model.safetensors" if count == 1 else file
            (self._folder / _name_part(number)).rename(self._folder / final)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _close_shard(self) -> None:
        loose, path = self._folder / _LOOSE_FILE, self._folder / _name_part(len(self._shards) + 1)
        outlines = {name: part.outline for name, part in self._loose.items()}
        places = write_header(outlines, path, _METADATA)
        with loose.open("rb") as source, path.open("r+b") as target:
            for name, part in self._loose.items():
                _copy(
                    source.fileno(), target.fileno(), part.outline.nbytes, part.offset, places[name]
                )
        loose.unlink()
        self._shards.append(list(self._loose))
        self._total_bytes += self._loose_bytes
        self._loose, self._loose_bytes = {}, 0


def _name_part(number: int) -> str:
    return f".part-{number:05}"


def _copy(source: int, target: int, size: int, begin: int, place: int) -> None:
    os.lseek(target, place, os.SEEK_SET)
    while size:
        # Within the kernel: the bytes never pass through this process.
        done = os.sendfile(target, source, begin, size)
        if not done:
            raise RuntimeError("the temporary file of weights ends too early")
        begin, size = begin + done, size - done
