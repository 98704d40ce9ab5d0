"""Offload the saved activations of some layers to host memory until the backward pass.

A layer's saved tensors are copied to pinned memory on a separate stream while the next layers
compute, and prefetched one layer ahead of the backward pass. On most cards this costs no time: an
RTX 3060 produces about 3 GB/s of activations for a 7B model, and PCIe 4.0 transfers 25 GB/s. The
copies are exact, so offloading never changes a result.

No memory is released before its copy has ended: the compute stream waits for the copy of the
second-to-last layer before the tensors are dropped.

A pipeline stage holds several micro-batches between their forward and backward passes. Each has its
own offloaded tensors, so their backward passes may come in any order. A class that takes one
segment at a time passes a micro-batch through each layer several times. So offloaded tensors are
kept per turn (one pass of one layer), not per layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from agents.contract.layer_plan import STAGE_CHUNK_BYTES
from agents.errors import first_line
from agents.trainer.streaming.copy_stream import CopyStream

# Size of one pinned allocation. A power of two, because torch's pinned allocator rounds up to one.
_CHUNK_BYTES = 1 << 29
# Smaller tensors stay on the GPU: copying them costs more than it frees.
_MIN_BYTES = 1 << 18
_ALIGNED = 512  # alignment of tensors in a chunk, in bytes: that of CUDA's allocator
# Fully offloaded layers whose copies may still run when the next one starts.
_AHEAD = 1
# Layers whose copies may still run when a layer starts that offloads only its input. Also the
# number of layers prefetched in the backward pass.
_LAYERS_AHEAD = 4
# With `saves_memory`: how many layers ahead a fully offloaded one is prefetched. Inputs of
# recomputed layers are then prefetched one layer ahead.
_WHOLE_AHEAD = 2


@dataclass(slots=True)
class _OffloadedTensor:
    """A tensor saved for the backward pass and offloaded to host memory."""

    batch: OffloadedBatch
    turn: int
    host: Tensor
    """Content in host memory, as bytes (uint8)."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    num_uses: int = 1
    back: Tensor | None = None
    """Content prefetched to the GPU, as bytes; None before the prefetch and after the last use."""


class Arena:
    """Pinned host memory in chunks that regions take and give back.

    Args:
        capacity_bytes: limit of all chunks together.
        is_pinned: True pins the memory, which asynchronous copies to a GPU need.
        chunk_bytes: size of a chunk and limit of one tensor.
    """

    def __init__(
        self, capacity_bytes: int, *, is_pinned: bool, chunk_bytes: int = _CHUNK_BYTES
    ) -> None:
        self._is_pinned = is_pinned
        self.chunk_bytes = chunk_bytes
        self._max_chunks = capacity_bytes // chunk_bytes
        self._num_chunks = 0
        self._free: list[Tensor] = []

    @property
    def capacity_bytes(self) -> int:
        """Total number of bytes that can be allocated."""
        return self._max_chunks * self.chunk_bytes

    def take(self) -> Tensor | None:
        """Return a chunk (chunk_bytes,) of uint8, or None at the limit."""
        if self._free:
            return self._free.pop(0)
        if self._num_chunks >= self._max_chunks:
            return None
        try:
            whole = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        except RuntimeError as error:  # no more memory can be pinned
            print(
                f"Activations stay on the GPU from here on: after {self._num_chunks} pieces of "
                f"{self.chunk_bytes >> 20} MiB no more host memory could be pinned "
                f"({first_line(error)}).",
                flush=True,
            )
            self._max_chunks = self._num_chunks
            return None
        self._num_chunks += 1
        return whole

    def give_back(self, chunks: Iterable[Tensor]) -> None:
        """Return chunks to the pool."""
        self._free.extend(chunks)


class Region:
    """Bump allocator in chunks of an arena: allocates in order, frees everything at once."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._chunks: list[Tensor] = []
        # First free byte of the last chunk.
        self._place = 0

    def clear(self) -> None:
        """Free everything."""
        self._arena.give_back(self._chunks)
        self._chunks, self._place = [], 0

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Return a buffer (num_bytes,) of uint8, or None if the arena is full."""
        if num_bytes > self._arena.chunk_bytes:
            return None
        if not self._chunks or self._place + num_bytes > self._arena.chunk_bytes:
            chunk = self._arena.take()
            if chunk is None:
                return None
            self._chunks.append(chunk)
            self._place = 0
        start = self._place
        self._place += -(-num_bytes // _ALIGNED) * _ALIGNED
        return self._chunks[-1][start : start + num_bytes]


@dataclass(eq=False, slots=True)
class OffloadedBatch:
    """Offloaded tensors of one micro-batch."""

    region: Region
    num_turns: int = 0
    """Number of forward passes of layers so far."""
    order: list[int] = field(default_factory=list)
    """Turns with offloaded tensors not yet prefetched, in the order of the forward pass."""
    whole: set[int] = field(default_factory=set)
    """Turns that offload all activations, not only their input."""
    tensors: dict[int, list[_OffloadedTensor]] = field(default_factory=dict)
    """Offloaded tensors of each turn."""
    arrived: dict[int, torch.cuda.Event | None] = field(default_factory=dict)
    """Copy events of the turns whose tensors are back or on their way."""

    def clear(self) -> None:
        """Free the host memory, and prefetched tensors that were not used."""
        self.region.clear()
        self.tensors.clear()


class Offloader:
    """Offloads the saved tensors of selected layers and prefetches them for the backward pass.

    Args:
        device: the GPU. On a CPU the same steps run without effect, for tests.
        fixed: parameters and buffers, which are never offloaded.
        capacity_bytes: limit of pinned host memory.
        min_bytes: smaller tensors stay on the GPU; None chooses the size from which copying pays
            (0 on a CPU).
        holds_several: True if several micro-batches are between their passes at once.
    """

    def __init__(
        self,
        device: torch.device,
        fixed: Iterable[Tensor],
        capacity_bytes: int,
        min_bytes: int | None = None,
        *,
        holds_several: bool = False,
    ) -> None:
        self._device = device
        self.arena = Arena(
            capacity_bytes,
            is_pinned=device.type == "cuda",
            # Each micro-batch takes whole chunks, so several micro-batches want smaller ones.
            chunk_bytes=STAGE_CHUNK_BYTES if holds_several else _CHUNK_BYTES,
        )
        self._holds_several = holds_several
        self._fixed = {tensor.untyped_storage().data_ptr() for tensor in fixed}
        usual_bytes = _MIN_BYTES if device.type == "cuda" else 0
        self._min_bytes = usual_bytes if min_bytes is None else min_bytes
        self._copies = CopyStream(device)
        self._shared: set[int] = set()
        self._turn = -1
        self.current = OffloadedBatch(Region(self.arena))
        """The micro-batch of the latest forward pass."""
        # Micro-batches with tensors in host memory.
        self._batches: list[OffloadedBatch] = []
        # True if anything was copied since `release`.
        self._has_copied = False
        self._copied: dict[tuple[int, int, torch.Size, tuple[int, ...]], _OffloadedTensor] = {}
        self._leaving: list[Tensor] = []
        self._in_flight: deque[
            tuple[OffloadedBatch, int, torch.cuda.Event | None, list[Tensor]]
        ] = deque()
        self._layer_bytes = 0
        self.max_layer_bytes = 0
        """Largest number of offloadable bytes of one layer since `begin`, whether they fit or not.
        """
        self.saves_memory = False
        """True to prefetch less and to have one fully offloaded layer in flight at a time.

        Sufficient if few layers are offloaded between recomputed ones, whose second forward pass
        hides the copies.
        """

    def begin(self) -> None:
        """Prepare for a micro-batch; drop the one before unless several are held."""
        if not self._holds_several:
            self.release()
        self.current = OffloadedBatch(Region(self.arena))
        self.max_layer_bytes = 0

    def release(self) -> None:
        """Drop the tensors of all micro-batches, also after an error."""
        self._settle()
        for batch in self._batches:
            batch.clear()
        self._batches = []
        self._has_copied = False

    def drop(self, batch: OffloadedBatch) -> None:
        """Drop the tensors of a micro-batch, after its backward pass or an error."""
        if batch not in self._batches:
            return
        if batch.order:  # some tensors have not come back, or may not even have left
            self._settle()
        batch.clear()
        self._batches.remove(batch)

    def _settle(self) -> None:
        """Wait for outgoing copies, then drop their tensors."""
        # First the compute stream waits for the copies, then the copies for the compute stream:
        # either may reuse memory freed here at once. Without copies there is no need to wait. While
        # CUDA records, waiting for a stream outside the recording would spoil it.
        if self._has_copied:
            self._copies.block_compute(self._copies.record())
        self._in_flight.clear()
        self._leaving, self._copied = [], {}
        if self._has_copied:
            self._copies.wait_for_compute()

    @contextmanager
    def offloading(self, shared: Iterable[Tensor], *, is_whole: bool) -> Iterator[None]:
        """Offload the tensors that autograd saves inside the block, the forward pass of a layer.

        Args:
            shared: inputs that all layers save; they stay on the GPU.
            is_whole: True if the layer saves all activations, not only its input.
        """
        turn = self.current.num_turns
        self.current.num_turns += 1
        if is_whole:
            self._wait_for_whole(0 if self.saves_memory else _AHEAD)
            self.current.whole.add(turn)
        elif len(self._in_flight) > _LAYERS_AHEAD:
            self._wait_for_oldest()
        self._turn = turn
        self._shared = {tensor.untyped_storage().data_ptr() for tensor in shared}
        self._copied, self._leaving, self._layer_bytes = {}, [], 0
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._copied = {}
        self.max_layer_bytes = max(self.max_layer_bytes, self._layer_bytes)
        if self._leaving:
            self.current.order.append(turn)
            self._in_flight.append((self.current, turn, self._copies.record(), self._leaving))
            self._leaving = []

    def _wait_for_whole(self, num_whole: int) -> None:
        """Release tensors until copies of at most `num_whole` fully offloaded layers remain."""
        while sum(turn in batch.whole for batch, turn, _, _ in self._in_flight) > num_whole:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, _, event, _ = self._in_flight[0]
        self._copies.block_compute(event)
        self._in_flight.popleft()

    def _pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        # Scalars on the CPU and sparse tensors are rare and small: they stay.
        if tensor.device.type != self._device.type or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        num_bytes = tensor.numel() * tensor.element_size()
        pointer = storage.data_ptr()
        # A view of a larger storage stays: offloading it would not free the storage.
        if (
            num_bytes < self._min_bytes
            or num_bytes != storage.nbytes()
            or pointer in self._fixed
            or pointer in self._shared
        ):
            return tensor
        # Several operations may save one tensor. In-place operations change its version.
        key = (pointer, tensor._version, tensor.shape, tensor.stride())
        known = self._copied.get(key)
        if known is not None:
            known.num_uses += 1
            return known
        self._layer_bytes += num_bytes
        batch = self.current
        host = batch.region.allocate(num_bytes)
        if host is None:
            return tensor
        # Flat in the order of the storage, so that the bytes can be viewed as uint8 without a copy.
        whole = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._has_copied = True
        self._copies.wait_for_compute()
        with self._copies.copying():
            host.copy_(whole.view(torch.uint8), non_blocking=True)
        offloaded = _OffloadedTensor(
            batch, self._turn, host, tensor.dtype, tuple(tensor.shape), tensor.stride()
        )
        # Its memory must stay allocated until the copy has ended.
        self._leaving.append(whole)
        self._copied[key] = offloaded
        if not batch.tensors:
            self._batches.append(batch)
        batch.tensors.setdefault(self._turn, []).append(offloaded)
        return offloaded

    def _unpack(self, saved: Tensor | _OffloadedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.turn in saved.batch.order:
            self._await_turn(saved.batch, saved.turn)
        assert saved.back is not None
        restored = saved.back.view(saved.dtype).as_strided(saved.shape, saved.stride)
        # Freed at the last use: several operations may have saved this tensor.
        saved.num_uses -= 1
        if not saved.num_uses:
            saved.back = None
        return restored

    def start_backward(self, batch: OffloadedBatch | None = None) -> None:
        """Start to prefetch the tensors that the backward pass of a micro-batch needs first.

        Args:
            batch: the micro-batch; None for the current one.
        """
        while self._in_flight:
            self._wait_for_oldest()
        self._fetch_ahead(self.current if batch is None else batch)

    def _await_turn(self, batch: OffloadedBatch, turn: int) -> None:
        """Make a turn's tensors available and prefetch those of the next turns."""
        while self._in_flight:
            self._wait_for_oldest()
        if turn not in batch.arrived:
            self._fetch(batch, turn)
        self._copies.block_compute(batch.arrived[turn])
        # The backward pass comes in reverse order, so later turns are done.
        del batch.order[batch.order.index(turn) :]
        self._fetch_ahead(batch)

    def _fetch_ahead(self, batch: OffloadedBatch) -> None:
        nearest = batch.order[: -_LAYERS_AHEAD - 1 : -1]
        if self.saves_memory:
            near = nearest[1:_WHOLE_AHEAD]
            nearest = nearest[:1] + [other for other in near if other in batch.whole]
        for other in nearest:
            if other not in batch.arrived:
                self._fetch(batch, other)
            if other in batch.whole:
                break

    def _fetch(self, batch: OffloadedBatch, turn: int) -> None:
        """Start to copy a turn's tensors back to the GPU."""
        pairs = []
        for offloaded in batch.tensors[turn]:
            # Allocated on the compute stream, where it is also freed.
            offloaded.back = torch.empty_like(offloaded.host, device=self._device)
            pairs.append((offloaded.back, offloaded.host))
        self._copies.wait_for_compute()
        with self._copies.copying():
            for back, host in pairs:
                back.copy_(host, non_blocking=True)
        batch.arrived[turn] = self._copies.record()
