"""The batch of a step, and the slice of it that one rank computes.

Both are pure functions of the run, the step and the shares, so all ranks compute the same cut
without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.contract.spec import RunSpec
from agents.trainer.data.examples import BatchPart, Examples
from agents.trainer.data.order import order_rows
from agents.trainer.parallel.shares import split_batch

# Number of steps from which the work of a run is estimated.
_SAMPLED_STEPS = 24
# Number of examples in memory at once in an evaluation: enough to group similar lengths.
_EVALUATED_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The global batch of one step, and this rank's slice of it."""

    step: int
    row_numbers: list[int]
    num_tokens: int
    weight: float
    """Divisor of the sums: number of tokens with a loss or sum of their weights, or number of
    pairs; see `objective`. Exact: its parts add up to it in any order.
    """
    mine: BatchPart
    my_tokens: int
    my_weight: float


def sample_steps(
    spec: RunSpec, train: Examples, *, first_step: int = 1, rank: int = 0, world_size: int = 1
) -> list[list[int]]:
    """Return the rows of one rank in a sample of steps, if all ranks have equal shares.

    Args:
        spec: source of the seed and the batch size.
        train: training data.
        first_step: number of the first step, from 1.
        rank: owner of the rows.
        world_size: number of ranks.
    """
    steps, order = [], order_rows(spec, train.parts)
    for step in range(first_step, first_step + _SAMPLED_STEPS):
        rows = order.choose(step=step, batch=spec.batch_sequences)
        lengths = [int(train.num_tokens[row]) for row in rows]
        mine = split_batch(lengths, (1.0,) * world_size)[rank]
        steps.append([rows[index] for index in mine])
    return steps


def choose_batch(
    spec: RunSpec, train: Examples, step: int, *, shares: Sequence[float], rank: int
) -> Batch:
    """Return the batch of a step.

    Args:
        spec: source of the seed and the batch size.
        train: training data.
        step: number of the step, from 1.
        shares: weight of each rank; see `shares`.
        rank: owner of the slice `mine`.
    """
    size = spec.batch_sequences
    chosen = order_rows(spec, train.parts).choose(step=step, batch=size)
    examples = [train[index] for index in chosen]
    lengths = [int(train.num_tokens[index]) for index in chosen]
    weights = [train.weights[index].item() for index in chosen]
    mine = split_batch(lengths, shares)[rank]
    return Batch(
        step=step,
        row_numbers=[row for example in examples for row in example.rows],
        num_tokens=sum(lengths),
        weight=sum(weights),
        mine=BatchPart(
            examples=[examples[place] for place in mine],
            places=[chosen[place] for place in mine],
            # Dropout hashes the example's number in the whole run, so masks do not depend on the
            # rank.
            positions=[(step - 1) * size + place for place in mine],
        ),
        my_tokens=sum(lengths[place] for place in mine),
        my_weight=sum(weights[place] for place in mine),
    )


def list_evaluated(
    examples: Examples, first_place: int, *, shares: Sequence[float], rank: int
) -> Iterator[BatchPart]:
    """Yield the examples that a rank evaluates, some at a time.

    The shares of training divide them, since a slow rank would let the others wait here, too.

    Args:
        examples: evaluation data.
        first_place: index of the first example for the objective (see `BatchPart.places`).
        shares: weight of each rank; see `shares`.
        rank: owner of the parts.
    """
    mine = split_batch(examples.num_tokens.tolist(), shares)[rank]
    for start in range(mine.start, mine.stop, _EVALUATED_AT_ONCE):
        places = range(start, min(start + _EVALUATED_AT_ONCE, mine.stop))
        yield BatchPart(
            examples=[examples[place] for place in places],
            places=[first_place + place for place in places],
            positions=places,
        )
