"""Keep what the backward pass needs of some layers in host memory while it is not needed.

What a layer saves is copied to pinned memory on a stream of its own while the next layers compute,
and fetched back one layer ahead of the backward pass, so that on most cards it costs no time: an
RTX 3060 makes about 3 GB/s of a 7B model's activations, and PCIe 4.0 takes 25 GB/s. The numbers
are copies; nothing depends on what was kept where.

No memory is given back before its copy has ended: the computing stream waits for the copy of the
layer before last, and only then lets go of the tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_CHUNK_BYTES = 1 << 29
"""Pinned memory is taken in pieces of this size; the allocator of torch rounds to powers of two."""
_MIN_BYTES = 1 << 18
"""Smaller tensors stay on the GPU."""
_ALIGNED = 512
_AHEAD = 1
"""Whole layers that may still be on their way out when the next one starts."""
_LAYERS_AHEAD = 4
"""Layers of any kind that may be when one starts that moves its input only, and that are fetched
ahead of the backward pass."""
_WHOLE_AHEAD = 2
"""Of them a whole one is fetched so far ahead where memory is spared, and inputs one ahead."""


@dataclass(slots=True)
class _OffloadedTensor:
    """A tensor that was saved for the backward pass, now in host memory."""

    layer: int
    host: Tensor
    """The bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    num_uses: int = 1
    back: Tensor | None = None
    """The bytes again on the GPU."""


class Arena:
    """Pinned host memory, given out in order and taken back all at once."""

    def __init__(self, capacity_bytes: int, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._max_chunks = capacity_bytes // _CHUNK_BYTES
        self._chunks: list[Tensor] = []
        self._place = 0
        """Where the next piece begins, over all chunks."""

    @property
    def capacity_bytes(self) -> int:
        """How much can be given out."""
        return self._max_chunks * _CHUNK_BYTES

    def clear(self) -> None:
        """Take everything back."""
        self._place = 0

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Return a piece (num_bytes,) of uint8; None: there is no room."""
        chunk, offset = divmod(self._place, _CHUNK_BYTES)
        if offset + num_bytes > _CHUNK_BYTES:
            chunk, offset = chunk + 1, 0
        if num_bytes > _CHUNK_BYTES or not self._ensure(chunk):
            return None
        self._place = chunk * _CHUNK_BYTES + offset + -(-num_bytes // _ALIGNED) * _ALIGNED
        return self._chunks[chunk][offset : offset + num_bytes]

    def _ensure(self, chunk: int) -> bool:
        if chunk < len(self._chunks):
            return True
        if chunk >= self._max_chunks:
            return False
        try:
            whole = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._chunks.append(whole)
        except RuntimeError:  # the host has no more memory that can be pinned
            self._max_chunks = len(self._chunks)
            return False
        return True


class CopyStream:
    """A stream of copies beside the one that computes; without a GPU there is just one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def wait_for_compute(self) -> None:
        """Let later copies wait for what the device computes until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copying(self) -> AbstractContextManager[object]:
        """Return a block whose copies go over this line."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def record(self) -> torch.cuda.Event | None:
        """Return what tells that all copies until now have ended."""
        return None if self._stream is None else self._stream.record_event()

    def block_compute(self, event: torch.cuda.Event | None) -> None:
        """Let the device compute on only when these copies have ended."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


class Offloader:
    """Moves what chosen layers save, out in the forward pass and back in the backward pass.

    Args:
        device: the GPU; on a CPU the same is done for nothing but to try it.
        fixed: parameters and buffers, which stay where they are.
        most_bytes: of host memory.
        least_bytes: smaller tensors stay on the GPU.
    """

    def __init__(
        self,
        device: torch.device,
        fixed: Iterable[Tensor],
        capacity_bytes: int,
        min_bytes: int = _MIN_BYTES,
    ) -> None:
        self._device = device
        self.arena = Arena(capacity_bytes, is_pinned=device.type == "cuda")
        self._fixed = {tensor.untyped_storage().data_ptr() for tensor in fixed}
        self._min_bytes = min_bytes
        self._copies = CopyStream(device)
        self._shared: set[int] = set()
        self._layer = -1
        self._order: list[int] = []
        """Layers that have moved something and are not back, in the order of the forward pass."""
        self._whole: set[int] = set()
        self._offloaded: dict[int, list[_OffloadedTensor]] = {}
        self._copied: dict[tuple[int, int, torch.Size, tuple[int, ...]], _OffloadedTensor] = {}
        self._leaving: list[Tensor] = []
        self._in_flight: deque[tuple[int, torch.cuda.Event | None, list[Tensor]]] = deque()
        self._arrived: dict[int, torch.cuda.Event | None] = {}
        self._layer_bytes = 0
        self.max_layer_bytes = 0
        """The most that one layer could move since `begin`, whether there was room or not."""
        self.saves_memory = False
        """Whether less is fetched ahead, and only one whole layer is on its way at once: enough
        where few layers move among others that recompute, which take their time."""

    def begin(self) -> None:
        """Get ready for a micro-batch."""
        self.release()
        self.max_layer_bytes = 0

    def release(self) -> None:
        """Let go of everything of a micro-batch, which may have ended in an error."""
        self._copies.block_compute(self._copies.record())
        self._in_flight.clear()
        self._leaving, self._order, self._whole = [], [], set()
        self._offloaded, self._copied, self._arrived = {}, {}, {}
        self._copies.wait_for_compute()
        self.arena.clear()

    @contextmanager
    def offloading(self, layer: int, shared: Iterable[Tensor], *, is_whole: bool) -> Iterator[None]:
        """Move out what is saved inside the block.

        Args:
            layer: number of the layer; layers come in the order of the forward pass.
            shared: inputs that all layers save, which stay.
            is_whole: whether it keeps all of its activations, and not just its input.
        """
        if is_whole:
            self._wait_for_whole(0 if self.saves_memory else _AHEAD)
            self._whole.add(layer)
        elif len(self._in_flight) > _LAYERS_AHEAD:
            self._wait_for_oldest()
        self._layer = layer
        self._shared = {tensor.untyped_storage().data_ptr() for tensor in shared}
        self._copied, self._leaving, self._layer_bytes = {}, [], 0
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._copied = {}
        self.max_layer_bytes = max(self.max_layer_bytes, self._layer_bytes)
        if self._leaving:
            self._order.append(layer)
            self._in_flight.append((layer, self._copies.record(), self._leaving))
            self._leaving = []

    def _wait_for_whole(self, num_whole: int) -> None:
        """Wait until so many whole layers are under way, and let go of the tensors of the rest."""
        while sum(layer in self._whole for layer, _, _ in self._in_flight) > num_whole:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, event, _ = self._in_flight[0]
        self._copies.block_compute(event)
        self._in_flight.popleft()

    def _pack(self, tensor: Tensor) -> Tensor | _OffloadedTensor:
        if tensor.device.type != self._device.type or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        num_bytes = tensor.numel() * tensor.element_size()
        pointer = storage.data_ptr()
        if (
            num_bytes < self._min_bytes
            or num_bytes != storage.nbytes()
            or pointer in self._fixed
            or pointer in self._shared
        ):
            return tensor
        key = (pointer, tensor._version, tensor.shape, tensor.stride())
        known = self._copied.get(key)
        if known is not None:
            known.num_uses += 1
            return known
        self._layer_bytes += num_bytes
        host = self.arena.allocate(num_bytes)
        if host is None:
            return tensor
        whole = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._copies.wait_for_compute()
        with self._copies.copying():
            host.copy_(whole.view(torch.uint8), non_blocking=True)
        offloaded = _OffloadedTensor(
            self._layer, host, tensor.dtype, tuple(tensor.shape), tensor.stride()
        )
        self._leaving.append(whole)
        self._copied[key] = offloaded
        self._offloaded.setdefault(self._layer, []).append(offloaded)
        return offloaded

    def _unpack(self, saved: Tensor | _OffloadedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.layer in self._order:
            self._await_layer(saved.layer)
        assert saved.back is not None
        found = saved.back.view(saved.dtype).as_strided(saved.shape, saved.stride)
        saved.num_uses -= 1
        if not saved.num_uses:
            saved.back = None
        return found

    def start_backward(self) -> None:
        """Begin to fetch what the backward pass needs first: the forward pass has ended."""
        while self._in_flight:
            self._wait_for_oldest()
        self._fetch_ahead()

    def _await_layer(self, layer: int) -> None:
        """Wait for what the layer has saved, and fetch the next ones up to a whole one."""
        while self._in_flight:
            self._wait_for_oldest()
        if layer not in self._arrived:
            self._fetch(layer)
        self._copies.block_compute(self._arrived[layer])
        del self._order[self._order.index(layer) :]
        self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        nearest = self._order[: -_LAYERS_AHEAD - 1 : -1]
        if self.saves_memory:
            near = nearest[1:_WHOLE_AHEAD]
            nearest = nearest[:1] + [other for other in near if other in self._whole]
        for other in nearest:
            if other not in self._arrived:
                self._fetch(other)
            if other in self._whole:
                break

    def _fetch(self, layer: int) -> None:
        """Begin to copy back what the layer has saved."""
        pairs = []
        for offloaded in self._offloaded[layer]:
            offloaded.back = torch.empty_like(offloaded.host, device=self._device)
            pairs.append((offloaded.back, offloaded.host))
        self._copies.wait_for_compute()
        with self._copies.copying():
            for back, host in pairs:
                back.copy_(host, non_blocking=True)
        self._arrived[layer] = self._copies.record()
