"""Forward and backward passes of one stage over a batch.

Every stage knows the batch and makes token ids, positions and dropout keys itself, so only features
and their gradients travel. Padding rows stay on their rank.

Shape letters: M tokens of a micro-batch with its padding; R real tokens; H features.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agents.errors import ExpectedError
from agents.trainer.data.examples import BatchPart
from agents.trainer.execution.activation_offload import OffloadedBatch
from agents.trainer.execution.executor import Executor
from agents.trainer.model.micro_batch import MicroBatch
from agents.trainer.model.stage_ends import StageEnds
from agents.trainer.objectives.passing import PassOn
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.parallel.pipeline.order import plan_order
from agents.trainer.parallel.pipeline.transport import Transport
from agents.trainer.rank.device import SAVE_MEMORY_HINT, is_out_of_memory


@dataclass(frozen=True, slots=True)
class _HeldPass:
    """State that the backward pass of a micro-batch needs."""

    entered_MH: Tensor | None
    """Features from the stage before; None in the first stage."""
    output: Tensor
    """Features for the next stage (M, H), or the loss of the last one."""
    num_tokens: int
    offloaded: OffloadedBatch | None
    """Activations in host memory; None if nothing is offloaded."""


class StagePasses:
    """Runs the passes of this rank's stage in the pipeline's order.

    Args:
        executor: executor of the stage's layers.
        flat: trained parameters of these layers.
        stage: ends of this rank's stage.
        transport: messages to and from the neighbors.
        streams: feature rows per token in a message: 2 if the objective also needs the model
            without its adapter.
        in_flight: number of micro-batches that this stage holds at once.
        in_flight_before: that number of the stage before.
    """

    def __init__(
        self,
        executor: Executor,
        flat: FlatParameters,
        stage: StageEnds,
        transport: Transport,
        *,
        streams: int,
        in_flight: int,
        in_flight_before: int,
    ) -> None:
        self._executor = executor
        self._flat = flat
        self._stage = stage
        self._transport = transport
        self._streams = streams
        self._in_flight = in_flight
        self._in_flight_before = in_flight_before
        self._held: dict[int, _HeldPass] = {}

    def add_gradients(self, part: BatchPart, groups: list[list[int]]) -> None:
        """Compute the gradients of a part of a batch, cut into micro-batches, from zero.

        Raises:
            ExpectedError: a micro-batch does not fit into memory.
            PeerLost: another rank is gone.
        """
        picked = [part.pick(group) for group in groups]
        self._begin(picked, is_training=True)
        try:
            self._executor.begin_batch()
            for kind, number in plan_order(len(groups), self._in_flight):
                self._executor.beat()
                if kind == "forward":
                    self._do_forward(number, picked[number])
                else:
                    self._try_backward(number, picked[number])
            self._transport.finish()
        except BaseException:
            self._transport.abandon()
            raise
        finally:
            self._executor.end_batch()
            self._held.clear()

    def evaluate(self, part: BatchPart, groups: list[list[int]]) -> None:
        """Add the objective's sums over a part, from zero, without dropout or gradients."""
        picked = [part.pick(group) for group in groups]
        self._begin(picked, is_training=False)
        self._executor.begin_batch()
        for number, micro in enumerate(picked):
            self._executor.beat()
            with torch.no_grad():
                self._run_forward(number, micro, self._receive(number), dropout=False)
            # No gradient comes back that would prove the arrival of these features.
            self._transport.confirm_features(number - self._in_flight)
        self._transport.finish()

    def _begin(self, picked: list[BatchPart], *, is_training: bool) -> None:
        sizes = [sum(example.num_tokens for example in micro.examples) for micro in picked]
        self._transport.begin(sizes, streams=self._streams, is_training=is_training)

    def _receive(self, number: int) -> Tensor | None:
        return None if self._stage.is_first else self._transport.receive_features(number)

    def _do_forward(self, number: int, part: BatchPart) -> None:
        received = self._receive(number)
        # The stage before starts this pass only after it has received the gradient of an earlier
        # one.
        self._transport.confirm_gradient(number - self._in_flight_before)
        while True:
            try:
                self._held[number] = self._run_forward(number, part, received, dropout=True)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return
            layers = self._executor.layers
            # The failed pass may have offloaded activations already.
            layers.drop(layers.offloaded)
            self._make_room(part)

    def _run_forward(
        self, number: int, part: BatchPart, received: Tensor | None, *, dropout: bool
    ) -> _HeldPass:
        executor = self._executor
        batch = executor.prepare_micro_batch(part, dropout=dropout)
        num_tokens = sum(batch.lengths)
        entered_MH, feeding = self._feed(received, batch, num_tokens)
        with feeding:
            if self._stage.is_last:
                known = executor.objective.look_up(batch, part.places)
                scale = executor.gradient_scale if dropout else None
                output, sums = executor.objective.compute(batch, known, scale)
                executor.sums += sums
            else:
                objective: Any = executor.objective
                assert isinstance(objective, PassOn)
                output, plain_MH = objective.pass_on(batch)
                streams = [rows[:num_tokens] for rows in (output, plain_MH) if rows is not None]
                self._transport.send_features(number, torch.cat(streams))
        return _HeldPass(entered_MH, output, num_tokens, executor.layers.offloaded)

    def _feed(
        self, received: Tensor | None, batch: MicroBatch, num_tokens: int
    ) -> tuple[Tensor | None, Any]:
        """Return the leaf at which the backward pass ends, and the context that feeds it to the
        layers.
        """
        if received is None:
            return None, nullcontext()
        entered, *plain = (_fill(rows, batch.num_tokens) for rows in received.split(num_tokens))
        # A leaf of its own: the gradient of the features ends here and is sent back.
        entered.requires_grad_(torch.is_grad_enabled())
        return entered, self._stage.fed(entered, plain[0] if plain else None)

    def _try_backward(self, number: int, part: BatchPart) -> None:
        """Do a backward pass, which frees its graph and therefore cannot be repeated.

        Raises:
            ExpectedError: it does not fit into memory.
        """
        num_held = len(self._held)
        try:
            self._do_backward(number)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise _lack_memory(num_held, part, is_backward=True) from error

    def _do_backward(self, number: int) -> None:
        held = self._held.pop(number)
        # Copy activations back from host memory while the gradient is still on its way.
        self._executor.layers.start_backward(held.offloaded)
        gradient_MH = None
        if not self._stage.is_last:
            received = self._transport.receive_gradient(number)
            gradient_MH = _fill(received, len(held.output), 0.0).to(held.output.dtype)
        trained = list(self._flat.parameters.values())
        if self._executor.holds_gradients:
            leaves = [] if held.entered_MH is None else [held.entered_MH]
            gradients = torch.autograd.grad(
                held.output, [*leaves, *trained], gradient_MH, allow_unused=True
            )
            entered_MH = gradients[0] if leaves else None
            # The stage before waits for this one: it is sent before the own gradients are added.
            self._send_gradient(number, entered_MH, held.num_tokens)
            self._flat.add(gradients[len(leaves) :])
        else:
            torch.autograd.backward(held.output, gradient_MH)
            if held.entered_MH is not None:
                self._send_gradient(number, held.entered_MH.grad, held.num_tokens)
        self._executor.layers.drop(held.offloaded)

    def _send_gradient(self, number: int, entered_MH: Tensor | None, num_tokens: int) -> None:
        if entered_MH is not None:
            self._transport.send_gradient(number, entered_MH[:num_tokens])

    def _make_room(self, part: BatchPart) -> None:
        """Free memory for one more micro-batch after one did not fit.

        Raises:
            ExpectedError: all layers recompute and offload already.
        """
        self._executor.release_memory()
        if not (self._executor.recompute_more() or self._executor.offload_inputs()):
            raise _lack_memory(len(self._held) + 1, part, is_backward=False)


def _lack_memory(num_held: int, part: BatchPart, *, is_backward: bool) -> ExpectedError:
    """Return the error of a stage that lacks memory for one more pass."""
    num_tokens = sum(example.num_tokens for example in part.examples)
    one_of = "one of " if is_backward and num_held > 1 else ""
    held = f"{num_held} micro-batches" if num_held > 1 else "a micro-batch"
    where = f"in the backward pass of {one_of}" if is_backward else "with "
    return ExpectedError(
        f"Memory ran out {where}{held} of up to {num_tokens:,} tokens in this stage.",
        f"Use more nodes or a lower sequence_tokens, or {SAVE_MEMORY_HINT}",
    )


def _fill(rows_RH: Tensor, num_tokens: int, value: float | None = None) -> Tensor:
    """Return features (M, H) of all tokens of a row, padded to its shape.

    Args:
        rows_RH: features of the real tokens.
        num_tokens: M.
        value: value of the padding; None repeats the last row, since norms divide by lengths.
    """
    missing = num_tokens - len(rows_RH)
    if not missing:
        return rows_RH.detach()
    last_1H = rows_RH[-1:] if value is None else torch.full_like(rows_RH[-1:], value)
    return torch.cat((rows_RH, last_1H.expand(missing, -1))).detach()
