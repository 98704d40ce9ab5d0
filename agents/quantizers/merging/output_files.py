"""Write the files of a model tensor by tensor.

Transformers saves the outlines of a model: it chooses files, names and order, and writes configs
and index as for any model. In place of each weight file, only its header is written, by the
safetensors library; each tensor follows when it is ready.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import modeling_utils
from transformers.core_model_loading import revert_weight_conversion

_SHARD_SIZE = "5GB"
_ALIGNMENT = 8


class _Place(NamedTuple):
    path: Path
    offset: int
    outline: Tensor


class OutputFiles:
    """Files of one model, whose tensors come in any order."""

    def __init__(self, model: Any, folder: Path) -> None:
        """Write configs, index and headers; weight files get their final size, without data.

        Args:
            model: Model of Transformers, whose parameters may be on the meta device.
            folder: Folder to write to.
        """
        self._places: dict[str, _Place] = {}
        usual = modeling_utils.safe_save_file, modeling_utils.revert_weight_conversion
        modeling_utils.safe_save_file = self._write_header
        modeling_utils.revert_weight_conversion = _revert_apart
        try:
            model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
        finally:
            modeling_utils.safe_save_file, modeling_utils.revert_weight_conversion = usual

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to their places, skipping those that the model does not save.

        Raises:
            OSError: the disk is full.
        """
        for name, tensor in tensors.items():
            place = self._places.pop(name, None)
            if place is None:
                continue
            if (tensor.shape, tensor.dtype) != (place.outline.shape, place.outline.dtype):
                raise RuntimeError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and its outline "
                    f"{place.outline.dtype} {tuple(place.outline.shape)}"
                )
            with place.path.open("r+b", buffering=0) as file:
                file.seek(place.offset)
                write_data(file, tensor)

    def require_whole(self) -> None:
        """Check that every tensor has been written.

        Raises:
            RuntimeError: a tensor is missing.
        """
        if self._places:
            raise RuntimeError(f"{min(self._places)} and its like were not written")

    def _write_header(
        self, tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str] | None = None
    ) -> None:
        for name, offset in write_header(tensors, path, metadata).items():
            self._places[name] = _Place(Path(path), offset, tensors[name].to("meta"))


def write_header(
    tensors: Mapping[str, Tensor], path: str | Path, metadata: dict[str, str] | None = None
) -> dict[str, int]:
    """Write a safetensors file without its data; return the offset of each tensor.

    Args:
        tensors: Outlines, which may be on the meta device.
        path: File to write, of its final size.
        metadata: Metadata of its header.
    """
    # The library decides the order of tensors and the text of the header.
    empty = {name: torch.empty(0, dtype=value.dtype) for name, value in tensors.items()}
    save_file(empty, path, metadata=metadata)
    with open(path, "rb") as file:
        header = json.loads(file.read()[_ALIGNMENT:])
    end = 0
    for name, about in header.items():
        if name in tensors:
            begin, end = end, end + tensors[name].nbytes
            about |= {"shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % _ALIGNMENT)
    first = _ALIGNMENT + len(raw)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(_ALIGNMENT, "little") + raw)
        os.truncate(path, first + end)
    return {name: first + header[name]["data_offsets"][0] for name in tensors}


def write_data(file: FileIO, tensor: Tensor) -> None:
    """Write a tensor's bytes at the position of an unbuffered file.

    Raises:
        OSError: the disk is full.
    """
    data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    # An unbuffered write may be short, and the kernel writes at most 2 GiB at once.
    while data:
        data = data[file.write(data) :]


def _revert_apart(model: Any, outlines: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return outlines in the layout of files, each with its own storage.

    A view of an outline would count with the size of the whole when files are divided.
    """
    found = revert_weight_conversion(model, outlines)
    return {name: torch.empty_like(t) if t.is_meta else t for name, t in found.items()}
