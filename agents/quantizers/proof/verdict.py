"""Measured proof of a quantized model, and the verdict derived from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from agents.quantizers.proof.compare import Distance
from agents.trainer.data.tokenizer_bounds import bounded_tokenizer, decode

MOST_PERPLEXITY = 1.03
"""Maximum perplexity as a multiple of the original's; above it, one or two answers in a hundred are
worse."""
LEAST_SAME_TOKENS = 0.99
"""Minimum share of equal tokens. Programs that know a tokenizer differ only for odd characters;
without the scores of its pieces, llama.cpp still gets 0.91 to 0.97 of the tokens right."""
_MOST_BEFORE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Measured quality of one file or folder of an artifact."""

    name: str
    """Type or method, such as `Q8_0` or `nf4`."""
    distance: Distance
    original_perplexity: float
    control: Distance
    """Distance of the same model with its weights merely rounded to 4 bits."""
    same_answers: float
    """Share of equal tokens in the likeliest continuations, 0 to 1."""
    size_bytes: int
    original_bytes: int
    tokens_per_s: float | None
    """Generation speed, one text at a time, on the node that made it; None: not measured."""
    first_token_s: float | None
    """Time to the first token on that node, in seconds; None: not measured."""
    runtime: str
    """Program that loaded it for the proof, with its version."""
    is_unpacked: bool = False
    """True if its weights were unpacked to 16 bits for the proof, since no memory could hold
    them."""
    same_tokens: float | None = None
    """Share of the held-out texts' tokens on which runtime and tokenizer agree, 0 to 1; None: the
    runtime uses the tokenizer itself."""
    lost_tokens: tuple[str, ...] = ()
    """Special tokens of these texts that the runtime treats as plain text."""

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity divided by the original's."""
        return self.distance.perplexity / self.original_perplexity

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons against keeping it, in whole sentences."""
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
        if self.same_tokens is not None and self.same_tokens < LEAST_SAME_TOKENS:
            found.append(
                f"{self.runtime} splits text differently from the tokenizer it was trained with: "
                f"{100 * (1 - self.same_tokens):.0f} % of the tokens differ."
            )
        if self.lost_tokens:
            found.append(
                f"{self.runtime} takes {' and '.join(self.lost_tokens)}, which the model learned "
                "as one token, for plain text."
            )
        return tuple(found)

    @property
    def keep(self) -> bool:
        """True if there is no reason against keeping it."""
        return not self.problems


def share_of_same_tokens(
    rows: Sequence[Sequence[int]], tokenizer: Any, split: Callable[[str], list[int]]
) -> float:
    """Return how similarly a tokenizer and another program split texts.

    Special tokens are removed from the texts, and tokens before the first common one are ignored,
    since programs differ in the space before a text.

    Args:
        rows: token ids of the texts.
        tokenizer: tokenizer of Transformers.
        split: function that returns the tokens of a text, without any around it.

    Returns:
        Twice the number of common tokens, in order, divided by all tokens of both: 1 if equal.
    """
    same = total = 0
    for row in rows:
        text = decode(
            tokenizer, row, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ).strip()
        with bounded_tokenizer(len(text)):
            first = tokenizer.encode(text, add_special_tokens=False)
        second = split(text)
        # autojunk would ignore the frequent tokens of long texts.
        blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
        same += 2 * sum(block.size for block in blocks)
        total += len(first) + len(second)
        # The space that some programs put before a text changes only its first tokens.
        if max(blocks[0].a, blocks[0].b) <= _MOST_BEFORE:
            total -= blocks[0].a + blocks[0].b
    return same / total if total else 1.0


def find_lost_tokens(
    rows: Sequence[Sequence[int]], tokenizer: Any, split: Callable[[str], list[int]]
) -> tuple[str, ...]:
    """Return the special tokens in rows that another program splits as plain text."""
    used = {token for row in rows for token in row}
    added = {number: t for number, t in tokenizer.added_tokens_decoder.items() if number in used}
    special = {token.content: number for number, token in added.items() if token.special}
    return tuple(sorted(text for text, number in special.items() if split(text) != [number]))


def share_of_same(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """Return the share of positions at which two lists of continuations have the same token.

    A continuation counts up to its first difference, because later tokens are not comparable.

    >>> share_of_same([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]])
    0.6666666666666666
    """
    same = total = 0
    for left, right in zip(first, second, strict=True):
        total += max(len(left), len(right))
        for old, new in zip(left, right, strict=False):
            if old != new:
                break
            same += 1
    return same / total if total else 1.0
