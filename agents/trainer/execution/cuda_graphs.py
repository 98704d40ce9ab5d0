"""Start the thousands of kernels of a micro-batch with one call, where the last one was alike.

A pass over one sequence of 2,048 tokens through a 7B model is some 3,600 kernels; a host that takes
50 microseconds for each is busy for longer than the fastest cards compute. Where micro-batches have
the same shape one after the other, as long texts cut to `sequence_tokens` have, the second is
recorded as a CUDA graph and it and those behind it are replayed. The kernels are the same ones in
the same order, so no bit of a result depends on it.

A graph holds its memory until it is dropped: before a micro-batch of another shape, before an
evaluation, and before other settings are tried. Where that happens too often, nothing is recorded
any more.

Shape letters as in `micro`.
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

_MAX_FREE_RECORDINGS = 2
_MIN_REPLAYS = 8
"""For each recording beyond the free ones: it takes about as long as two or three micro-batches."""

Add = Callable[[MicroBatch], None]
"""Adds the gradients and sums of a micro-batch to tensors that stay where they are."""


class Graph(Protocol):
    """What was recorded."""

    held_bytes: int
    """Of the GPU's memory, beside what is allocated by the ordinary way."""

    def replay(self) -> None:
        """Start it."""

    def reset(self) -> None:
        """Let go of its memory."""


Record = Callable[[Callable[[], None]], Graph]
"""Records what a function starts, without doing it."""


class GraphReplayer:
    """Replays micro-batches that have the shape of the one before.

    Args:
        clock: names the tokens of the micro-batch to the dropouts.
        record: how.
    """

    def __init__(self, clock: DropoutClock, record: Record) -> None:
        self._clock = clock
        self._record = record
        self._graph: Graph | None = None
        self._shape: object = None
        """Of the last micro-batch."""
        self._inputs: list[Tensor] = []
        """What the graph reads."""
        self._num_recorded = 0
        self.num_replayed = 0
        self._refused: object = None
        """The shape that could not be recorded."""

    def try_replay(self, batch: MicroBatch, plan: LayerPlan, add: Add) -> bool:
        """Do what `add` does with the micro-batch; False: it was not done, and has to be.

        Args:
            plan: what the layers do now.
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
        """Memory of the GPU that is held between the replays."""
        return self._graph.held_bytes if self._graph is not None else 0

    def drop(self) -> None:
        """Let go of what was recorded, and of its memory."""
        if self._graph is None:
            return
        self._graph.reset()
        self._graph, self._inputs = None, []

    def reset(self) -> None:
        """Drop what was recorded, and begin anew with other settings."""
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
            print("Micro-batches are started kernel by kernel, as ever.", file=sys.stderr)
            self._refused = self._shape
        if self._graph is None:
            gc.collect()  # the error held what was made on the way
            torch.cuda.empty_cache()
            return False
        self._inputs = self._read(batch)
        return True


class CudaGraph:
    """What `work` starts on the GPU, recorded as a CUDA graph.

    Args:
        spare_bytes: how many have to be left to this process, as for the optimizer.

    Raises:
        RuntimeError: it waits for the device, or memory ran out.
    """

    def __init__(
        self, work: Callable[[], None], *, spare_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        before_bytes = torch.cuda.memory_reserved()
        try:
            # Other threads may go on with what they do, such as the writing of a checkpoint.
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
        """Start it."""
        self._graph.replay()

    def reset(self) -> None:
        """Let go of its memory, when what was started last has ended."""
        torch.cuda.synchronize()  # the allocator does not know that a replay still uses it
        self._graph.reset()
        torch.cuda.empty_cache()
