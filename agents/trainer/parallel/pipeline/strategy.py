"""Pipeline: every rank holds some layers and sends features to the rank with the next ones.

Micro-batches follow each other through the stages, so all stages compute at once (see `order`).
Several replicas of such a row of ranks divide a batch by their speeds, like the ranks of data
parallel; the gradient is always that of the batch's mean.

torch's pipeline schedules do not fit: their stages take message sizes from the first micro-batch,
while rows here vary in length; they have no second pass without the adapter, which a preference
loss needs; and their 1F1B waits for each message that it sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agents.contract.model_cut import Stage
from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import RunSpec
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.shared.micro_shapes import group_examples
from agents.trainer.data.examples import BatchPart, Examples
from agents.trainer.execution.executor import Executor
from agents.trainer.model.experts import list_adapted
from agents.trainer.model.layer_holdings import LayerHoldings, ModelOutline
from agents.trainer.model.model import TrainedModel
from agents.trainer.model.stage_ends import StageEnds
from agents.trainer.model.stage_opening import TrainedPlace, open_stage, place_trained
from agents.trainer.optim.flat_parameters import FlatParameters, Layout, compute_norm
from agents.trainer.optim.optimizer import clip_and_step, make_optimizer
from agents.trainer.optim.optimizer_reserve import Reserve
from agents.trainer.parallel.balance import Balancer, choose_first_shares
from agents.trainer.parallel.batch import Batch, choose_batch, list_evaluated
from agents.trainer.parallel.pipeline import whole_state
from agents.trainer.parallel.pipeline.cut import Replicas, choose_stages
from agents.trainer.parallel.pipeline.exchange import Stretches, gather
from agents.trainer.parallel.pipeline.order import plan_in_flight
from agents.trainer.parallel.pipeline.passes import StagePasses
from agents.trainer.parallel.pipeline.transport import Transport
from agents.trainer.parallel.pipeline.wire_format import WireFormat
from agents.trainer.parallel.strategy import TrainedState
from agents.trainer.rank.context import RankContext

# Forward passes by which a stage starts before the next one: one for the pass itself, one for the
# round trip of its message.
_DEPTH = 2
# Micro-batches of a batch per stage. The idle time of a stage is that of about one of them.
_MICRO_PER_STAGE = 4


class Pipeline:
    """Strategy in which every rank holds a stage; `Strategy` documents the methods."""

    # Set by `choose_layers`:
    _replicas: Replicas
    # Set by `divide`:
    _model: TrainedModel
    _ends: StageEnds
    # Set by `place`:
    _flat: FlatParameters
    _optimizer: torch.optim.Optimizer
    # Set by `join`:
    _trained: dict[str, TrainedPlace]
    _whole: whole_state.WholeValues
    _stretches: Stretches
    _state: whole_state.WholeState | None
    # Set by `start`:
    _executor: Executor
    _examples: Examples
    _balancer: Balancer
    _passes: StagePasses
    _transport: Transport

    def __init__(self, spec: RunSpec, context: RankContext) -> None:
        """Reject a run that stages cannot train.

        Raises:
            ExpectedError: the plan chose a pipeline for such a run.
        """
        if refusal := spec.refuse_mode("pipeline"):
            raise ExpectedError(f"{refusal}.", "Change it, or use parallel: data")
        self._spec = spec
        self._context = context
        self._group = context.group
        self._device = context.device
        self._intent = context.attempt.intent
        self._divisor = 1.0
        self._has_reported_rounding = False

    @property
    def _stage(self) -> Stage:
        return self._replicas.stages[self._group.rank]

    @property
    def _place(self) -> tuple[int, int]:
        """Replica of this rank, and its place in that replica."""
        return self._replicas.find(self._group.rank)

    @property
    def shares(self) -> tuple[float, ...]:
        """Weight of each rank: the share of its replica times its fraction of the layers."""
        parts = self._balancer.shares
        return tuple(
            parts[self._replicas.find(rank)[0]] * self._replicas.share_of(rank)
            for rank in range(self._group.world_size)
        )

    def use_shares(self, shares: Sequence[float]) -> None:
        """Divide the next batches by these weights of the ranks."""
        self._balancer.shares = self._sum_by_replica(shares)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """First layer of each rank and the one after its last."""
        return tuple((stage.first_layer, stage.stop_layer) for stage in self._replicas.stages)

    @property
    def work_share(self) -> float:
        """Fraction of a token's work that this rank does."""
        return self._replicas.share_of(self._group.rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained parameter of the run, by name."""
        return {name: place.shape for name, place in self._trained.items()}

    def choose_layers(self, outline: ModelOutline) -> LayerHoldings:
        """Hold the layers of this rank's stage."""
        stages = choose_stages(self._intent.cut, outline, self._group.world_size)
        self._replicas = Replicas(stages)
        mine = range(self._stage.first_layer, self._stage.stop_layer)
        return LayerHoldings(
            layers=tuple(
                "resident" if place in mine else "absent" for place in range(outline.num_layers)
            ),
            embedding=self._stage.has_embedding,
            head=self._stage.has_head,
        )

    def divide(self, model: TrainedModel) -> TrainedModel:
        """Return the model with its layers connected to the neighboring stages."""
        stage = self._stage
        self._model = open_stage(model, stage.first_layer, stage.stop_layer, self._device)
        assert self._model.stage is not None
        self._ends = self._model.stage
        return self._model

    def place(self, model: TrainedModel, layout: Layout) -> FlatParameters:
        """Put the trained parameters of this stage into one buffer; see `Strategy`."""
        self._flat = FlatParameters(model.named_parameters(), self._device, layout=layout)
        self._optimizer = make_optimizer(self._spec, self._flat)
        return self._flat

    def join(self) -> None:
        """Exchange the names of the parameters and adapters of all stages."""
        trained = {name: to_wire(place) for name, place in place_trained(self._model).items()}
        lora = self._model.lora
        adapted = list_adapted(self._model.module) if lora is not None else []
        mine = {"trained": trained, "adapted": adapted}
        reports = self._group.exchange("stages", mine)
        rows = [reports[stage.rank] for stage in self._replicas.rows[0]]
        self._trained = {
            name: from_wire(TrainedPlace, place)
            for row in rows
            for name, place in row["trained"].items()
        }
        self._ends.adapted = tuple(name for row in rows for name in row["adapted"])
        self._whole = whole_state.WholeValues(self.shapes, self._flat.layout)
        layers = {name: place.layer for name, place in self._trained.items()}
        self._stretches = Stretches(self._group, self._replicas, self._flat, layers)
        writes = self._group.rank in self._intent.checkpoint_ranks
        self._state = (
            whole_state.WholeState(self._whole, self._flat.values.dtype) if writes else None
        )

    def copy_first_values(self) -> None:
        """Copy the values of the first replica to all others."""
        self._stretches.copy_from_first([self._flat.values])

    def make_reserve(self) -> Reserve:
        """Return the memory that the optimizer needs for this stage."""
        return Reserve(self._spec.optimizer, [self._flat.values], self._optimizer, self._device)

    def start(
        self,
        executor: Executor,
        examples: Examples,
        *,
        shares: Sequence[float] | None,
        tokens_per_s: Sequence[float],
    ) -> None:
        """Choose shares and micro-batches, and connect the stages; see `Strategy`."""
        self._executor = executor
        self._examples = examples
        known = self._spec.shares or shares
        speeds = self._sum_by_replica(known) if known else None
        chosen = speeds or choose_first_shares(self._replica_speeds(tokens_per_s))
        is_active = self._spec.rebalance and self._spec.shares is None
        self._balancer = Balancer(chosen, active=is_active)
        # Every stage must make the same micro-batches of a batch.
        executor.micro_tokens = self._agree_on_size(executor.micro_tokens)
        replica, place = self._place
        row = self._replicas.rows[replica]
        in_flight = plan_in_flight(_DEPTH, [stage.max_in_flight for stage in row])
        self._transport = Transport(
            self._group,
            self._device,
            WireFormat(self._ends.width, self._model.dtype, self._spec.activation_bits),
            previous=row[place - 1].rank if place else None,
            following=row[place + 1].rank if place + 1 < len(row) else None,
            ahead=_DEPTH,
        )
        self._passes = StagePasses(
            executor,
            self._flat,
            self._ends,
            self._transport,
            streams=2 if OBJECTIVES[self._spec.objective].has_reference else 1,
            in_flight=in_flight[place],
            in_flight_before=in_flight[place - 1] if place else 0,
        )

    def choose_batch(self, step: int) -> Batch:
        """Return the batch of a step, divided by the shares of the replicas.

        Every stage gets the rows of its replica; only the last stage counts their weight.
        """
        batch = choose_batch(
            self._spec, self._examples, step, shares=self._balancer.shares, rank=self._place[0]
        )
        return replace(
            batch,
            my_tokens=round(batch.my_tokens * self.work_share),
            my_weight=batch.my_weight if self._ends.is_last else 0,
        )

    def add_gradients(self, batch: Batch, loss_scale: float | None) -> None:
        """Compute the gradients of this stage together with the other stages of the replica."""
        if loss_scale is not None:
            # Scaled as the mean: the gradients of a sum over a large batch would overflow fp16.
            self._executor.scale_gradients(loss_scale / batch.weight)
        self._divisor = batch.weight if loss_scale is None else loss_scale
        self._passes.add_gradients(batch.mine, self._group_rows(batch.mine))
        if not self._has_reported_rounding and (errors := self._transport.rounding_errors):
            self._context.journal.write("rounded", **errors)
            self._has_reported_rounding = True

    def take_waited_s(self) -> float:
        """Return the time that this stage has waited for others within its passes, in seconds."""
        return self._transport.take_waited_s()

    def reduce(self) -> None:
        """Sum the gradients over the replicas."""
        self._stretches.sum_gradients()

    def average_gradients(self) -> Tensor:
        """Divide the sums by the weight of the batch; return the norm over all stages."""
        self._flat.gradients.div_(self._divisor)
        square = compute_norm(self._flat.gradients).double().square()
        if self._place[0]:
            square = torch.zeros_like(square)  # all replicas have the same gradients
        self._group.sum(square)
        return square.sqrt().to(self._flat.gradients.dtype)

    def step_optimizer(self, norm: Tensor, learning_rate: float) -> None:
        """Clip by the norm over all stages, and step."""
        most = self._spec.max_gradient_norm
        clip_and_step(self._optimizer, self._flat, norm, most, learning_rate)

    def learn(self, seconds: Sequence[float], tokens: Sequence[float]) -> None:
        """Adapt the shares to the speeds of the replicas, each that of its slowest stage."""
        slowest = [max(seconds[piece.rank] for piece in pieces) for pieces in self._replicas.rows]
        self._balancer.learn(slowest, self._sum_by_replica(tokens))

    def regroup(self, kept: Sequence[int]) -> None:
        """Raise an error: lost layers cannot be replaced. `find_gap` announces it."""
        raise RuntimeError("a pipeline cannot continue without one of its stages")

    def evaluate(self, examples: Examples, first_place: int) -> Tensor:
        """Return the sums over all examples; each replica evaluates its share."""
        sums = torch.zeros_like(self._executor.sums)
        shares, replica = self._balancer.shares, self._place[0]
        for part in list_evaluated(examples, first_place, shares=shares, rank=replica):
            self._passes.evaluate(part, self._group_rows(part))
            sums += self._executor.sums
        self._group.sum(sums)
        return sums

    def equalize(self, flag: bool) -> int:
        """See `Strategy`. Also brings the state of all stages to the ranks that write it."""
        rows = whole_state.read_rows(self._flat, self._optimizer)
        num_flags = torch.tensor([float(flag)], dtype=torch.float64, device=self._device)
        self._group.sum(num_flags)
        # Replicas on different GPUs may differ in the last bits.
        if len(self._replicas.rows) > 1:
            with self._context.guard.changing():
                self._stretches.copy_from_first(rows)
                whole_state.write_rows(rows, self._optimizer)
        names = {
            stage.rank: [
                name
                for name in self._whole.spans
                if stage.first_layer <= self._trained[name].layer < stage.stop_layer
            ]
            for stage in self._replicas.rows[0]
        }
        writers = self._intent.checkpoint_ranks
        gather(self._group, self._replicas, rows, names, writers, self._state)
        if self._state is not None:
            self._state.note_step(whole_state.read_step(self._optimizer))
        found = int(num_flags.item())
        self._group.require_whole()
        return found

    def find_gap(self) -> str:
        """Return why no rank can save alone: others hold layers, or write them."""
        if self._group.world_size == 1:
            return ""
        return "in a pipeline the state of all layers comes together only at checkpoints"

    def export_state(self) -> TrainedState:
        """Return the state of all stages at the last `equalize`, on a rank that writes."""
        assert self._state is not None
        return self._state.export()

    def import_state(
        self,
        values: Iterable[tuple[str, Tensor]],
        optimizer: dict[str, Tensor],
        plain: dict[str, Any],
        carried: dict[str, Tensor],
    ) -> None:
        """Restore the part of a saved state that belongs to this stage."""
        for name, value in values:
            if name in self._flat.views:
                self._flat.views[name].copy_(value)
        whole_state.load_optimizer(self._optimizer, self._flat, self._whole, optimizer)

    def _group_rows(self, part: BatchPart) -> list[list[int]]:
        lengths = [example.num_tokens for example in part.examples]
        return group_examples(lengths, self._executor.micro_tokens) if lengths else []

    def _agree_on_size(self, micro_tokens: int) -> int:
        """Return the micro-batch size of all ranks, in tokens: small enough to keep all stages
        busy.
        """
        reports = self._group.exchange("micro-batches", {"micro_tokens": micro_tokens})
        lengths = self._examples.num_tokens
        cut = self._intent.cut
        num_rows: float | None = cut.micro_sequences if cut is not None else None
        if num_rows is None:
            most_stages = max(len(row) for row in self._replicas.rows)
            num_micro = _MICRO_PER_STAGE * most_stages * len(self._replicas.rows)
            num_rows = self._spec.batch_sequences / num_micro
        smallest = min(int(report["micro_tokens"]) for report in reports)
        # All stages of a replica must cut its rows alike, so the smallest size of any rank counts;
        # a single row cannot be cut.
        return max(int(lengths.max()), min(smallest, int(num_rows * float(lengths.mean()))))

    def _replica_speeds(self, tokens_per_s: Sequence[float]) -> list[float]:
        """Return the speed of each replica, that of its slowest stage, in tokens per second."""
        return [
            min(tokens_per_s[s.rank] / self._replicas.share_of(s.rank) for s in row)
            for row in self._replicas.rows
        ]

    def _sum_by_replica(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[stage.rank] for stage in row) for row in self._replicas.rows)
