"""Keep streamed layers in host memory, and in files if memory is too small.

Quantized layers are always written to files, so that the next run of the model neither reads its
16-bit files nor quantizes again. Layers in 16 bits are written only if they do not fit into memory.
At most one layer is in memory in addition to the result.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from agents.errors import ExpectedError
from agents.trainer.model.frozen_tensors import put_frozen, take_frozen
from agents.trainer.streaming.disk_reader import DamagedLayer, DiskReader, check_block, read_block
from agents.trainer.streaming.host_memory import HostMemory
from agents.trainer.streaming.layer_files import LayerFile, StreamedLayerFiles
from agents.trainer.streaming.layer_stream import LayerStream, spread
from agents.trainer.streaming.layer_turns import LayerClaims, take_turns
from agents.trainer.streaming.layout import BlockLayout, allocate_block, fill_block, make_layout
from agents.trainer.streaming.shared_blocks import SharedBlocks

# Slots per kind of layers: one computes while the next is copied. A disk is less steady than a bus,
# so it gets one more.
_SLOTS, _SLOTS_WITH_DISK = 2, 3
# Reading time that blocks ahead of the passes should cover, in seconds, and the bounds of their
# number.
_AHEAD_S, _MIN_AHEAD, _MAX_AHEAD = 0.5, 1, 4
# Margin for the rounding of sizes that are known before a layer is loaded, as a ratio.
_SIZE_SLACK = 1.02
# Ratio of a slot of shared memory to that size: unused pages take no memory, and padding of a small
# layer's tensors needs more.
_SLOT_SHARE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPeers:
    """Ranks of one PC, which divide the preparation of layers and share memory for them."""

    number: int = 0
    """Number of this rank among them."""
    count: int = 1
    join: Callable[[Sequence[int], int], SharedBlocks | None] = lambda places, slot_bytes: None
    """Returns the shared memory for layers, given their indices and the maximum bytes of one; None
    gives each rank its own.
    """


class StreamedLayers:
    """Stores the layers of one model, and streams them.

    Args:
        device: device of the rank.
        files: files of layers.
        memory: host memory for layers.
        keeps_files: True writes all layers, False only those that do not fit into memory.
        warn: called with a message and a hint if they cannot be written.
        report: called with the number of loaded layers and of all layers, also while waiting.
        local: resources shared with other ranks of this PC.
    """

    def __init__(
        self,
        device: torch.device,
        files: StreamedLayerFiles,
        memory: HostMemory,
        *,
        keeps_files: bool,
        warn: Callable[[str, str], None],
        report: Callable[[int, int], None],
        local: LayerPeers = LayerPeers(),
    ) -> None:
        self._files = files
        self._memory = memory
        self._keeps_files = keeps_files
        self._warn = warn
        self._report = report
        self._local = local
        self._shared: SharedBlocks | None = None
        # Indices of the layers in shared memory.
        self._in_slots: set[int] = set()
        self._places: list[int] = []
        self._modules: dict[int, nn.Module] = {}
        self._largest_file: LayerFile | None = None
        # Indices of the layers that do not fit into memory.
        self._left_in_files: set[int] = set()
        # Errors of unusable files, and their blocks, reused when the same layers are prepared
        # again.
        self._damages: list[DamagedLayer] = []
        self._spare: dict[int, Tensor] = {}
        self.stream = LayerStream(device, num_slots=_SLOTS)

    def begin(self, layer_bytes: Mapping[int, int]) -> None:
        """Choose the layers in memory and those in files, which are spread evenly.

        Raises:
            ExpectedError: there is no space for all of them.
        """
        self._places = places = list(layer_bytes)
        most_bytes = math.ceil(max(layer_bytes.values()) * _SIZE_SLACK)
        num_reading = 1
        self._shared = self._local.join(places, _SLOT_SHARE * most_bytes)
        if self._shared is not None:
            num_reading = self._local.count
            # The budget of all ranks together, since they hold one copy.
            self._memory.budget_bytes = self._shared.budget_bytes
        num_fitting = self._memory.budget_bytes // most_bytes
        num_in_files = max(0, len(places) - num_fitting)
        if num_in_files:
            # The blocks into which each rank reads must fit, too.
            num_in_files = min(len(places), num_in_files + num_reading * (_MAX_AHEAD + 1))
        self._left_in_files = {places[number] for number in spread(num_in_files, len(places))}
        self.stream.num_slots = _SLOTS_WITH_DISK if num_in_files else _SLOTS
        self._files.mark_used()
        num_missing = sum(
            self._is_kept(place) and self._files.find(place) is None for place in places
        )
        if not num_missing:
            return
        try:
            self._files.prepare(num_missing * most_bytes)
        except ExpectedError as error:
            if num_in_files:
                raise ExpectedError(
                    f"Host memory has room for {num_fitting} of {len(places)} layers, and the "
                    f"others cannot be written: {error.message}",
                    f"{error.hint or 'Mend that folder'}, free memory of that PC, or use "
                    "parallel: pipeline",
                ) from error
            self._stop_keeping(error)

    def take_turns(self) -> Iterator[int]:
        """Yield each layer when it is this rank's turn; see `LayerStore`.

        Raises:
            PeerLost: another rank is lost, if `report` notices it.
        """
        return take_turns(
            LayerClaims(self._files.claims_path),
            self._places,
            self._local.number / self._local.count,
            self._is_common,
            self._is_there,
            self._report,
        )

    def restore(self, place: int, layer: nn.Module) -> bool:
        """Stream a layer from its file, or from memory after reading it; see `LayerStore`.

        A damaged or unreadable file is written again.
        """
        file = self._files.find(place)
        if file is None:
            return False
        block = self._take(place, file.layout.num_bytes)
        try:
            if not self._is_filled(place):
                read_block(file, block)
                check_block(file, block)
                self._mark_filled(place)
        except DamagedLayer as error:
            self._damages.append(error)
            self._spare[place] = block
            return False
        self._add(place, layer, file.layout, file if place in self._left_in_files else block)
        return True

    def keep(self, place: int, layer: nn.Module) -> None:
        """Store a loaded layer in memory, and in a file if needed; see `LayerStore`.

        Raises:
            ExpectedError: the disk cannot store it.
        """
        tensors, facts = take_frozen(layer)
        layout = make_layout(tensors, facts)
        block = self._take(place, layout.num_bytes)
        if not self._is_filled(place):
            fill_block(layout, tensors, block)
            self._mark_filled(place)
        source: Tensor | LayerFile = block
        if place in self._left_in_files:
            source = self._files.write(place, layout, block)
        elif self._keeps_files:
            try:
                self._files.write(place, layout, block)
            except ExpectedError as error:
                self._stop_keeping(error)
        self._add(place, layer, layout, source)

    def finish(self) -> LayerStream:
        """Start streaming: copy each layer whenever it is called; return the stream."""
        self._spare.clear()
        if self._damages:
            others = f" (and {len(self._damages) - 1} more)" if len(self._damages) > 1 else ""
            self._warn(
                f"{self._damages[0].message} It was made again{others} from the model's files.",
                "Check that disk: it changes or loses data",
            )
        self._files.mark_used()
        if (largest := self._largest_file) is not None:
            num_blocks = 1 + choose_ahead(largest)
            self.stream.reader = DiskReader(self._memory, largest.layout.num_bytes, num_blocks)
        self.stream.attach(dict(sorted(self._modules.items())))
        return self.stream

    def _take(self, place: int, num_bytes: int) -> Tensor:
        """Return memory for a layer, either for good or for its transfer to or from a file."""
        spare = self._spare.pop(place, None)
        if spare is not None and len(spare) == num_bytes:
            return spare
        if place in self._left_in_files:
            return allocate_block(num_bytes)
        slot = self._shared.take(place, num_bytes) if self._shared is not None else None
        if slot is None:
            return self._memory.take(num_bytes)
        self._in_slots.add(place)
        return self._memory.hold(slot)

    def _is_kept(self, place: int) -> bool:
        return self._keeps_files or place in self._left_in_files

    def _is_common(self, place: int) -> bool:
        """Return whether other ranks use the layer that this rank prepares."""
        return self._is_kept(place) or self._shared is not None

    def _is_there(self, place: int) -> bool:
        if self._is_kept(place) or self._shared is None:
            return self._files.find(place) is not None
        return self._shared.is_filled(place)

    def _is_filled(self, place: int) -> bool:
        """Return whether another rank has filled this rank's memory for a layer."""
        shared = self._shared
        return shared is not None and place in self._in_slots and shared.is_filled(place)

    def _mark_filled(self, place: int) -> None:
        if self._shared is not None and place in self._in_slots:
            self._shared.mark_filled(place)

    def _stop_keeping(self, error: ExpectedError) -> None:
        self._keeps_files = False
        self._warn(
            f"The next run quantizes layers again, because they cannot be kept: {error.message}",
            error.hint,
        )

    def _add(
        self, place: int, layer: nn.Module, layout: BlockLayout, source: Tensor | LayerFile
    ) -> None:
        facts = json.loads(layout.facts)

        def bind(tensors: dict[str, Tensor]) -> None:
            put_frozen(layer, tensors, facts)

        self.stream.add(place, layout, source, bind)
        self._modules[place] = layer
        if isinstance(source, LayerFile):
            known = self._largest_file
            if known is None or layout.num_bytes > known.layout.num_bytes:
                self._largest_file = source


def choose_ahead(file: LayerFile) -> int:
    """Return the number of layers to read ahead, by the measured rate of the disk.

    Raises:
        ExpectedError: the file cannot be read.
    """
    block = allocate_block(file.layout.num_bytes)
    started_s = time.perf_counter()
    read_block(file, block)
    layer_s = time.perf_counter() - started_s
    return min(_MAX_AHEAD, max(_MIN_AHEAD, math.ceil(_AHEAD_S / layer_s)))
