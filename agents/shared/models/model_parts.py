"""Parts of a model for a node whose ranks have only some layers: files, and headers of the others.

Of a model in several files, a node gets the files with a tensor of its layers. Of each other file
it gets the header, so that a reader of the model finds the name and shape of every tensor; the data
of those tensors must never be read. One file in the folder of the weights holds all headers, and
the hashes of the whole model, by which ranks compare what they train.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from agents.contract.model_cut import Stage
from agents.contract.run import FileEntry

PARTS_PREFIX = ".parts-"
"""Prefix of the file's name; the hash of its content and `.json` follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """Weight file of which the node has only the header."""

    path: str
    header_base64: str
    """Bytes of the file before its first tensor, in base64."""

    def header(self) -> bytes:
        """Return the header's bytes.

        Raises:
            ValueError: they are not base64.
        """
        try:
            return base64.b64decode(self.header_base64, validate=True)
        except binascii.Error as error:
            raise ValueError(f"the header of {self.path} is not base64: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """Parts of a model on one node."""

    files: tuple[FileEntry, ...]
    """All files of the whole model, also of the parts that are elsewhere."""
    outlines: tuple[Outline, ...]
    layers: tuple[int, ...]
    """Layers whose tensors the node has, in ascending order."""
    has_embedding: bool
    has_head: bool

    def check_foreign(self) -> None:
        known = {entry.path for entry in self.files}
        # A header is written next to the weights, so its path must not lead into another folder.
        for outline in self.outlines:
            if outline.path not in known or "/" in outline.path:
                raise ValueError(f"{outline.path[:120]!a} is not a file of this model")

    def holds(self, stage: Stage) -> bool:
        """Return whether the node has all tensors of a stage."""
        return (
            set(range(stage.first_layer, stage.stop_layer)) <= set(self.layers)
            and (self.has_embedding or not stage.has_embedding)
            and (self.has_head or not stage.has_head)
        )


def is_parts_file(path: str) -> bool:
    """Return whether a path names such a file, not a model's folder.

    >>> is_parts_file("/a/models/m/.parts-0123abcd.json"), is_parts_file("/a/models/m")
    (True, False)
    """
    name = PurePosixPath(path).name
    return name.startswith(PARTS_PREFIX) and name.endswith(".json")


def find_needless_files(
    tensors: Mapping[str, Iterable[str]],
    layer_of: Mapping[str, int],
    ends: tuple[Sequence[str], Sequence[str]],
    stages: Sequence[Stage],
    *,
    is_tied: bool,
) -> list[str]:
    """Return the files without a tensor of these stages, sorted by name.

    Args:
        tensors: names of the tensors in each file.
        layer_of: layer of each tensor that belongs to one.
        ends: names of the embedding's and of the head's tensors.
        stages: stages of the node's ranks.
        is_tied: True if head and embedding share one tensor.
    """
    layers = {number for stage in stages for number in range(stage.first_layer, stage.stop_layer)}
    has_head = any(stage.has_head for stage in stages)
    # A tied head is stored as the embedding alone.
    has_embedding = any(stage.has_embedding for stage in stages) or (has_head and is_tied)
    embeddings, heads = map(frozenset, ends)

    def is_needed(name: str) -> bool:
        if name in layer_of:
            return layer_of[name] in layers
        if name in embeddings:
            return has_embedding
        # Everything else, such as the last norm, is small, and every rank loads it.
        return has_head if name in heads else True

    return sorted(path for path, names in tensors.items() if not any(map(is_needed, names)))
