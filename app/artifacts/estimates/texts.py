"""Amount of text an export works on, as agents/quantizers/job/texts.py selects it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 512
"""Maximum number of tokens of a row; longer rows are truncated."""
CALIBRATION_ROWS, HELD_OUT_ROWS = 128, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSizes:
    """Sizes of the rows for calibration and for the proof."""

    calibration_rows: int = CALIBRATION_ROWS
    held_out_rows: int = HELD_OUT_ROWS
    mean_tokens: float = MOST_TOKENS
    """Mean length of a row, in tokens."""
    longest_tokens: int = MOST_TOKENS
    """Length of the longest row, which decides the memory, in tokens."""

    @property
    def calibration_tokens(self) -> float:
        return self.calibration_rows * self.mean_tokens

    @property
    def block_tokens(self) -> float:
        """Number of calibration tokens after AWQ's joining and division into whole blocks."""
        tokens = self.calibration_tokens
        return tokens - tokens % MOST_TOKENS if tokens > MOST_TOKENS else tokens


MOST_TEXTS = TextSizes()
"""Sizes assumed for unknown data."""


def size_texts(
    num_rows: int | None, mean_tokens: float | None, longest_tokens: int | None
) -> TextSizes:
    """Return the sizes of the texts taken from a run's training data; None: not known.

    >>> size_texts(40, 100.0, 900)
    TextSizes(calibration_rows=30, held_out_rows=32, mean_tokens=100.0, longest_tokens=512)
    """
    most = num_rows if num_rows is not None else CALIBRATION_ROWS + HELD_OUT_ROWS
    # Without evaluation data the last rows are held out for the proof, so count without them.
    apart = min(HELD_OUT_ROWS, most // 4)
    return TextSizes(
        calibration_rows=max(1, min(CALIBRATION_ROWS, most - apart)),
        mean_tokens=max(1.0, min(mean_tokens or MOST_TOKENS, MOST_TOKENS)),
        longest_tokens=min(longest_tokens or MOST_TOKENS, MOST_TOKENS),
    )
