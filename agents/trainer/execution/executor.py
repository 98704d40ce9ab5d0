"""Forward and backward passes of one rank over its slice of a batch.

The loss is a SUM (see `objectives`), so the sums over micro-batches and ranks add up exactly to the
sum over the batch. The division by the batch's weight follows the all-reduce.

When memory runs out, the slice is repeated with less: first without weights in spare memory, then
with half the tokens per micro-batch, down to single examples, then with activations recomputed in a
quarter, half or all of the layers. The batch stays the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from agents.errors import ExpectedError, first_line
from agents.shared.micro_shapes import group_examples
from agents.trainer.data.examples import BatchPart
from agents.trainer.execution.cuda_graphs import GraphReplayer
from agents.trainer.execution.gpu_pressure import GpuPressure
from agents.trainer.execution.layers import LayerStack
from agents.trainer.execution.shapes import ShapeGrid
from agents.trainer.model import fused_linear
from agents.trainer.model.micro_batch import MicroBatch, build_micro_batch
from agents.trainer.model.model import TrainedModel
from agents.trainer.objectives.objective import Objective
from agents.trainer.optim.flat_parameters import TrainedParameters
from agents.trainer.rank.device import SAVE_MEMORY_HINT, is_out_of_memory, name_kind

Warn = Callable[[str, str], None]


class GradientOverlap(Protocol):
    """Sends gradients to the other ranks while the last backward pass still runs."""

    def begin(self) -> None:
        """Prepare to compute the gradients of a step, for the first time or again."""

    def arm(self) -> bool:
        """Announce that the next backward pass is the last; return whether it overlaps sends."""


class Executor:
    """Adds the gradients of examples to the flat buffer, and the objective's sums to `sums`."""

    def __init__(  # noqa: PLR0913 - the parts of a pass
        self,
        model: TrainedModel,
        flat: TrainedParameters,
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
        # Half-precision copies of adapters, made once per step instead of in every pass.
        self._copies = fused_linear.collect_copies(model.module, model.stream)
        self.grid: ShapeGrid | None = None
        """Shapes of micro-batches that repeat; None if passes cannot be recorded."""
        self.replayer: GraphReplayer | None = None
        """Replayer of micro-batches in these shapes; None if passes cannot be recorded."""
        self.is_repeating = False
        """True if micro-batches are padded to these shapes and replayed."""
        self.shortage = ""
        """First line of the error of the last pass if memory ran out; else empty."""
        # Loss scale in the gradients, a scalar on the device; None for 1.
        self._gradient_scale: Tensor | None = None
        self.sums = torch.zeros(len(objective.sums), dtype=torch.float64, device=device)
        """`sums` of the objective over this rank's examples; see `objectives`."""

    @property
    def recomputed_share(self) -> float:
        """Fraction of the decoder layers that recompute their activations, 0 to 1."""
        return self.layers.plan.num_recomputed / max(1, self.layers.num_layers)

    @property
    def held_bytes(self) -> int:
        """GPU memory held by CUDA graphs between micro-batches, in bytes."""
        return self.replayer.held_bytes if self.replayer is not None else 0

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of later passes by a factor: the loss scale of fp16."""
        if self._gradient_scale is None:
            # A tensor that is filled in place: CUDA graphs read it at a fixed address.
            self._gradient_scale = torch.ones((), dtype=torch.float32, device=self._device)
        self._gradient_scale.fill_(factor)

    @property
    def gradient_scale(self) -> Tensor | None:
        """Loss scale in the gradients, a scalar on the device; None for 1."""
        return self._gradient_scale

    @property
    def objective(self) -> Objective:
        """Objective of the passes."""
        return self._objective

    @property
    def holds_gradients(self) -> bool:
        """True if the gradients of a micro-batch are kept until its end and added in bulk."""
        return self._flat.adds_in_bulk

    def begin_batch(self) -> None:
        """Reset gradients, sums and the layers' copies of weights."""
        self._flat.zero_gradients()
        self.sums.zero_()
        self._copies.refresh()

    def end_batch(self) -> None:
        """Release the memory of a batch's passes, also after an error."""
        self._model.clock.clear()
        self.layers.end()

    def beat(self) -> None:
        """Report that this rank is alive, in the middle of a step."""
        self._beat()

    @property
    def loss_sum(self) -> Tensor:
        """Sum of the losses over this rank's examples."""
        return self.sums[0]

    def add_gradients(self, part: BatchPart, overlap: GradientOverlap | None = None) -> None:
        """Compute the gradients of a slice, which may be empty, from zero.

        With an `overlap` the last backward pass starts to sum the gradients over the ranks; the
        caller waits for the sums.

        Raises:
            ExpectedError: a single example does not fit into memory.
        """
        while True:
            groups = self._group(part)
            if self._try_groups(part, groups, overlap):
                break
            self._reduce_memory(part, groups)
        self.make_room_for_graphs()

    def try_gradients(self, part: BatchPart) -> bool:
        """Run the passes once with the current settings; return False if memory ran out.

        The memory of a failed pass is free afterwards.
        """
        if self._try_groups(part, self._group(part), None):
            return True
        self.release_memory()
        return False

    def release_memory(self) -> None:
        """Return unused memory to the driver, such as the remains of a failed pass."""
        # Tracebacks and closures of a failed pass form cycles that hold its tensors.
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _group(self, part: BatchPart) -> list[list[int]]:
        lengths = [example.num_tokens for example in part.examples]
        return group_examples(lengths, self.micro_tokens, is_filled=self._shapes is not None)

    def _try_groups(
        self, part: BatchPart, groups: list[list[int]], overlap: GradientOverlap | None
    ) -> bool:
        """Run the passes; return False if memory ran out.

        The caller frees memory only after this frame is gone, since its locals hold tensors.
        """
        self.shortage = ""
        if overlap is not None:
            overlap.begin()
        try:
            self.begin_batch()
            for group in groups:
                self._beat()
                picked = part.pick(group)
                batch = self.prepare_micro_batch(picked, dropout=True)
                known = self._objective.look_up(batch, picked.places)
                # Only the last micro-batch completes the gradients, so only its pass may send.
                sends = overlap is not None and group is groups[-1] and overlap.arm()
                # Gradients that are sent during the backward pass cannot be replayed.
                if not sends and self._replay(batch, known):
                    continue
                with self.sharing():
                    self._add(batch, known, is_awaited=sends)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.shortage = first_line(error)
            return False
        finally:
            self.end_batch()
        return True

    @property
    def _shapes(self) -> ShapeGrid | None:
        return self.grid if self.is_repeating else None

    def sharing(self) -> AbstractContextManager[None]:
        """Return a context for work in the memory of the graphs' pool, if one exists.

        Memory allocated inside must not be used after the next pass.
        """
        if self.replayer is None or not self.is_repeating:
            return nullcontext()
        return self.replayer.sharing()

    def _reduce_memory(self, part: BatchPart, groups: list[list[int]]) -> None:
        self.drop_graphs()
        self.release_memory()
        # The limit may be far above the size of any micro-batch, so halving starts at their size.
        most = max(sum(part.examples[i].num_tokens for i in group) for group in groups)
        if self.layers.filled_bytes:
            self._empty_layers("Memory ran out")
        elif any(len(group) > 1 for group in groups):
            self.micro_tokens = min(most, self.micro_tokens) // 2
            self._warn(
                f"Memory ran out; training continues with at most {self.micro_tokens:,} tokens at "
                "once. The batch stays the same.",
                "",
            )
        elif not self.recompute_more():
            first = "" if self._may_recompute else "set recompute: auto, "
            hint = f"{first}lower sequence_tokens, or {SAVE_MEMORY_HINT}"
            where = name_kind(self._device)
            raise ExpectedError(
                f"Memory ran out on {where} with a single example of {most} tokens.",
                hint[0].upper() + hint[1:],
            )

    def recompute_more(self) -> bool:
        """Recompute in more layers and warn; return False if that is impossible."""
        if not self._may_recompute or not self.layers.recompute_more():
            return False
        self._warn(
            "Memory ran out; training continues with activations recomputed in "
            f"{self.layers.plan.num_recomputed} of {self.layers.num_layers} layers, which is "
            "slower and needs less memory.",
            "",
        )
        return True

    def offload_inputs(self) -> bool:
        """Offload the inputs of recomputing layers and warn; return False if that is impossible."""
        if not self.layers.offload_inputs():
            return False
        self._warn(
            "Memory ran out; training continues with the inputs of layers in the PC's RAM "
            "between both passes, which may be slower.",
            "",
        )
        return True

    def release_memory_under_pressure(self) -> None:
        """Free spare memory that holds weights if other programs need memory of the GPU."""
        if not self.layers.filled_bytes or self._pressure is None:
            return
        if self._pressure.is_high():
            self._empty_layers("Another program needs memory of this GPU")

    def make_room_for_graphs(self) -> bool:
        """Halve the memory of weights if a recording found no room next to them.

        Replays gain more than dequantized weights. All graphs are dropped, and refused shapes may
        be recorded again.

        Returns:
            True if a recording may fit now that did not before.
        """
        if self.replayer is None or not self.replayer.lacks_memory:
            return False
        filled_bytes = self.layers.filled_bytes
        if not filled_bytes:
            return False
        self.drop_graphs()
        self.layers.empty()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        # Half at a time: graphs may need only a part of that memory.
        self.layers.fill(filled_bytes / 2)
        return True

    def _empty_layers(self, why: str) -> None:
        self.drop_graphs()
        self.layers.empty()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            # Journals subtract the dequantized weights from the peak; from now on it has none.
            torch.cuda.reset_peak_memory_stats(self._device)
        costs = (
            "weights dequantized in every pass, which is a little slower"
            if self.layers.stream is None
            else "all layers streamed from host memory, which may be slower"
        )
        self._warn(f"{why}; training continues with {costs}.", "")

    def evaluate(self, part: BatchPart) -> None:
        """Add the examples' sums, from zero, without dropout or gradients."""
        self.sums.zero_()
        self._copies.refresh()
        with torch.no_grad(), self.sharing():
            for group in self._group(part):
                self._beat()
                picked = part.pick(group)
                batch = self.prepare_micro_batch(picked, dropout=False)
                known = self._objective.look_up(batch, picked.places)
                _, sums = self._objective.compute(batch, known, None)
                self.sums += sums

    def drop_graphs(self) -> None:
        """Drop CUDA graphs before other settings are tried or used."""
        if self.replayer is not None:
            self.replayer.reset()

    def prepare_micro_batch(self, part: BatchPart, *, dropout: bool) -> MicroBatch:
        """Return one micro-batch; prepare layers and dropout for it."""
        shapes = self._shapes
        shape = shapes.choose(part.examples, self.micro_tokens) if shapes else None
        batch = build_micro_batch(part.examples, self._device, shape)
        self.layers.begin()
        self._model.clock.clear()
        if dropout:
            self._model.clock.set(part.positions, batch.lengths, batch.num_tokens, self._device)
        return batch

    def _replay(self, batch: MicroBatch, known: Tensor | None) -> bool:
        if self.replayer is None or not self.is_repeating:
            return False
        if self.replayer.try_replay(batch, known, self.layers.plan, self._add_or_release):
            return True
        self.layers.begin()  # drops what a failed recording has offloaded
        return False

    def _add_or_release(self, batch: MicroBatch, known: Tensor | None) -> None:
        """Add the gradients of a micro-batch during a recording.

        If memory runs out, copies in flight must be joined inside the recording, or the memory of
        the graph's pool would never be released.
        """
        try:
            self._add(batch, known)
        except RuntimeError:
            self.layers.begin()
            raise

    def _add(self, batch: MicroBatch, known: Tensor | None, *, is_awaited: bool = False) -> None:
        """Add the gradients and sums of one micro-batch.

        All intermediate state is gone on return: a graph cannot be recorded while an earlier pass
        still holds the nodes that accumulate gradients.
        """
        loss, sums = self._objective.compute(batch, known, self._gradient_scale)
        self.layers.start_backward()
        # Adapters have many small gradients: adding a few hundred per kernel at the end is faster
        # and bit-equal. An overlap needs each of them at once.
        if is_awaited or not self.holds_gradients:
            loss.backward()
        else:
            trained = list(self._flat.parameters.values())
            self._flat.add(torch.autograd.grad(loss, trained, allow_unused=True))
        self.sums += sums
