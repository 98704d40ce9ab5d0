"""Repeating shapes of micro-batches, so that a recorded pass can be replayed for other rows.

A recording fixes every size: tokens of the flat row, segments, targets and the longest segment.
Rows of different lengths differ in all of them, so each is rounded up. The data decide how far,
such that nearly all micro-batches of one size also agree in the others.

Padding is computed like other tokens but does not count: it consists of its own segments, its
targets have no loss, and its pairs have weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.shared.micro_shapes import find_size, round_up_tokens
from agents.trainer.data.examples import Example, Examples
from agents.trainer.model.micro_batch import MicroShape

# Number of examples that show the usual number of segments and targets.
_SAMPLES = 256
# Minimum number of segments, a power of two. Empty ones cost next to nothing.
_MIN_SEGMENTS = 8
# Ratio to the usual number of segments and targets that most micro-batches do not exceed.
_ROOM = 1.25
# Smaller micro-batches have room for a target at every token: their share varies much, and the head
# costs little.
_FEW_TOKENS = 1024


class ShapeGrid:
    """Rounds the shapes of micro-batches up to a few; a pure function of the data.

    Args:
        examples: data of the run.
        sequence_tokens: limit of a segment's length, in tokens.
    """

    def __init__(self, examples: Examples, sequence_tokens: int) -> None:
        step = max(1, len(examples) // _SAMPLES)
        some = [examples[place] for place in range(0, len(examples), step)]
        num_tokens = sum(example.num_tokens for example in some)
        self._segments_per_token = sum(len(example.segments) for example in some) / num_tokens
        self._targets_per_token = sum(example.num_targets for example in some) / num_tokens
        longest = min(int(examples.num_tokens.max()), sequence_tokens)
        self._longest = round_up_tokens(longest)

    def choose(self, examples: Sequence[Example], capacity: int) -> MicroShape:
        """Return the shape of a micro-batch of these examples.

        Args:
            examples: examples of the micro-batch.
            capacity: usual limit of a micro-batch, in tokens.
        """
        lengths = [len(segment.ids) for example in examples for segment in example.segments]
        num_targets = sum(example.num_targets for example in examples)
        num_tokens = sum(lengths)
        longest = max(self._longest, round_up_tokens(max(lengths)))
        size = find_size(lengths, capacity, longest)
        num_segments = len(lengths)
        # Equal segments have faster attention, but only without an empty one among them.
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
