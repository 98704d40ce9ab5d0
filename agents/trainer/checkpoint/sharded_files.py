"""Tensors in several safetensors files of bounded size, in the layout of Transformers.

Files are `STEM-00001-of-00003.safetensors` and so on, with an index in
`STEM.safetensors.index.json`; a single file is `STEM.safetensors` without an index. A file is
hashed and sent as a whole, again after a broken connection, and writing it needs a copy in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2_000_000_000
"""Maximum size of a file, in bytes, unless a single tensor is larger."""
# Separates the name of a tensor from the number of its piece.
_PIECE = ":piece-"


def write_shards(
    tensors: Mapping[str, Tensor], folder: Path, stem: str, shard_bytes: int | None = None
) -> None:
    """Write tensors into files of at most `shard_bytes` (`SHARD_BYTES` if None).

    A larger tensor gets its own file, as in Transformers.
    """
    groups = group_names(tensors, shard_bytes or SHARD_BYTES)
    names = name_files(stem, len(groups))
    for name, group in zip(names, groups, strict=True):
        part = {key: tensors[key] for key in group}
        # Transformers rejects a file whose metadata has no format.
        save_file(part, folder / name, metadata={"format": "pt"})
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {
                key: name for name, group in zip(names, groups, strict=True) for key in group
            },
        }
        text = json.dumps(index, indent=1, sort_keys=True)
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="ascii")


def group_names(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Return the names of the tensors in each file, in order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    return groups


def name_files(stem: str, count: int) -> list[str]:
    """Return the names of `count` files.

    >>> name_files("model", 1), name_files("model", 2)[1]
    (['model.safetensors'], 'model-00002-of-00002.safetensors')
    """
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def find_shards(folder: Path, stem: str) -> list[Path]:
    """Return the files that hold the tensors, in order; empty if no file does."""
    whole = folder / f"{stem}.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob(f"{stem}-*-of-*.safetensors"))


def read_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, reading only the headers."""
    shapes = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def read_shards(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name, one at a time."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def cut_long(tensors: Mapping[str, Tensor], piece_bytes: int | None = None) -> dict[str, Tensor]:
    """Return the tensors with long one-dimensional ones cut into pieces.

    Args:
        tensors: tensors by name.
        piece_bytes: maximum size of a piece, in bytes; `SHARD_BYTES` if None.
    """
    limit = piece_bytes or SHARD_BYTES
    cut: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.nbytes <= limit:
            cut[name] = tensor
            continue
        # The flat moments of the optimizer are one tensor, which may exceed the size of a file.
        for number, piece in enumerate(tensor.split(max(1, limit // tensor.element_size()))):
            cut[f"{name}{_PIECE}{number:05d}"] = piece
    return cut


def join_cut(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Undo `cut_long`; the pieces may come in any order."""
    pieces: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors:
        name, _, number = key.partition(_PIECE)
        pieces.setdefault(name, {})[number] = tensor
    return {
        name: parts[""] if "" in parts else torch.cat([parts[n] for n in sorted(parts)])
        for name, parts in pieces.items()
    }
