"""Work of one rank: micro-batches of the run's own rows, and the time that they take.

A setting is as good as the speed of real steps with it. Their micro-batches follow from the lengths
of the rows, so it is enough to time a few sizes and to add up the time of all micro-batches in a
sample of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from agents.shared.micro_shapes import find_size, group_examples, round_up_tokens
from agents.trainer.data.examples import BatchPart, Examples, choose_examples
from agents.trainer.execution.shapes import ShapeGrid
from agents.trainer.model.micro_batch import MicroShape

# Number of sampled steps that can be computed as a whole.
_NUM_PARTS = 3
# Micro-batches below this fraction of the capacity are timed with a size of their own if they hold
# at least this fraction of the tokens.
_SMALL, _MIN_SHARE = 0.8, 0.1
# Fraction of the fullest micro-batch from which others count as full.
_FULL = 0.9


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Time of a micro-batch by its size, through one or two measured points."""

    points: tuple[tuple[int, float], ...]
    """Tokens and seconds, the largest last."""
    launch_s: float = 0.0
    """Host time per micro-batch, during which the card computes, in seconds."""

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a micro-batch on the card, in seconds.

        >>> CostCurve(((100, 2.0),)).seconds(50), CostCurve(((50, 2.0), (100, 3.0))).seconds(75)
        (1.0, 2.5)
        """
        tokens, seconds = self.points[-1]
        if len(self.points) > 1:
            less_tokens, less_s = self.points[0]
            slope = max(0.0, (seconds - less_s) / (tokens - less_tokens))
            time_s = less_s + slope * (num_tokens - less_tokens)
            # Far from its points the line may be too flat or too steep.
            return max(time_s, 0.5 * less_s * num_tokens / less_tokens)
        return seconds * num_tokens / tokens

    def step_seconds(self, sizes: Sequence[int], num_launched: int) -> float:
        """Return the time of a step with micro-batches of these sizes, in seconds.

        The host launches one while the card computes another, so the slower of both decides.

        Args:
            sizes: tokens of each micro-batch.
            num_launched: number of them that are launched instead of replayed.

        >>> costs = CostCurve(((100, 2.0),), launch_s=1.5)
        >>> costs.step_seconds([100, 50, 20], 3), costs.step_seconds([100, 50, 20], 1)
        (4.5, 3.4)
        """
        return max(num_launched * self.launch_s, sum(map(self.seconds, sizes)))


class Workload:
    """Part of a run that falls to one rank.

    Args:
        examples: training data.
        steps: rows of this rank in some steps of the run; see `sample_steps`.
        sends: True if gradients are sent during the last micro-batch of a step, which then cannot
            be replayed.
    """

    def __init__(
        self, examples: Examples, steps: Sequence[list[int]], *, sends: bool = False
    ) -> None:
        self._examples = examples
        self._sends = sends
        # A rank has no rows in any step if a batch has fewer rows than there are ranks.
        longest = int(examples.num_tokens.argmax())
        self._steps = [rows for rows in steps if rows] or [[longest]]

    def choose_part(self, num_tokens: int) -> BatchPart:
        """Return examples of at most this many tokens in total, but at least the longest one."""
        return choose_examples(self._examples, num_tokens)

    def choose_full(self, capacity: int, *, is_repeating: bool) -> BatchPart:
        """Return a full micro-batch of the sampled steps, with the usual number of rows.

        `choose_part` begins with the longest row, whose attention takes longer than usual.
        """
        groups = list(chain(*self._group_steps(capacity, is_repeating=is_repeating)))
        counts = [sum(self._lengths(rows)) for rows in groups]
        full = [
            rows for rows, count in zip(groups, counts, strict=True) if count >= _FULL * max(counts)
        ]
        return self._make_part(sorted(full, key=len)[len(full) // 2])

    def choose_step(self, number: int, max_tokens: float) -> BatchPart:
        """Return a real step of this rank, or its first examples up to a number of tokens.

        Args:
            number: number of the step in the sample, modulo its size.
            max_tokens: limit; at least one example is returned.
        """
        rows, total = self._steps[number % min(_NUM_PARTS, len(self._steps))], 0
        chosen: list[int] = []
        for row in rows:
            total += int(self._examples.num_tokens[row])
            if chosen and total > max_tokens:
                break
            chosen.append(row)
        return self._make_part(chosen)

    def choose_usual(self, grid: ShapeGrid, capacity: int, most: int) -> list[BatchPart]:
        """Return a micro-batch of each usual shape, the largest first.

        Args:
            grid: rounds shapes.
            capacity: limit of a micro-batch, in tokens.
            most: maximum number of shapes; the most frequent ones are returned.
        """
        by_shape: dict[MicroShape, list[list[int]]] = {}
        for rows in chain(*self._group_steps(capacity, is_repeating=True)):
            shape = grid.choose([self._examples[row] for row in rows], capacity)
            by_shape.setdefault(shape, []).append(rows)
        usual = sorted(by_shape, key=lambda shape: -len(by_shape[shape]))[:most]
        usual.sort(key=lambda shape: -shape.num_tokens)
        return [self._make_part(by_shape[shape][0]) for shape in usual]

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of this rank in a step."""
        return self._count_tokens() / len(self._steps)

    def find_small(self, capacity: int, *, is_repeating: bool) -> int | None:
        """Return the usual size of the smaller micro-batches, in tokens; None if they are few."""
        sizes = list(chain(*self._list_sizes(capacity, is_repeating=is_repeating)))
        small = [size for size in sizes if size < _SMALL * capacity]
        if sum(small) < _MIN_SHARE * sum(sizes):
            return None
        return round(sum(size * size for size in small) / sum(small))

    def predict_speed(self, capacity: int, costs: CostCurve, *, is_repeating: bool) -> float:
        """Return the tokens per second of the sampled steps, not counting padding.

        Args:
            capacity: limit of a micro-batch, in tokens.
            costs: time of a micro-batch by its size.
            is_repeating: True if micro-batches are padded to repeating sizes.
        """
        steps = self._list_sizes(capacity, is_repeating=is_repeating)
        sent = int(self._sends)
        seconds = (
            costs.step_seconds(sizes, sent if is_repeating else len(sizes)) for sizes in steps
        )
        return self._count_tokens() / sum(seconds)

    def _make_part(self, rows: list[int]) -> BatchPart:
        return BatchPart(
            examples=[self._examples[row] for row in rows],
            places=rows,
            positions=list(range(len(rows))),
        )

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        return [int(self._examples.num_tokens[row]) for row in rows]

    def _count_tokens(self) -> int:
        return sum(sum(self._lengths(rows)) for rows in self._steps)

    def _group_steps(self, capacity: int, *, is_repeating: bool) -> list[list[list[int]]]:
        """Return the rows of each micro-batch of each sampled step."""
        steps = []
        for rows in self._steps:
            groups = group_examples(self._lengths(rows), capacity, is_filled=is_repeating)
            steps.append([[rows[place] for place in group] for group in groups])
        return steps

    def _list_sizes(self, capacity: int, *, is_repeating: bool) -> list[list[int]]:
        """Return the sizes of the micro-batches of each step, padding included."""
        longest = round_up_tokens(int(self._examples.num_tokens.max()))
        return [
            [
                find_size(lengths, capacity, longest)
                if is_repeating
                else round_up_tokens(sum(lengths))
                for lengths in map(self._lengths, groups)
            ]
            for groups in self._group_steps(capacity, is_repeating=is_repeating)
        ]


def count_tokens(part: BatchPart) -> int:
    """Return the number of tokens of all examples."""
    return sum(example.num_tokens for example in part.examples)
