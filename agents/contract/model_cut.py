"""Division of a model over the ranks of an attempt, decided by the plan before the launch.

The master computes it from memory and speed of every GPU and sends it with the intent. A rank finds
its own stage by its number. Without stages, as after an election or under torchrun, the trainer
divides the layers itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agents.contract.names import MAX_RANK, check_number
from agents.contract.parallel import ParallelMode

MAX_LAYERS = 100_000
"""Upper bound of a model's layers, beyond any real model."""
MAX_SEQUENCES = 10**6
"""Upper bound of sequences of a micro-batch and of micro-batches in flight, beyond any GPU."""
WeightTier = Literal["ram", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Layers of one rank. With streamed weights every rank has all layers."""

    rank: int
    replica: int = 0
    """Index of its pipeline among data-parallel ones; with streamed weights, of the rank."""
    first_layer: int
    stop_layer: int
    """One past its last layer."""
    has_embedding: bool = True
    has_head: bool = True
    """True if it has the final norm, the head and the loss."""
    num_resident: int | None = None
    """Number of its first layers whose frozen weights stay on the device; None: as many as fit."""
    streams_from: WeightTier | None = None
    """Memory that holds the frozen weights of its other layers; None: the trainer decides."""
    max_in_flight: int | None = None
    """Maximum number of micro-batches between their forward and backward pass; None: the schedule
    decides."""
    num_recomputed: int | None = None
    """Number of its layers that recompute their activations; None: as memory requires."""
    offloads: bool = False
    """True if the inputs of these layers wait for the backward pass in host memory."""

    @property
    def num_layers(self) -> int:
        """Number of its layers."""
        return self.stop_layer - self.first_layer

    def check_foreign(self) -> None:
        check_number("rank", self.rank, 0, MAX_RANK)
        check_number("replica", self.replica, 0, MAX_RANK)
        check_number("first_layer", self.first_layer, 0, MAX_LAYERS)
        check_number("stop_layer", self.stop_layer, self.first_layer + 1, MAX_LAYERS)
        for name in ("num_resident", "num_recomputed"):
            check_number(name, getattr(self, name) or 0, 0, self.num_layers)
        if self.max_in_flight is not None:
            check_number("max_in_flight", self.max_in_flight, 1, MAX_SEQUENCES)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCut:
    """Mode of an attempt, and the stage of each rank."""

    mode: ParallelMode
    """Mode that the plan chose, also if the run file says `auto`."""
    stages: tuple[Stage, ...] = ()
    """Stage of each rank, in rank order; empty: the trainer divides the layers."""
    micro_sequences: int | None = None
    """Sequences of a micro-batch; None: the trainer chooses."""

    def check_foreign(self) -> None:
        if self.micro_sequences is not None:
            check_number("micro_sequences", self.micro_sequences, 1, MAX_SEQUENCES)
        if [stage.rank for stage in self.stages] != list(range(len(self.stages))):
            raise ValueError("stages are not one per rank, in rank order")
        # Each replica is a pipeline of its own, and holds the whole model.
        for replica in {stage.replica for stage in self.stages}:
            _check_chain([stage for stage in self.stages if stage.replica == replica])

    @property
    def num_replicas(self) -> int:
        """Number of chains of stages that each hold the whole model."""
        return len({stage.replica for stage in self.stages})

    @property
    def num_layers(self) -> int:
        """Number of layers of the model; 0: the cut has no stages."""
        return max((stage.stop_layer for stage in self.stages), default=0)

    def without_stages(self) -> ModelCut:
        """Return the same mode for ranks that divide the layers themselves."""
        return ModelCut(mode=self.mode)


def _check_chain(stages: Sequence[Stage]) -> None:
    """Check that stages cover all layers in order, from the embedding to the head.

    Raises:
        ValueError: a layer or an end of the model is missing or duplicated.
    """
    at = 0
    for stage in stages:
        if stage.first_layer != at:
            raise ValueError(
                f"the stage of rank {stage.rank} begins at layer {stage.first_layer}; "
                f"it must be {at}"
            )
        at = stage.stop_layer
    if not (stages[0].has_embedding and stages[-1].has_head):
        raise ValueError(f"the stages of replica {stages[0].replica} lack an end of the model")
