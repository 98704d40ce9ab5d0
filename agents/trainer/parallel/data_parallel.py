"""Data parallel: every rank holds all trained parameters and computes a slice of each batch.

Shares may be uneven and may follow the measured speeds; the gradient is always that of the batch's
mean (see `loop`). A single rank uses the same code and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from agents.contract.spec import RunSpec
from agents.trainer.data.examples import Examples
from agents.trainer.execution.executor import Executor
from agents.trainer.model.layer_holdings import LayerHoldings, ModelOutline, hold_everything
from agents.trainer.model.model import TrainedModel
from agents.trainer.optim.flat_parameters import FlatParameters, Layout, compute_norm
from agents.trainer.optim.optimizer import clip_and_step, export_state, import_state, make_optimizer
from agents.trainer.optim.optimizer_reserve import Reserve
from agents.trainer.parallel.balance import Balancer, choose_first_shares
from agents.trainer.parallel.batch import Batch, choose_batch, list_evaluated
from agents.trainer.parallel.compression import make_transport
from agents.trainer.parallel.reducer import GradientTransport, Reducer
from agents.trainer.parallel.state_digest import digest
from agents.trainer.parallel.strategy import TrainedState
from agents.trainer.rank.context import RankContext


class DataParallel:
    """Strategy in which every rank holds everything; `Strategy` documents the methods."""

    # Set by `place`:
    _flat: FlatParameters
    _optimizer: torch.optim.Optimizer
    _transport: GradientTransport
    # Set by `start`, not earlier: the reducer hooks every parameter, but tuning and warm-up must
    # run without hooks.
    _executor: Executor
    _examples: Examples
    _balancer: Balancer
    _reducer: Reducer

    def __init__(self, spec: RunSpec, context: RankContext) -> None:
        self._spec = spec
        self._group = context.group
        self._device = context.device
        self._guard = context.guard
        self._carried: dict[str, Tensor] = {}

    @property
    def shares(self) -> tuple[float, ...]:
        """Weight of each rank, in rank order."""
        return self._balancer.shares

    def use_shares(self, shares: Sequence[float]) -> None:
        """Divide the next batches by these weights."""
        self._balancer.shares = tuple(shares)

    def choose_layers(self, outline: ModelOutline) -> LayerHoldings:
        """Hold the whole model on the device."""
        return hold_everything(outline)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Empty: every rank has all layers."""
        return ()

    @property
    def work_share(self) -> float:
        """Fraction of a token's work that this rank does: 1."""
        return 1.0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained parameter by name."""
        return {name: tuple(view.shape) for name, view in self._flat.views.items()}

    def divide(self, model: TrainedModel) -> TrainedModel:
        """Return the model unchanged: every rank holds all layers."""
        return model

    def place(self, model: TrainedModel, layout: Layout) -> FlatParameters:
        """Put all trained parameters into one buffer; see `Strategy`."""
        self._flat = FlatParameters(model.named_parameters(), self._device, layout=layout)
        self._optimizer = make_optimizer(self._spec, self._flat)
        # A single rank sends nothing, so it loses nothing.
        kind = self._spec.compression if self._group.world_size > 1 else "none"
        self._transport = make_transport(kind, self._flat, self._group, self._spec.seed)
        return self._flat

    def join(self) -> None:
        """Do nothing: all ranks hold the same."""

    def copy_first_values(self) -> None:
        """Copy the values of rank 0 to all ranks."""
        self._group.copy_from_first(self._flat.values)

    def make_reserve(self) -> Reserve:
        """Return the memory that the optimizer needs for all parameters."""
        return Reserve(self._spec.optimizer, [self._flat.values], self._optimizer, self._device)

    def start(
        self,
        executor: Executor,
        examples: Examples,
        *,
        shares: Sequence[float] | None,
        tokens_per_s: Sequence[float],
    ) -> None:
        """Choose shares and hook the parameters; see `Strategy`."""
        spec = self._spec
        chosen = spec.shares or shares or choose_first_shares(tokens_per_s)
        self._executor = executor
        self._examples = examples
        self._balancer = Balancer(chosen, active=spec.rebalance and spec.shares is None)
        self._reducer = Reducer(self._flat, self._transport, world_size=self._group.world_size)

    def choose_batch(self, step: int) -> Batch:
        """Return the batch of a step, divided by the shares."""
        return choose_batch(
            self._spec, self._examples, step, shares=self.shares, rank=self._group.rank
        )

    def add_gradients(self, batch: Batch, loss_scale: float | None) -> None:
        """Compute this rank's gradients; the last pass starts to send them."""
        if loss_scale is not None:
            # Scaled as the mean: the gradients of a sum over a large batch would overflow fp16.
            self._executor.scale_gradients(loss_scale / batch.weight)
        self._reducer.divisor = batch.weight if loss_scale is None else loss_scale
        self._executor.add_gradients(batch.mine, self._reducer)

    def take_waited_s(self) -> float:
        """Return 0: passes wait for no other rank."""
        return 0.0

    def reduce(self) -> None:
        """Wait for the sums of all buckets."""
        self._reducer.finish()

    def average_gradients(self) -> Tensor:
        """Divide the sums by the weight of the batch; return the norm."""
        self._flat.gradients.div_(self._reducer.divisor)
        return compute_norm(self._flat.gradients)

    def step_optimizer(self, norm: Tensor, learning_rate: float) -> None:
        """Clip and step; every rank does the same."""
        most = self._spec.max_gradient_norm
        clip_and_step(self._optimizer, self._flat, norm, most, learning_rate)

    def learn(self, seconds: Sequence[float], tokens: Sequence[float]) -> None:
        """Adapt the shares to the speeds; see `Balancer`."""
        self._balancer.learn(seconds, tokens)

    def evaluate(self, examples: Examples, first_place: int) -> Tensor:
        """Return the sums over all examples; each rank evaluates its share."""
        sums = torch.zeros_like(self._executor.sums)
        rank = self._group.rank
        for part in list_evaluated(examples, first_place, shares=self.shares, rank=rank):
            self._executor.evaluate(part)
            sums += self._executor.sums
        self._group.sum(sums)
        return sums

    def equalize(self, flag: bool) -> int:
        """See `Strategy`. Copies the state of rank 0 where the digests of ranks differ.

        GPUs of different kinds may round the last bit of a norm differently, and such differences
        grow from step to step. A resume starts from the state of rank 0 anyway.
        """
        self._carried = self._transport.exchange_carried()
        world_size = self._group.world_size
        if world_size == 1:
            return int(flag)
        optimizer, _ = export_state(self._optimizer)
        tensors = [self._flat.values, *_on_device(optimizer), *_on_device(self._carried)]
        halves_2 = digest(tensors)
        # One slot per rank for the two halves of its digest, plus one for the flags: a single sum
        # distributes all of them.
        shared = torch.zeros(2 * world_size + 1, dtype=torch.float64, device=halves_2.device)
        shared[2 * self._group.rank : 2 * self._group.rank + 2] = halves_2
        shared[-1] = float(flag)
        self._group.sum(shared)
        *digests, num_flags = shared.tolist()
        self._group.require_whole()
        if len(set(zip(digests[::2], digests[1::2], strict=True))) > 1:
            with self._guard.changing():
                for tensor in tensors:
                    self._group.copy_from_first(tensor)
        return int(num_flags)

    def regroup(self, kept: Sequence[int]) -> None:
        """Continue with the remaining ranks; see `Strategy`."""
        self._reducer.abandon()
        self._balancer.keep(kept)

    def find_gap(self) -> str:
        """Return the state that only other ranks hold: their part of the compression error."""
        if not self._transport.is_lossy:
            return ""
        return f"with compression: {self._spec.compression}, each rank carries a part of the state"

    def export_state(self) -> TrainedState:
        """Return the whole state, which every rank holds."""
        tensors, plain = export_state(self._optimizer)
        return TrainedState(
            parameters=self._flat, optimizer=tensors, plain=plain, carried=self._carried
        )

    def import_state(
        self,
        values: Iterable[tuple[str, Tensor]],
        optimizer: dict[str, Tensor],
        plain: dict[str, Any],
        carried: dict[str, Tensor],
    ) -> None:
        """Restore a saved state, which is the same for every rank."""
        for name, value in values:
            self._flat.views[name].copy_(value)
        import_state(self._optimizer, optimizer, plain)
        if carried and not self._transport.is_lossy:
            # One rank resumes a run of several. It keeps compressing although it sends nothing, so
            # that the numbers stay those of the whole group.
            spec = self._spec
            self._transport = make_transport(spec.compression, self._flat, self._group, spec.seed)
        self._transport.load(carried)


def _on_device(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensors on the parameters' device; scalars are counters on the CPU."""
    return [tensors[name] for name in sorted(tensors) if tensors[name].dim()]
