"""Measure the loss on rows that are not trained on, all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agents.contract.spec import RunSpec
from agents.trainer.data.examples import Examples, Part
from agents.trainer.execution.executor import Executor
from agents.trainer.objectives.objective import LOSS, name_sums
from agents.trainer.parallel.shares import split_batch
from agents.trainer.rank.group import Group

_AT_ONCE = 1024
"""Examples in memory at once; among so many, those of like length are found."""
_LARGEST_EXPONENT = 700.0
"""Of what a float64 can hold; a loss beyond it has no perplexity to speak of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What an objective's sums come to over the evaluation data."""

    means: tuple[float, ...]
    """Of each of `objectives.SUMS`, over the tokens that count, or over the pairs."""

    def tell(self, objective: str) -> dict[str, float | None]:
        """Return the journal's words for it: the loss, and what it means.

        >>> told = Evaluation(means=(1.0, 0.0, 0.0)).tell("sft")
        >>> {name: round(value, 3) for name, value in told.items()}
        {'loss': 1.0, 'perplexity': 2.718}
        """
        loss = self.means[LOSS]
        told: dict[str, float | None] = {"loss": loss, **name_sums(objective, self.means)}
        if objective == "sft":
            told["perplexity"] = perplexity_of(loss)
        return told


def perplexity_of(loss: float) -> float | None:
    """Return exp(loss) (Jelinek et al. 1977); None where it is too large for a number.

    Args:
        loss: mean over tokens, in nats.
    """
    if not math.isfinite(loss) or loss > _LARGEST_EXPONENT:
        return None
    return math.exp(loss)


def is_due(spec: RunSpec, step: int, num_rows: int, *, last: bool) -> bool:
    """Tell whether to evaluate after `step`: as the spec says, else once per epoch; and at the end.

    Args:
        step: optimizer steps done, from 1.
        num_rows: rows of the training data.
        last: the run ends with this step.
    """
    if last:
        return True
    every = spec.evaluate_every_steps
    if every is not None:
        return step % every == 0
    size = spec.batch_sequences
    return step * size // num_rows > (step - 1) * size // num_rows


def evaluate(
    computer: Executor,
    group: Group,
    examples: Examples,
    shares: Sequence[float],
    first_place: int,
) -> Evaluation:
    """Return the means over all examples; all ranks call this together, each doing its share.

    Args:
        first_place: index of the first example for the objective (see `Part.places`).

    Raises:
        PeerLost: another rank has gone.
    """
    mine = split_batch(examples.num_tokens.tolist(), shares)[group.rank]
    sums = torch.zeros_like(computer.sums)
    for start in range(mine.start, mine.stop, _AT_ONCE):
        places = range(start, min(start + _AT_ONCE, mine.stop))
        part = Part(
            examples=[examples[place] for place in places],
            places=[first_place + place for place in places],
            positions=places,
        )
        computer.evaluate(part)
        sums += computer.sums
    group.sum(sums)
    return Evaluation(means=tuple((sums / int(examples.weights.sum())).tolist()))
