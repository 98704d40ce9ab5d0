"""Copy frozen layers to the device just before they compute.

Streamed layers take turns in a few slots of device memory. When a layer starts, in the forward or
in the backward pass, copies of the next ones into free slots start on a separate stream, so they
overlap with the layer's products. The backward pass starts with the layers that are still there.
Spare memory permanently holds some of the layers, spread evenly, so that there is as much
computation as possible between two copies.

A layer's tensors are views of a fixed place, so code that computes with them is unaffected. Their
content is valid from the call of the layer until the call of the next one, and again once the
gradient of its output is known. Autograd saves the same views in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agents.trainer.streaming.copy_stream import CopyStream
from agents.trainer.streaming.disk_reader import DiskReader
from agents.trainer.streaming.layer_files import LayerFile
from agents.trainer.streaming.layout import BlockLayout

Bind = Callable[[dict[str, Tensor]], None]
"""Lets the modules of a layer use these tensors, which are views of one place."""


@dataclass(eq=False, slots=True)
class _Slot:
    """Device memory that layers of one kind use in turn."""

    block: Tensor
    held: _StreamedLayer | None = None
    arrived: torch.cuda.Event | None = None


@dataclass(eq=False, slots=True)
class _StreamedLayer:
    place: int
    """Index among all decoder layers."""
    layout: BlockLayout
    source: Tensor | LayerFile
    """Its block in host memory, or its file."""
    bind: Bind
    slot: _Slot = field(init=False)
    own: Tensor | None = None
    """Its block on the device while it is resident."""

    @property
    def is_in_file(self) -> bool:
        return isinstance(self.source, LayerFile)


class LayerStream:
    """The layers of a model that are streamed to its device.

    Args:
        device: device of the rank. On a CPU the same steps run in order.
        num_slots: number of slots on the device per kind of layers: one computes while the others
            are copied.
        reader: reads layers from files; None if all are in memory.
    """

    def __init__(
        self, device: torch.device, *, num_slots: int, reader: DiskReader | None = None
    ) -> None:
        self._device = device
        self._copies = CopyStream(device)
        self._layers: list[_StreamedLayer] = []
        # Layers that are not resident, in the order of the forward pass, and the index of each.
        self._order: list[_StreamedLayer] = []
        self._index: dict[int, int] = {}
        self._slots: dict[BlockLayout, list[_Slot]] = {}
        self._counts: dict[BlockLayout, int] = {}
        self._due: dict[int, Callable[[], None]] = {}
        self.modules: dict[int, nn.Module] = {}
        """Layers that are copied whenever they compute, by index among all decoder layers."""
        self.num_slots = num_slots
        self.reader = reader
        self.copied_bytes = 0
        """Number of bytes copied to the device."""

    def add(self, place: int, layout: BlockLayout, source: Tensor | LayerFile, bind: Bind) -> None:
        """Stream a layer from now on.

        Args:
            place: index of the layer among all decoder layers; layers are added in any order.
            layout: layout of its block.
            source: its block in host memory, or the file that contains it.
            bind: called with the layer's tensors whenever their place changes.
        """
        layer = _StreamedLayer(place, layout, source, bind)
        self._layers.append(layer)
        self._stream(layer)

    def attach(self, layers: Mapping[int, nn.Module]) -> None:
        """Copy each of these streamed layers whenever it is about to compute.

        Args:
            layers: all added layers, by index and in order.
        """
        # Ranks that divide the preparation add layers out of order.
        self._layers.sort(key=lambda layer: layer.place)
        self._arrange()
        self.modules.update(layers)
        for place, layer in layers.items():
            layer.register_forward_pre_hook(partial(self._begin_forward, place))
            layer.register_forward_hook(partial(self._end_forward, place))

    def visit(self) -> Iterator[nn.Module]:
        """Yield the layers in order, each with valid tensors until the next one.

        Raises:
            ExpectedError: a layer cannot be read.
        """
        for place, layer in self.modules.items():
            self.reach(place, is_backward=False)
            yield layer

    def do_when_there(self, place: int, action: Callable[[], None]) -> None:
        """Schedule an action that needs a layer's tensors, once, before its next forward pass.

        It costs no extra copy. A later action of the same layer replaces a pending one.

        Args:
            place: index of the layer among all decoder layers.
            action: called when the tensors are valid.
        """
        self._due[place] = action

    @property
    def num_layers(self) -> int:
        """Number of layers that may be streamed."""
        return len(self._layers)

    @property
    def num_resident(self) -> int:
        """Number of layers that currently stay on the device."""
        return len(self._layers) - len(self._order)

    @property
    def num_from_disk(self) -> int:
        """Number of streamed layers that are read from files."""
        return sum(layer.is_in_file for layer in self._order)

    @property
    def resident_bytes(self) -> int:
        """Device memory of the layers that stay there, in bytes."""
        return sum(layer.own.nbytes for layer in self._layers if layer.own is not None)

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots, in bytes."""
        return sum(slot.block.nbytes for slots in self._slots.values() for slot in slots)

    @property
    def streamed_bytes(self) -> int:
        """Size of the layers that are copied in each forward and each backward pass, in bytes."""
        return sum(layer.layout.num_bytes for layer in self._order)

    @property
    def file_bytes(self) -> int:
        """Size of the layers of `streamed_bytes` that are read from files, in bytes."""
        return sum(layer.layout.num_bytes for layer in self._order if layer.is_in_file)

    def keep_resident(self, max_bytes: float) -> None:
        """Keep layers on the device in up to `max_bytes`; stream the others.

        Layers on a disk are the first to stay. If less memory is available, fewer stay.

        Raises:
            ExpectedError: a layer cannot be read.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels may still use the memory that is freed
        for layer in self._layers:
            layer.own = None
        for layer in choose_resident(self._layers, max_bytes):
            try:
                block = torch.empty(layer.layout.num_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                break
            layer.own = block
            self._copy(layer, block)
            layer.bind(layer.layout.view(block))
        self._copies.block_compute(self._copies.record())
        self._arrange()

    def reach(self, place: int, *, is_backward: bool) -> None:
        """Make a layer's tensors valid, and start the copies of the following layers.

        Args:
            place: index of the layer among all decoder layers.
            is_backward: True in the backward pass.

        Raises:
            ExpectedError: a layer cannot be read.
        """
        at = self._index.get(place)
        if at is None:  # resident
            return
        layer, following = self._order[at], self._follow(at, is_backward=is_backward)
        self._load(layer)
        self._copies.block_compute(layer.slot.arrived)
        # A slot of this or a nearer layer must not be overwritten.
        busy = {id(layer.slot)}
        for other in following:
            if id(other.slot) in busy:
                break
            self._load(other)
            busy.add(id(other.slot))
        self._read_ahead(following)

    def _begin_forward(self, place: int, module: nn.Module, args: Any) -> None:
        self.reach(place, is_backward=False)
        if (action := self._due.pop(place, None)) is not None:
            action()

    def _end_forward(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        # Some classes return a tuple, with attention weights or a cache after the features.
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            # The hook runs when the gradient of the output is known, just before the layer's own
            # backward.
            hidden.register_hook(lambda gradient: self.reach(place, is_backward=True))

    def _follow(self, at: int, *, is_backward: bool) -> Sequence[_StreamedLayer]:
        """Return the layers that compute after one, the nearest first."""
        if is_backward:
            # At its end the slots hold the first layers of the next forward pass.
            return self._order[:at][::-1]
        if torch.is_grad_enabled():
            # At its end the slots hold the first layers of the backward pass.
            return self._order[at + 1 :]
        return self._order[at + 1 :] + self._order[:at]

    def _load(self, layer: _StreamedLayer) -> None:
        slot = layer.slot
        if slot.held is not layer:
            slot.held = None  # empty in case the copy fails
            self._copy(layer, slot.block)
            slot.held, slot.arrived = layer, self._copies.record()

    def _copy(self, layer: _StreamedLayer, target: Tensor) -> None:
        """Start to copy a layer after all work launched so far."""
        if isinstance(layer.source, Tensor):
            self._copy_block(layer.source, target)
            return
        assert self.reader is not None
        block = self.reader.take(layer.source)
        self._copy_block(block.content[: len(target)], target)
        self.reader.give_back(block, self._copies.record())

    def _copy_block(self, source: Tensor, target: Tensor) -> None:
        self.copied_bytes += len(target)
        self._copies.wait_for_compute()
        with self._copies.copying():
            target.copy_(source, non_blocking=True)

    def _read_ahead(self, following: Sequence[_StreamedLayer]) -> None:
        if self.reader is None:
            return
        num_left = self.reader.num_blocks
        for other in following:
            if isinstance(other.source, LayerFile) and other.slot.held is not other:
                self.reader.request(other.source)
                num_left -= 1
                if not num_left:
                    return

    def _arrange(self) -> None:
        """Assign empty slots in turn to the layers that are not resident."""
        self._order, self._index, self._counts = [], {}, {}
        for slots in self._slots.values():
            for slot in slots:
                slot.held = None
        for layer in self._layers:
            if layer.own is None:
                self._stream(layer)

    def _stream(self, layer: _StreamedLayer) -> None:
        """Give a layer the next slot of its kind, and the next place in the order."""
        # In turn, so that consecutive layers never share a slot.
        number = self._counts.get(layer.layout, 0)
        self._counts[layer.layout] = number + 1
        slots = self._slots.setdefault(layer.layout, [])
        if number < self.num_slots and number == len(slots):
            block = torch.empty(layer.layout.num_bytes, dtype=torch.uint8, device=self._device)
            slots.append(_Slot(block))
        layer.slot = slots[number % self.num_slots]
        layer.bind(layer.layout.view(layer.slot.block))
        self._index[layer.place] = len(self._order)
        self._order.append(layer)


def choose_resident(layers: Sequence[_StreamedLayer], max_bytes: float) -> list[_StreamedLayer]:
    """Return the layers that stay on the device: from a disk first, and spread evenly."""
    resident: list[_StreamedLayer] = []
    for is_in_file in (True, False):
        kind = [layer for layer in layers if layer.is_in_file == is_in_file]
        sizes = [layer.layout.num_bytes for layer in kind]
        left_bytes = max_bytes - sum(layer.layout.num_bytes for layer in resident)
        fitting = count_fitting(sizes, left_bytes)
        resident += [kind[place] for place in spread(fitting, len(kind))]
    return resident


def count_fitting(sizes: Sequence[int], max_bytes: float) -> int:
    """Return the number of blocks that fit, for any choice of blocks.

    >>> count_fitting([3, 5, 3], 8.9), count_fitting([3, 5, 3], 2.0)
    (2, 0)
    """
    total, number = 0, 0
    for size in sorted(sizes, reverse=True):
        total += size
        if total > max_bytes:
            break
        number += 1
    return number


def spread(number: int, total: int) -> list[int]:
    """Return `number` of `total` places, as evenly as possible.

    >>> spread(2, 6), spread(3, 3), spread(0, 4)
    ([1, 4], [0, 1, 2], [])
    """
    return [(2 * k + 1) * total // (2 * number) for k in range(number)]
