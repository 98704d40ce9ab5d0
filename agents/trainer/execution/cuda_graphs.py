"""Replay the kernels of a micro-batch as a CUDA graph when its shape repeats.

A forward and backward pass over 2,048 tokens of a 7B model launches about 3,600 kernels. A host
that takes 50 us for each is busy for longer than the fastest cards compute. When consecutive
micro-batches have one shape, as long texts cut to `sequence_tokens` do, the second is recorded as
a CUDA graph, then it and the following ones are replayed. The kernels and their order stay the
same, so results are bit-equal.

A graph holds its memory until it is dropped: before a micro-batch of another shape, before an
evaluation, and before other settings are tried. If that happens too often, recording stops.

Shape letters as in `micro_batch`.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from agents.contract.layer_plan import LayerPlan
from agents.trainer.model.dropout import DropoutClock
from agents.trainer.model.micro_batch import MicroBatch
from agents.trainer.rank.device import read_most_bytes

# Recordings allowed before any replay.
_MAX_FREE_RECORDINGS = 2
# Replays that pay for each further recording, which takes as long as two or three micro-batches.
_MIN_REPLAYS = 8

Add = Callable[[MicroBatch], None]
"""Adds the gradients and sums of a micro-batch to tensors whose addresses never change."""


class Graph(Protocol):
    """A recorded graph."""

    held_bytes: int
    """GPU memory held by the graph's private pool, in bytes."""

    def replay(self) -> None:
        """Launch the graph."""

    def reset(self) -> None:
        """Release its memory."""


Record = Callable[[Callable[[], None]], Graph]
"""Records the kernels that a function launches, without running them."""


class GraphReplayer:
    """Replays micro-batches that have the shape of the one before.

    Args:
        clock: Holds the dropout keys of the micro-batch, one of the graph's inputs.
        record: Records a graph.
    """

    def __init__(self, clock: DropoutClock, record: Record) -> None:
        self._clock = clock
        self._record = record
        self._graph: Graph | None = None
        # Shape of the last micro-batch.
        self._shape: object = None
        # Tensors that the graph reads; later micro-batches are copied into them.
        self._inputs: list[Tensor] = []
        self._num_recorded = 0
        self.num_replayed = 0
        # Shape whose recording failed.
        self._refused: object = None

    def try_replay(self, batch: MicroBatch, plan: LayerPlan, add: Add) -> bool:
        """Replay a micro-batch; return False if nothing was done and the caller has to run it.

        Args:
            batch: The micro-batch.
            plan: Current modes of the layers. Another plan needs another graph.
            add: What to record.
        """
        shape = (plan, batch.segments.bounds, batch.lengths, len(batch.label_N))
        if shape != self._shape:
            self.drop()
            self._shape = shape
            return False
        if self._graph is None and not self._try_record(batch, add):
            return False
        assert self._graph is not None
        for mine, new in zip(self._inputs, self._read(batch), strict=True):
            if mine is not new:
                mine.copy_(new, non_blocking=True)
        self._graph.replay()
        self.num_replayed += 1
        return True

    @property
    def held_bytes(self) -> int:
        """GPU memory held between replays, in bytes."""
        return self._graph.held_bytes if self._graph is not None else 0

    def drop(self) -> None:
        """Drop the graph and release its memory."""
        if self._graph is None:
            return
        self._graph.reset()
        self._graph, self._inputs = None, []

    def reset(self) -> None:
        """Drop the graph and all counters, before other settings."""
        self.drop()
        self._shape = self._refused = None
        self._num_recorded = self.num_replayed = 0

    def _read(self, batch: MicroBatch) -> list[Tensor]:
        tokens = self._clock.tokens_BT1
        return [
            batch.ids_1M,
            batch.position_1M,
            batch.segments.bounds_S,
            batch.predicted_at_N,
            batch.label_N,
            batch.segment_N,
            *([] if tokens is None else [tokens]),
        ]

    def _try_record(self, batch: MicroBatch, add: Add) -> bool:
        paid = _MAX_FREE_RECORDINGS + self.num_replayed // _MIN_REPLAYS
        if self._refused == self._shape or self._num_recorded >= paid:
            return False
        self._num_recorded += 1
        try:
            self._graph = self._record(lambda: add(batch))
        except RuntimeError:  # no memory for it, or a model that waits for the device
            traceback.print_exc()
            print("Recording failed; kernels are launched one by one.", file=sys.stderr)
            self._refused = self._shape
        if self._graph is None:
            gc.collect()  # the traceback held the intermediate tensors
            torch.cuda.empty_cache()
            return False
        self._inputs = self._read(batch)
        return True


class CudaGraph:
    """The kernels that `work` launches, recorded as a CUDA graph.

    Args:
        work: What to record. It must not wait for the device.
        spare_bytes: Returns the bytes that must stay free for this process, for the optimizer.

    Raises:
        RuntimeError: `work` waits for the device, or memory ran out.
    """

    def __init__(
        self, work: Callable[[], None], *, spare_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        before_bytes = torch.cuda.memory_reserved()
        try:
            # "thread_local": other threads may use the GPU meanwhile, such as a checkpoint's copy.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                work()
            taken_bytes = torch.cuda.memory_reserved()
            device = torch.device("cuda", torch.cuda.current_device())
            if read_most_bytes(device) - taken_bytes < (spare := spare_bytes()):
                raise torch.OutOfMemoryError(f"less than {spare} bytes would be left")
        except RuntimeError:
            self.reset()
            raise
        self.held_bytes = taken_bytes - before_bytes

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()

    def reset(self) -> None:
        """Wait for the last replay, then release the graph's memory."""
        torch.cuda.synchronize()  # the allocator does not know that a replay still uses it
        self._graph.reset()
        torch.cuda.empty_cache()
