"""Replay the kernels of micro-batches as CUDA graphs, one graph per repeating shape.

A forward and backward pass over 2,048 tokens of a 7B model launches about 3,600 kernels. A host
that takes 50 us for each is busy for longer than fast cards compute, and a small model leaves any
card waiting. When a shape occurs for the second time, its pass is recorded, and then replayed for
all micro-batches of that shape. The kernels and their order stay the same, so results are
bit-equal.

All recordings, and the passes between them that are launched one by one, share one memory pool. So
they need as much as the largest of them. A recording repeats a pass that has just run and finds its
memory in the pool: requests to the driver during a recording may spoil it. The pool is released
when the graphs are dropped: before other settings are tried, when memory runs out, and when a
recording fails, since torch may consider its pool as recording from then on.

Shape letters as in `micro_batch`.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agents.contract.layer_plan import LayerPlan
from agents.trainer.model.dropout import DropoutClock
from agents.trainer.model.micro_batch import MicroBatch
from agents.trainer.rank.device import is_out_of_memory

# Recordings allowed before any replay.
_MAX_FREE_RECORDINGS = 16
# Number of replays that pay for one more recording, which costs two or three micro-batches.
_MIN_REPLAYS = 8
# Maximum number of graphs. The driver keeps tens of megabytes of kernel arguments for each.
_MAX_GRAPHS = 12

Add = Callable[[MicroBatch, Tensor | None], None]
"""Adds the gradients and sums of a micro-batch, with the looked-up values of its objective, to
tensors with fixed addresses.
"""


class Graph(Protocol):
    """A recorded graph."""

    def replay(self) -> None:
        """Launch the graph."""

    def reset(self) -> None:
        """Release it."""


class Recorder(Protocol):
    """Records passes in a memory pool of their own."""

    @property
    def held_bytes(self) -> int:
        """GPU memory held by the pool between passes, in bytes."""

    def record(self, work: Callable[[], None]) -> Graph:
        """Record the kernels that a function launches, without running them.

        Raises:
            RuntimeError: The function waits for the device, or memory ran out.
        """

    def sharing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose allocations come from the pool."""

    def release(self) -> None:
        """Release the pool's memory; no graph is left."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: Graph
    inputs: list[Tensor]
    """Tensors that the graph reads; later micro-batches are copied into them."""


class GraphReplayer:
    """Replays micro-batches that have the shape of an earlier one.

    Args:
        clock: Holds the dropout keys of the micro-batch, one of the graph's inputs.
        recorder: Records graphs.
    """

    def __init__(self, clock: DropoutClock, recorder: Recorder) -> None:
        self._clock = clock
        self._recorder = recorder
        # Recordings by shape, in the order of their last use.
        self._recorded: OrderedDict[object, _Recorded] = OrderedDict()
        # Shapes of passes that were launched one by one: everything they need is compiled.
        self._seen: set[object] = set()
        # Shapes whose recording failed.
        self._refused: set[object] = set()
        self._num_recorded = 0
        self.num_replayed = 0
        self.lacks_memory = False
        """True if memory ran out in a recording since the last `reset`."""
        self.failure: str | None = None
        """Why passes of this model cannot be recorded; None if no recording has failed."""

    def try_replay(
        self, batch: MicroBatch, known: Tensor | None, plan: LayerPlan, add: Add
    ) -> bool:
        """Replay a micro-batch; return False if nothing was done and the caller has to run it.

        Args:
            batch: the micro-batch.
            known: looked-up values of its objective.
            plan: current modes of the layers. Another plan needs another graph.
            add: function to record.
        """
        shape = self._describe(batch, known, plan)
        recorded = self._recorded.get(shape)
        if recorded is None:
            # The first pass of a shape compiles and tunes kernels, which a recording cannot
            # contain.
            if shape not in self._seen:
                self._seen.add(shape)
                return False
            recorded = self._try_record(shape, batch, known, add)
            if recorded is None:
                return False
        self._recorded.move_to_end(shape)
        for mine, new in zip(recorded.inputs, self._read(batch, known), strict=True):
            if mine is not new:
                mine.copy_(new, non_blocking=True)
        recorded.graph.replay()
        self.num_replayed += 1
        return True

    def sharing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for passes that are launched one by one, in the graphs' memory."""
        return self._recorder.sharing()

    @property
    def num_graphs(self) -> int:
        """Number of recorded shapes."""
        return len(self._recorded)

    @property
    def held_bytes(self) -> int:
        """GPU memory held between passes, in bytes."""
        return self._recorder.held_bytes

    def reset(self) -> None:
        """Drop all graphs, their memory and all counters, before other settings."""
        self._drop_recorded()
        self._seen.clear()
        self._refused.clear()
        self._num_recorded = self.num_replayed = 0
        self.lacks_memory = False

    def _drop_recorded(self) -> None:
        """Drop all graphs and their memory; shapes that occur again are recorded again."""
        for recorded in self._recorded.values():
            recorded.graph.reset()
        self._num_recorded -= len(self._recorded)
        self._recorded.clear()
        self._recorder.release()

    def _describe(self, batch: MicroBatch, known: Tensor | None, plan: LayerPlan) -> object:
        return (
            plan,
            batch.num_tokens,
            # Kernels take the number of segments and their longest one from the host: both are part
            # of the graph.
            len(batch.segments.bounds),
            tuple(batch.segments.host_extent_2.tolist()),
            len(batch.label_N),
            batch.weight_N is None,
            None if known is None else tuple(known.shape),
            self._clock.tokens_BT1 is None,
        )

    def _read(self, batch: MicroBatch, known: Tensor | None) -> list[Tensor]:
        inputs = (
            batch.ids_1M,
            batch.position_1M,
            batch.segments.bounds_S,
            batch.predicted_at_N,
            batch.label_N,
            batch.segment_N,
            batch.weight_N,
            batch.is_real_S,
            known,
            self._clock.tokens_BT1,
        )
        return [tensor for tensor in inputs if tensor is not None]

    def _try_record(
        self, shape: object, batch: MicroBatch, known: Tensor | None, add: Add
    ) -> _Recorded | None:
        paid = _MAX_FREE_RECORDINGS + self.num_replayed // _MIN_REPLAYS
        if shape in self._refused or self._num_recorded >= paid:
            return None
        self._num_recorded += 1
        while len(self._recorded) >= _MAX_GRAPHS:
            _, oldest = self._recorded.popitem(last=False)
            oldest.graph.reset()
        graph = None
        try:
            graph = self._recorder.record(lambda: add(batch, known))
        except RuntimeError as error:  # out of memory, or the model synchronizes with the device
            traceback.print_exc()
            if is_out_of_memory(error):
                self.lacks_memory = True
            else:
                self.failure = str(error).strip().split("\n", 1)[0][:200]
            print("Recording failed; kernels are launched one by one.", file=sys.stderr)
            self._refused.add(shape)
        if graph is None:
            gc.collect()  # frees intermediate tensors that the traceback held
            self._drop_recorded()
            return None
        recorded = self._recorded[shape] = _Recorded(graph, self._read(batch, known))
        return recorded


class CudaRecorder:
    """Records CUDA graphs that share a pool of the caching allocator.

    Passes must run on a non-default stream, since CUDA cannot record the default one, and the
    allocator keeps separate memory per stream.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: torch.cuda.MemPool | None = None
        self._held_bytes: int | None = 0

    @property
    def held_bytes(self) -> int:
        """See `Recorder`."""
        if self._held_bytes is None:
            segments = self._pool.snapshot() if self._pool is not None else []
            self._held_bytes = sum(segment["total_size"] for segment in segments)
        return self._held_bytes

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """See `Recorder`. Backward passes run in the caller's thread, which owns the pool."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        self._held_bytes = None
        with (
            torch.cuda.use_mem_pool(self._pool, self._device),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield

    def record(self, work: Callable[[], None]) -> Graph:
        """See `Recorder`."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        self._held_bytes = None
        return CudaGraph(work, self._pool, self._device)

    def release(self) -> None:
        """See `Recorder`."""
        self._pool, self._held_bytes = None, 0
        torch.cuda.empty_cache()


class CudaGraph:
    """The kernels that `work` launches on the current stream, recorded as a CUDA graph.

    Args:
        work: function to record. It must not wait for the device.
        pool: memory of the graph.
        device: the GPU.

    Raises:
        RuntimeError: `work` waits for the device, or memory ran out.
    """

    def __init__(
        self, work: Callable[[], None], pool: torch.cuda.MemPool, device: torch.device
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        # Not `torch.cuda.graph`: it empties the cache first, and after a failed recording it leaves
        # the stream and the allocator in recording mode, which leaks the memory. "thread_local":
        # other threads may use the GPU at the same time, such as a checkpoint's copy.
        try:
            self._graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        except RuntimeError:
            _stop_allocating(device, pool)
            raise
        failed: RuntimeError | None = None
        try:
            with torch.autograd.set_multithreading_enabled(False):
                work()
        except RuntimeError as error:
            # The capture is ended in any case, or the stream would stay in recording mode.
            failed = error
        try:
            self._graph.capture_end()
        except RuntimeError as error:
            failed = failed or error
            _stop_allocating(device, pool)
        if failed is not None:
            self._graph.reset()
            raise failed

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()

    def reset(self) -> None:
        """Wait for the last replay, then release the graph."""
        torch.cuda.synchronize()  # the allocator does not know that a replay still uses it
        self._graph.reset()


def _stop_allocating(device: torch.device, pool: torch.cuda.MemPool) -> None:
    """End the allocator's part of a recording, which torch skips if CUDA's part is invalid.

    Pinned memory has no such function: its pool cannot record again.
    """
    with contextlib.suppress(RuntimeError):  # raised if torch has ended it
        torch._C._cuda_endAllocateToPool(device.index or 0, pool.id)
        torch._C._cuda_releasePool(device.index or 0, pool.id)
