"""Offload the saved activations of some layers to host memory until the backward pass.

A layer's saved tensors are copied to pinned memory on a separate stream while the next layers
compute, and prefetched one layer ahead of the backward pass. On most cards this costs no time: an
RTX 3060 produces about 3 GB/s of activations for a 7B model, and PCIe 4.0 transfers 25 GB/s. The
copies are exact, so no result depends on what was offloaded.

No memory is released before its copy has ended: the compute stream waits for the copy of the
second-to-last layer before the tensors are dropped.

A stage of a pipeline has passed several micro-batches forward and not yet back. What is offloaded
of each is kept apart, so that their backward passes may come in any order. Where a class takes one
segment at a time, a micro-batch goes through each layer several times: what is offloaded is kept by
turn, a pass of one layer, and not by layer.
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
# Smaller tensors stay on the GPU: a copy of them costs more than it frees.
_MIN_BYTES = 1 << 18
_ALIGNED = 512
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
    """Pinned host memory in chunks, which regions take and give back.

    Args:
        capacity_bytes: limit of all chunks together.
        is_pinned: whether the memory is pinned, as copies to a GPU want it.
        chunk_bytes: size of a chunk, and the limit of one tensor.
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
        """Return a chunk (chunk_bytes,) of uint8, or None if there is no more."""
        if self._free:
            return self._free.pop(0)
        if self._num_chunks >= self._max_chunks:
            return None
        try:
            whole = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        except RuntimeError as error:  # the host has no more memory that can be pinned
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
        """Take chunks back for others."""
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
    """What is offloaded of one micro-batch."""

    region: Region
    num_turns: int = 0
    """Forward passes of layers so far."""
    order: list[int] = field(default_factory=list)
    """Turns with offloaded tensors not yet prefetched, in the order of the forward pass."""
    whole: set[int] = field(default_factory=set)
    """Turns that offload all activations, rather than only their input."""
    tensors: dict[int, list[_OffloadedTensor]] = field(default_factory=dict)
    """Offloaded tensors of each turn."""
    arrived: dict[int, torch.cuda.Event | None] = field(default_factory=dict)
    """Copies of the turns whose tensors are back, or on their way."""

    def clear(self) -> None:
        """Free its host memory, and what is back on the GPU and was not used."""
        self.region.clear()
        self.tensors.clear()


class Offloader:
    """Offloads the saved tensors of selected layers and prefetches them for the backward pass.

    Args:
        device: The GPU. On a CPU the same steps run without effect, for tests.
        fixed: Parameters and buffers, which are never offloaded.
        capacity_bytes: Limit of pinned host memory.
        min_bytes: Smaller tensors stay on the GPU; None: those of which a copy costs more than it
            frees, on a CPU none.
        holds_several: Whether several micro-batches are between their passes at once.
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
            # Each micro-batch has chunks of its own.
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
        """The micro-batch whose forward pass was begun last."""
        # Those of which something is in host memory.
        self._batches: list[OffloadedBatch] = []
        # Whether anything was copied since `release`.
        self._has_copied = False
        self._copied: dict[tuple[int, int, torch.Size, tuple[int, ...]], _OffloadedTensor] = {}
        self._leaving: list[Tensor] = []
        self._in_flight: deque[
            tuple[OffloadedBatch, int, torch.cuda.Event | None, list[Tensor]]
        ] = deque()
        self._layer_bytes = 0
        self.max_layer_bytes = 0
        """Largest number of offloadable bytes of one layer since `begin`, with or without room."""
        self.saves_memory = False
        """Whether to prefetch less and to have one fully offloaded layer in flight at a time.

        Enough where few layers are offloaded between recomputed ones, whose second forward pass
        hides the copies.
        """

    def begin(self) -> None:
        """Prepare for a micro-batch; the one before is dropped, unless several are held."""
        if not self._holds_several:
            self.release()
        self.current = OffloadedBatch(Region(self.arena))
        self.max_layer_bytes = 0

    def release(self) -> None:
        """Drop everything that belongs to any micro-batch, also after an error."""
        self._settle()
        for batch in self._batches:
            batch.clear()
        self._batches = []
        self._has_copied = False

    def drop(self, batch: OffloadedBatch) -> None:
        """Drop what belongs to a micro-batch, after its backward pass or an error."""
        if batch not in self._batches:
            return
        if batch.order:  # something has not come back, and may not even have left
            self._settle()
        batch.clear()
        self._batches.remove(batch)

    def _settle(self) -> None:
        """Drop tensors on their way out, after the copies."""
        # First the compute stream waits for the copies, then the copies for the compute stream:
        # memory freed here may be reused at once by either. Without copies there is nothing to wait
        # for, and while CUDA records, a stream that is not part of it must not be waited for: that
        # would spoil the recording.
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
            shared: Inputs that all layers save; they stay on the GPU.
            is_whole: Whether the layer saves all activations, rather than only its input.
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
        """Release tensors until copies of at most `num_whole` fully offloaded layers are left."""
        while sum(turn in batch.whole for batch, turn, _, _ in self._in_flight) > num_whole:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, _, event, _ = self._in_flight[0]
        self._copies.block_compute(event)
        self._in_flight.popleft()

    def _pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
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
        # Several operations may save one tensor. The version changes with in-place operations.
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
        whole = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._has_copied = True
        self._copies.wait_for_compute()
        with self._copies.copying():
            host.copy_(whole.view(torch.uint8), non_blocking=True)
        offloaded = _OffloadedTensor(
            batch, self._turn, host, tensor.dtype, tuple(tensor.shape), tensor.stride()
        )
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
        found = saved.back.view(saved.dtype).as_strided(saved.shape, saved.stride)
        saved.num_uses -= 1
        if not saved.num_uses:
            saved.back = None
        return found

    def start_backward(self, batch: OffloadedBatch | None = None) -> None:
        """Start to prefetch what the backward pass of a micro-batch needs first.

        Args:
            batch: the micro-batch; None: the current one.
        """
        while self._in_flight:
            self._wait_for_oldest()
        self._fetch_ahead(self.current if batch is None else batch)

    def _await_turn(self, batch: OffloadedBatch, turn: int) -> None:
        """Make a turn's tensors available and prefetch those of the next ones."""
        while self._in_flight:
            self._wait_for_oldest()
        if turn not in batch.arrived:
            self._fetch(batch, turn)
        self._copies.block_compute(batch.arrived[turn])
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
            offloaded.back = torch.empty_like(offloaded.host, device=self._device)
            pairs.append((offloaded.back, offloaded.host))
        self._copies.wait_for_compute()
        with self._copies.copying():
            for back, host in pairs:
                back.copy_(host, non_blocking=True)
        batch.arrived[turn] = self._copies.record()
