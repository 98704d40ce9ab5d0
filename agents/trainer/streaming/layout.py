"""Layout of the frozen tensors of a layer in one block of bytes.

One block is one copy over the bus and one read from a file, whereas a layer has dozens of tensors.
Layers of one kind have one layout, so they can take turns in one place on the device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PAGE_BYTES = 4096
"""Blocks are multiples of this, in bytes: reads without the cache need whole pages."""
# Kernels read 16 bytes at once, and some expect each row to start a cache line.
_ALIGNED_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockEntry:
    """Place of one tensor in a block."""

    name: str
    """Name of the tensor within the layer."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """Places of all tensors of a layer, and the facts to use them."""

    entries: tuple[BlockEntry, ...]
    num_bytes: int
    """Size of the block in whole pages, in bytes."""
    facts: str
    """Facts about the layer's quantized tensors, as JSON."""

    def view(self, block: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a block (num_bytes,) of bytes, by name.

        Writers to the block have to restore its content before a backward pass reads it.
        """
        tensors: dict[str, Tensor] = {}
        storage, first = block.untyped_storage(), block.storage_offset()
        for entry in self.entries:
            # `set_` gives each view its own version counter. So autograd, which rejects saved
            # tensors that were overwritten, does not notice writes to the block.
            empty = torch.empty(0, dtype=entry.dtype, device=block.device)
            place = (first + entry.start) // entry.dtype.itemsize
            tensors[entry.name] = empty.set_(storage, place, entry.shape)
        return tensors

    def to_text(self) -> str:
        """Return the layout as JSON."""
        entries = [
            [entry.name, str(entry.dtype).removeprefix("torch."), list(entry.shape), entry.start]
            for entry in self.entries
        ]
        return json.dumps({"entries": entries, "num_bytes": self.num_bytes, "facts": self.facts})

    @classmethod
    def from_text(cls, text: str) -> BlockLayout:
        """Return the layout that `to_text` described.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the text does not describe one.
        """
        plain = json.loads(text)
        entries = tuple(
            BlockEntry(name=name, dtype=getattr(torch, dtype), shape=tuple(shape), start=start)
            for name, dtype, shape, start in plain["entries"]
        )
        return cls(entries=entries, num_bytes=plain["num_bytes"], facts=plain["facts"])


def allocate_block(num_bytes: int) -> Tensor:
    """Return page-aligned host memory (num_bytes,) of uint8."""
    whole = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    # torch aligns to 64 bytes, but direct reads and pinning need whole pages.
    return whole[-whole.data_ptr() % PAGE_BYTES :][:num_bytes]


def make_layout(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> BlockLayout:
    """Return a layout for tensors by name, in their order."""
    entries: list[BlockEntry] = []
    place = 0
    for name, tensor in tensors.items():
        entries.append(
            BlockEntry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), start=place)
        )
        place += -(-tensor.numel() * tensor.element_size() // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return BlockLayout(
        entries=tuple(entries),
        num_bytes=-(-max(place, 1) // PAGE_BYTES) * PAGE_BYTES,
        # Sorted, so that layers of one kind compare equal and share slots.
        facts=json.dumps(facts, sort_keys=True),
    )


def fill_block(layout: BlockLayout, tensors: Mapping[str, Tensor], block: Tensor) -> None:
    """Copy tensors to their places in a block of host memory."""
    for name, place in layout.view(block).items():
        place.copy_(tensors[name])
