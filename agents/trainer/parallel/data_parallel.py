"""Data parallel: every rank holds all trained parameters and computes a slice of each batch.

Shares may be uneven and may follow the measured speeds; the gradient stays that of the batch's mean
(see `loop`). One rank alone is the same with nothing to send.
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
from agents.trainer.optim.optimizer import (
    clip_and_step,
    export_state,
    import_state,
    make_optimizer,
)
from agents.trainer.optim.optimizer_reserve import Reserve
from agents.trainer.parallel.balance import Balancer, choose_first_shares
from agents.trainer.parallel.batch import Batch, choose_batch, list_evaluated
from agents.trainer.parallel.compression import make_transport
from agents.trainer.parallel.reducer import GradientTransport, Reducer
from agents.trainer.parallel.state_digest import digest
from agents.trainer.parallel.strategy import TrainedState
from agents.trainer.rank.context import RankContext


class DataParallel:
    """Every rank holds everything; a `Strategy`, which documents the methods in full."""

    # Set by `place`:
    _flat: FlatParameters
    _optimizer: torch.optim.Optimizer
    _transport: GradientTransport
    # Set by `start`. Not earlier: the reducer hooks every parameter, and a device is tuned and
    # warmed up without hooks.
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
        """Nothing: every rank has all layers."""
        return ()

    @property
    def work_share(self) -> float:
        """Part of a token's work that this rank does: all of it."""
        return 1.0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained parameter by name."""
        return {name: tuple(view.shape) for name, view in self._flat.views.items()}

    def divide(self, model: TrainedModel) -> TrainedModel:
        """Return the model as it is: every rank holds all layers."""
        return model

    def place(self, model: TrainedModel, layout: Layout) -> FlatParameters:
        """Put all trained parameters into one buffer; see `Strategy`."""
        self._flat = FlatParameters(model.named_parameters(), self._device, layout=layout)
        self._optimizer = make_optimizer(self._spec, self._flat)
        kind = self._spec.compression if self._group.world_size > 1 else "none"
        self._transport = make_transport(kind, self._flat, self._group, self._spec.seed)
        return self._flat

    def join(self) -> None:
        """Do nothing: all ranks hold the same."""

    def copy_first_values(self) -> None:
        """Let all ranks begin with the values of rank 0."""
        self._group.copy_from_first(self._flat.values)

    def make_reserve(self) -> Reserve:
        """Return the memory that the optimizer over all parameters needs."""
        return Reserve(self._spec.optimizer, [self._flat.values], self._optimizer, self._device)

    def start(
        self,
        executor: Executor,
        examples: Examples,
        *,
        shares: Sequence[float] | None,
        tokens_per_s: Sequence[float],
    ) -> None:
        """Choose shares, and hook the parameters; see `Strategy`."""
        spec = self._spec
        chosen = spec.shares or shares or choose_first_shares(tokens_per_s)
        self._executor = executor
        self._examples = examples
        self._balancer = Balancer(chosen, active=spec.rebalance and spec.shares is None)
        self._reducer = Reducer(self._flat, self._transport, world_size=self._group.world_size)

    def choose_batch(self, step: int) -> Batch:
        """Return the batch of a step, cut by the shares."""
        return choose_batch(
            self._spec, self._examples, step, shares=self.shares, rank=self._group.rank
        )

    def add_gradients(self, batch: Batch, loss_scale: float | None) -> None:
        """Compute this rank's gradients; the last pass begins to send them."""
        if loss_scale is not None:
            # Scaled as the mean: the sum over a large batch would overflow fp16 at once.
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
        """Let the shares follow the speeds; see `Balancer`."""
        self._balancer.learn(seconds, tokens)

    def evaluate(self, examples: Examples, first_place: int) -> Tensor:
        """Return the sums over all examples, each rank doing its share."""
        sums = torch.zeros_like(self._executor.sums)
        rank = self._group.rank
        for part in list_evaluated(examples, first_place, shares=self.shares, rank=rank):
            self._executor.evaluate(part)
            sums += self._executor.sums
        self._group.sum(sums)
        return sums

    def equalize(self, flag: bool) -> int:
        """See `Strategy`. GPUs of different kinds may round the last bit of a norm differently.

        Such differences would grow from step to step. Where the digests differ, all ranks take the
        state of rank 0, which is the one that a resume starts from anyway.
        """
        self._carried = self._transport.exchange_carried()
        world_size = self._group.world_size
        if world_size == 1:
            return int(flag)
        optimizer, _ = export_state(self._optimizer)
        tensors = [self._flat.values, *_on_device(optimizer), *_on_device(self._carried)]
        halves_2 = digest(tensors)
        # A place for every rank's two halves and one for the flags: one sum hands all to all.
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
        """Go on with the ranks that are left; see `Strategy`."""
        self._reducer.abandon()
        self._balancer.keep(kept)

    def find_gap(self) -> str:
        """Return what other ranks hold alone: a part of the error of lossy compression."""
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
        """Continue with a saved state; any rank's is that of all."""
        for name, value in values:
            self._flat.views[name].copy_(value)
        import_state(self._optimizer, optimizer, plain)
        if carried and not self._transport.is_lossy:
            # One rank continues a run of several: it compresses on, so that the numbers stay
            # those of all of them, although it sends nothing.
            spec = self._spec
            self._transport = make_transport(spec.compression, self._flat, self._group, spec.seed)
        self._transport.load(carried)


def _on_device(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensors that lie where the parameters do; scalars are counters on the CPU."""
    return [tensors[name] for name in sorted(tensors) if tensors[name].dim()]
