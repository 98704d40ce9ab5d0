"""What is proved of a quantized model, and the verdict that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.quantizers.compare import Distance

MOST_PERPLEXITY = 1.03
"""Times that of the original; above it an answer or two in a hundred reads worse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Of one file or folder of an artifact."""

    name: str
    """Such as `Q8_0` or `nf4`."""
    distance: Distance
    original_perplexity: float
    control: Distance
    """Of the same model with its weights merely rounded to 4 bits."""
    same_answers: float
    """Share of tokens that are the same in the likeliest continuations, 0 to 1."""
    size_bytes: int
    original_bytes: int
    tokens_per_s: float
    """Generated, one text at a time, on the node that made it."""
    first_token_s: float
    runtime: str
    """That loaded it for this, with its version."""

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity by that of the original."""
        return self.distance.perplexity / self.original_perplexity

    @property
    def problems(self) -> tuple[str, ...]:
        """What speaks against keeping it, in whole sentences."""
        found = []
        if self.distance.kl > self.control.kl:
            found.append(
                f"It is further from the original (KL {self.distance.kl:.2g}) than weights that "
                f"are merely rounded ({self.control.kl:.2g})."
            )
        if self.perplexity_ratio > MOST_PERPLEXITY:
            found.append(
                f"Its perplexity is {100 * (self.perplexity_ratio - 1):.1f} % above the original's."
            )
        return tuple(found)

    @property
    def keep(self) -> bool:
        """The verdict."""
        return not self.problems


def share_of_same(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """Return the share of places at which two lists of continuations have the same token.

    A continuation counts up to its first difference, because after it the texts are others.

    >>> share_of_same([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]])
    0.6666666666666666
    """
    same = total = 0
    for one, two in zip(first, second, strict=True):
        total += max(len(one), len(two))
        for left, right in zip(one, two, strict=False):
            if left != right:
                break
            same += 1
    return same / total if total else 1.0
