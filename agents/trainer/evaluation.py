"""Measure the loss on held-out rows, all ranks together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import RunSpec
from agents.trainer.data.examples import Examples
from agents.trainer.parallel.strategy import Strategy

# Largest exponent whose exp() fits a float64 (709.8), rounded down. A larger loss has no useful
# perplexity.
_MAX_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result of one evaluation."""

    means: tuple[float, ...]
    """Mean of each of the objective's `sums`, per token that counts or per row."""

    def describe(self, objective: str) -> dict[str, float | None]:
        """Return the fields of the journal's record: the loss and its derived values.

        >>> fields = Evaluation(means=(1.0,)).describe("sft")
        >>> {name: round(value, 3) for name, value in fields.items()}
        {'loss': 1.0, 'perplexity': 2.718}
        """
        row = OBJECTIVES[objective]
        fields: dict[str, float | None] = dict(zip(row.sums, self.means, strict=True))
        if row.weighs_tokens:
            fields["perplexity"] = compute_perplexity(self.means[0])
        return fields


def compute_perplexity(loss: float) -> float | None:
    """Return exp(loss) (Jelinek et al. 1977); None if it overflows.

    Args:
        loss: mean over tokens, in nats.
    """
    if not math.isfinite(loss) or loss > _MAX_EXPONENT:
        return None
    return math.exp(loss)


def is_due(spec: RunSpec, step: int, num_rows: int, *, last: bool) -> bool:
    """Return whether to evaluate after `step`: as the spec says, else every epoch; and at the end.

    Args:
        step: number of finished optimizer steps, from 1.
        num_rows: number of rows of the training data.
        last: True if the run ends with this step.
    """
    if last:
        return True
    every = spec.evaluate_every_steps
    if every is not None:
        return step % every == 0
    # An epoch ends within this step, or right after it.
    size = spec.batch_sequences
    return step * size // num_rows > (step - 1) * size // num_rows


def evaluate(strategy: Strategy, examples: Examples, first_place: int) -> Evaluation:
    """Return the means over all examples; all ranks call this together.

    Args:
        strategy: divides the examples over the ranks.
        examples: evaluation data.
        first_place: index of the first example for the objective (see `BatchPart.places`).

    Raises:
        PeerLost: another rank is gone.
    """
    sums = strategy.evaluate(examples, first_place)
    return Evaluation(means=tuple((sums / examples.weights.sum().item()).tolist()))
