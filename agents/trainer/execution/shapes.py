"""Shapes of micro-batches that repeat, so that a recorded pass can be replayed for other rows.

A recording fixes every size: tokens of the flat row, segments, targets and the longest segment.
Rows of unlike length have all of them different, so each is rounded up. How far follows from the
data, such that nearly all micro-batches of one size also agree in the rest.

Padding is computed like any other tokens and counts for nothing: it consists of segments of its
own, its targets have no loss, and its pairs have weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.micro_shapes import find_size, round_up_tokens
from agents.trainer.data.examples import Example, Examples
from agents.trainer.model.micro_batch import MicroShape

# Examples from which the usual number of segments and targets is learned.
_SAMPLES = 256
# Least number of segments, a power of two. Empty ones cost next to nothing.
_MIN_SEGMENTS = 8
# More than the usual number of segments and targets, so that most micro-batches have no more.
_ROOM = 1.25
# Micro-batches of fewer tokens have room for a target at each: their share varies much, and the
# head costs little.
_FEW_TOKENS = 1024


class ShapeGrid:
    """Rounds the shapes of micro-batches up to a few; a pure function of the data.

    Args:
        examples: Data of the run.
        sequence_tokens: Limit of a segment's length, in tokens.
    """

    def __init__(self, examples: Examples, sequence_tokens: int) -> None:
        step = max(1, len(examples) // _SAMPLES)
        some = [examples[place] for place in range(0, len(examples), step)]
        num_tokens = sum(one.num_tokens for one in some)
        self._segments_per_token = sum(len(one.segments) for one in some) / num_tokens
        self._targets_per_token = sum(one.num_targets for one in some) / num_tokens
        longest = min(int(examples.num_tokens.max()), sequence_tokens)
        self._longest = round_up_tokens(longest)

    def choose(self, examples: Sequence[Example], capacity: int) -> MicroShape:
        """Return the shape of a micro-batch of these examples.

        Args:
            examples: Examples of the micro-batch.
            capacity: Usual limit of a micro-batch, in tokens.
        """
        lengths = [len(segment.ids) for one in examples for segment in one.segments]
        num_targets = sum(one.num_targets for one in examples)
        num_tokens = sum(lengths)
        longest = max(self._longest, round_up_tokens(max(lengths)))
        size = find_size(lengths, capacity, longest)
        num_segments = len(lengths)
        # Segments of one length have faster attention, as long as no empty one is among them.
        if min(lengths) < longest:
            num_pads = -(-(size - num_tokens) // longest)
            num_segments = self._round_segments(num_segments + num_pads, size)
        return MicroShape(
            num_tokens=size,
            num_segments=num_segments,
            num_targets=self._round_targets(num_targets, size),
            longest=longest,
        )

    def _round_segments(self, needed: int, num_tokens: int) -> int:
        usual = int(num_tokens * self._segments_per_token * _ROOM)
        return max(_MIN_SEGMENTS, 1 << (max(needed, usual) - 1).bit_length())

    def _round_targets(self, needed: int, num_tokens: int) -> int:
        usual = round_up_tokens(int(num_tokens * self._targets_per_token * _ROOM))
        return usual if needed <= usual < num_tokens and num_tokens > _FEW_TOKENS else num_tokens
