"""Forward and backward passes of one rank over its slice of a batch.

The loss is a SUM (see `objectives`), so sums over micro-batches and ranks add up to the sum over
the batch exactly; the division by the batch's weight comes after the all-reduce.

When memory runs out, the slice is done again in smaller pieces: half the tokens at once, down to
single examples, then with the activations of a quarter, half or all of the layers computed twice.
The batch stays the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from agents.errors import ExpectedError
from agents.trainer.data.examples import Part
from agents.trainer.execution.cuda_graphs import GraphReplayer
from agents.trainer.execution.gpu_pressure import GpuPressure
from agents.trainer.execution.layers import LayerStack
from agents.trainer.model import fused_linear
from agents.trainer.model.micro_batch import MicroBatch, build_micro_batch, group_examples
from agents.trainer.model.model import TrainedModel
from agents.trainer.objectives.objective import LOSS, NUM_SUMS, Objective
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.rank.device import SAVE_MEMORY_HINT, is_out_of_memory

Warn = Callable[[str, str], None]
_MAX_HELD_BYTES = 1 << 28
"""Gradients of one micro-batch that may be held until its end."""


class GradientOverlap(Protocol):
    """Sends gradients to the other ranks while the last backward pass still runs."""

    @property
    def is_armed(self) -> bool:
        """Whether a backward pass now reports each gradient as soon as it is final."""

    def begin(self) -> None:
        """Prepare for an attempt at the gradients of a step: the first one, or a repeat."""

    def arm(self) -> None:
        """Announce that the next backward pass is the last one of this attempt."""


class Executor:
    """Adds the gradients of examples to the flat buffer, and what they sum to to `sums`."""

    def __init__(
        self,
        model: TrainedModel,
        flat: FlatParameters,
        objective: Objective,
        device: torch.device,
        *,
        layers: LayerStack,
        micro_tokens: int,
        may_recompute: bool = True,
        warn: Warn,
        beat: Callable[[], None],
        pressure: GpuPressure | None = None,
    ) -> None:
        self._model = model
        self._flat = flat
        self._objective = objective
        self._device = device
        self._warn = warn
        self._beat = beat
        self._pressure = pressure
        self.micro_tokens = micro_tokens
        self.layers = layers
        self._may_recompute = may_recompute
        self._copies = fused_linear.collect_copies(model.module)
        self.replayer: GraphReplayer | None = None
        """None: every kernel is started by itself."""
        self.gradient_scale = 1.0
        """The gradients are this many times the true ones (fp16)."""
        self.sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
        """What the objective sums over this rank's examples; see `objectives`."""

    @property
    def recomputed_share(self) -> float:
        """The part of the decoder layers that computes its activations twice, 0 to 1."""
        return self.layers.plan.num_recomputed / max(1, self.layers.num_layers)

    @property
    def held_bytes(self) -> int:
        """GPU memory that is held between micro-batches to replay them."""
        return self.replayer.held_bytes if self.replayer is not None else 0

    @property
    def loss_sum(self) -> Tensor:
        """The sum of the losses."""
        return self.sums[LOSS]

    def add_gradients(self, part: Part, overlap: GradientOverlap | None = None) -> None:
        """Start from zero and do the forward and backward passes of a slice, which may be empty.

        With an `overlap` the last backward pass begins to sum the gradients over the ranks; its
        owner waits for the sums.

        Raises:
            ExpectedError: a single example does not fit the memory.
        """
        while True:
            groups = self._group(part)
            if self._try_groups(part, groups, overlap):
                return
            self._reduce_memory(part, groups)

    def try_gradients(self, part: Part) -> bool:
        """Do the passes once, all of `part` as it is cut now; False: memory ran out."""
        return self._try_groups(part, self._group(part), None)

    def _group(self, part: Part) -> list[list[int]]:
        return group_examples([e.num_tokens for e in part.examples], self.micro_tokens)

    def _try_groups(
        self, part: Part, groups: list[list[int]], overlap: GradientOverlap | None
    ) -> bool:
        """Return False when memory ran out. The frame that held the tensors is gone by then."""
        if overlap is not None:
            overlap.begin()
        self._flat.gradients.zero_()
        self.sums.zero_()
        try:
            self._copies.refresh()
            for group in groups:
                self._beat()
                picked = part.pick(group)
                batch = self._prepare_micro_batch(picked, dropout=True)
                if self._replay(batch):
                    continue
                if overlap is not None and group is groups[-1]:
                    overlap.arm()
                is_awaited = overlap is not None and overlap.is_armed
                self._add(batch, picked.places, is_awaited=is_awaited)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self._model.clock.clear()
            self.layers.end()
        return True

    def _reduce_memory(self, part: Part, groups: list[list[int]]) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        most = max(sum(part.examples[i].num_tokens for i in group) for group in groups)
        if self.layers.dequantized_bytes:
            self._drop_dequantized("Memory ran out")
        elif any(len(group) > 1 for group in groups):
            self.micro_tokens = min(most, self.micro_tokens) // 2
            self._warn(
                f"Memory ran out; from now on at most {self.micro_tokens} tokens are computed at "
                "once on this rank. The batch stays the same.",
                "",
            )
        elif self._may_recompute and self.layers.recompute_more():
            num_recomputed = self.layers.plan.num_recomputed
            self._warn(
                f"Memory ran out with a single example; from now on {num_recomputed} of "
                f"{self.layers.num_layers} layers compute their activations twice on this "
                "rank, which is slower and needs less.",
                "",
            )
        else:
            first = "" if self._may_recompute else "set recompute: auto, "
            hint = f"{first}lower sequence_tokens, or {SAVE_MEMORY_HINT}"
            raise ExpectedError(
                f"Memory ran out on {self._device} with a single example of {most} tokens.",
                hint[0].upper() + hint[1:],
            )

    def release_memory_under_pressure(self) -> None:
        """Give other programs the memory of the GPU that they want and this can do without."""
        if not self.layers.dequantized_bytes or self._pressure is None:
            return
        if self._pressure.is_high():
            self._drop_dequantized("Another program takes more memory of this GPU")

    def _drop_dequantized(self, why: str) -> None:
        self.drop_graphs()
        self.layers.drop_dequantized()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)  # they were told apart until now
        self._warn(
            f"{why}; from now on the weights are unpacked for each pass on this rank, which is a "
            "little slower.",
            "",
        )

    def evaluate(self, part: Part) -> None:
        """Start from zero and add what the examples sum to, without dropout or gradients."""
        if self.replayer is not None:
            self.replayer.drop()  # it may need the memory
        self.sums.zero_()
        self._copies.refresh()
        with torch.no_grad():
            for group in self._group(part):
                self._beat()
                picked = part.pick(group)
                batch = self._prepare_micro_batch(picked, dropout=False)
                _, sums = self._objective.compute(batch, picked.places, self.gradient_scale)
                self.sums += sums

    def drop_graphs(self) -> None:
        """Let go of what is replayed, before other settings are tried or used."""
        if self.replayer is not None:
            self.replayer.reset()

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Start every kernel by itself inside the block."""
        self.drop_graphs()
        replayer, self.replayer = self.replayer, None
        try:
            yield
        finally:
            self.replayer = replayer

    def _prepare_micro_batch(self, part: Part, *, dropout: bool) -> MicroBatch:
        """Return one micro-batch, and get layers and dropout ready for it."""
        batch = build_micro_batch(part.examples, self._device)
        self.layers.begin()
        self._model.clock.clear()
        if dropout:
            self._model.clock.set(part.positions, batch.lengths, batch.num_tokens, self._device)
        return batch

    def _replay(self, batch: MicroBatch) -> bool:
        if self.replayer is None:
            return False
        if self.replayer.try_replay(batch, self.layers.plan, self._add_or_release):
            return True
        self.layers.begin()  # what a refused recording has left is of no use outside of it
        return False

    def _add_or_release(self, batch: MicroBatch) -> None:
        """Add the gradients of one micro-batch that is recorded.

        If memory runs out, copies under way have to end inside the recording, or its memory would
        never be given back.
        """
        try:
            self._add(batch, ())
        except RuntimeError:
            self.layers.begin()
            raise

    def _add(self, batch: MicroBatch, places: Sequence[int], *, is_awaited: bool = False) -> None:
        """Add the gradients of one micro-batch and what it sums to.

        Those of adapters are many and small: they are added at the end, a few hundred by one
        kernel, unless an overlap waits for each of them. The sums are the same.

        Whatever is made on the way is gone when this returns: a graph could not be recorded while
        an earlier pass still holds what gathers a parameter's gradients.
        """
        loss, sums = self._objective.compute(batch, places, self.gradient_scale)
        self.layers.start_backward()
        if is_awaited or self._flat.gradients.nbytes > _MAX_HELD_BYTES:
            loss.backward()
        else:
            trained = list(self._flat.parameters.values())
            self._flat.add(torch.autograd.grad(loss, trained, allow_unused=True))
        self.sums += sums
