"""Assignment of layers to ranks and replicas.

A replica is a row of ranks that hold the whole model together and compute one part of each batch.
Replicas may be cut at different layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agents.contract.model_cut import ModelCut, Stage
from agents.errors import ExpectedError
from agents.trainer.model.layer_holdings import ModelOutline


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive layers that no replica divides, and the rank of each replica that holds them."""

    first: int
    stop: int
    holders: tuple[int, ...]


class Replicas:
    """Stages of all ranks, grouped by replica.

    Args:
        stages: stages in rank order.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        numbers = sorted({stage.replica for stage in stages})
        in_order = sorted(stages, key=lambda stage: stage.first_layer)
        self.rows = tuple(
            tuple(stage for stage in in_order if stage.replica == number) for number in numbers
        )
        """Stages of each replica, in the order of the layers."""
        self.num_layers = max(stage.stop_layer for stage in stages)

    def find(self, rank: int) -> tuple[int, int]:
        """Return the replica of a rank and the rank's place in it, both from 0."""
        return next(
            (number, place)
            for number, row in enumerate(self.rows)
            for place, stage in enumerate(row)
            if stage.rank == rank
        )

    def share_of(self, rank: int) -> float:
        """Return the fraction of the layers that a rank holds."""
        return self.stages[rank].num_layers / self.num_layers

    def stretches(self) -> Iterator[Stretch]:
        """Yield the stretches of layers that are whole in every replica, in order.

        >>> ends = [(0, 0, 2), (0, 2, 4), (1, 0, 4)]
        >>> replicas = Replicas([
        ...     Stage(rank=rank, replica=replica, first_layer=first, stop_layer=stop)
        ...     for rank, (replica, first, stop) in enumerate(ends)
        ... ])
        >>> [(stretch.first, stretch.stop, stretch.holders) for stretch in replicas.stretches()]
        [(0, 2, (0, 2)), (2, 4, (1, 2))]
        """
        # Every end of a stage in any replica also cuts the stretches of the others.
        ends = sorted({0} | {stage.stop_layer for stage in self.stages})
        for first, stop in pairwise(ends):
            holders = tuple(
                next(item.rank for item in row if item.first_layer <= first < item.stop_layer)
                for row in self.rows
            )
            yield Stretch(first=first, stop=stop, holders=holders)


def choose_stages(
    cut: ModelCut | None, outline: ModelOutline, world_size: int
) -> tuple[Stage, ...]:
    """Return the stage of each rank: as planned, else equal stages in one replica.

    Raises:
        ExpectedError: the model has fewer layers than there are ranks, or not as many as planned.
    """
    outline.require_layers("pipeline")
    num_layers = outline.num_layers
    if cut is not None and len(cut.stages) == world_size:
        if cut.num_layers != num_layers:
            raise ExpectedError(
                f"The plan divides {cut.num_layers} layers, but the model has {num_layers}.",
                "Start the run again, so that it is planned with this model",
            )
        return cut.stages
    if world_size > num_layers:
        raise ExpectedError(
            f"parallel: pipeline has {world_size} stages, but the model has {num_layers} layers.",
            f"Name at most {num_layers} GPUs in nodes, or use parallel: data",
        )
    # Rounded up, so the last stage has fewer layers: it also has the head.
    ends = [-(-place * num_layers // world_size) for place in range(world_size + 1)]
    return tuple(
        Stage(
            rank=rank,
            first_layer=first,
            stop_layer=stop,
            has_embedding=first == 0,
            has_head=stop == num_layers,
        )
        for rank, (first, stop) in enumerate(pairwise(ends))
    )
