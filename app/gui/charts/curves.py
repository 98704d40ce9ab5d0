"""The data of a plot: one curve per attempt of a run, without Qt.

A resume repeats steps: those of an attempt from the first step of a later attempt on were lost.
They stay visible, in another colour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.gui.charts.limits import Limits
from app.telemetry.history import Array, GrowingSeries, downsample


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled vertical line at step `x`, such as the start of an attempt."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one curve, downsampled to the width of the plot."""

    x: Array
    y: Array
    is_lost: bool


class Curves:
    """The points of all attempts; each attempt's are in order of their steps."""

    def __init__(self) -> None:
        self._series: dict[int, GrowingSeries] = {}
        self.marks: list[Mark] = []

    def __len__(self) -> int:
        return sum(len(series) for series in self._series.values())

    @property
    def attempts(self) -> list[int]:
        return sorted(self._series)

    def series(self, attempt: int) -> GrowingSeries:
        return self._series[attempt]

    def clear(self) -> None:
        self._series.clear()
        self.marks.clear()

    def extend(self, attempt: int, steps: list[float], values: list[float]) -> None:
        """Add points of an attempt; unknown values are NaN."""
        if not steps:
            return
        if attempt not in self._series:
            if self._series:
                # The first attempt needs no mark: it starts where the plot does.
                self.marks.append(Mark(steps[0], f"attempt {attempt}"))
            self._series[attempt] = GrowingSeries()
        self._series[attempt].extend(steps, values)

    def full_range(self) -> Limits:
        """Return the range of all steps, at least 1 long."""
        if not self._series:
            return Limits(0.0, 1.0)
        low = min(float(series.x[0]) for series in self._series.values())
        high = max(float(series.x[-1]) for series in self._series.values())
        return Limits(low, max(high, low + 1))

    def visible(self, view: Limits, num_columns: int) -> list[Piece]:
        """Return the parts in `view`, downsampled to two points per column; lost steps first.

        Lost steps come first so that the curve that counts is painted over them.
        """
        lost: list[Piece] = []
        kept: list[Piece] = []
        repeated_from = math.inf
        # Newest first: an attempt is lost from the first step of any later one on.
        for attempt in sorted(self._series, reverse=True):
            series = self._series[attempt]
            # One point beyond each edge, so that the curve runs out of the plot.
            first = max(int(np.searchsorted(series.x, view.low)) - 1, 0)
            end = int(np.searchsorted(series.x, view.high, side="right")) + 1
            turn = int(np.searchsorted(series.x, repeated_from))
            for part, pieces in (
                # From the last kept point on, so that no gap opens between the two colours.
                (slice(max(first, turn - 1), end), lost),
                (slice(first, min(end, turn)), kept),
            ):
                is_there = part.start < min(part.stop, len(series))
                if is_there and (pieces is kept or turn < len(series)):
                    x, y = downsample(series.x[part], series.y[part], num_columns)
                    # A piece may consist of nothing but the extra points beyond the edges.
                    if x[0] <= view.high and x[-1] >= view.low:
                        pieces.append(Piece(x, y, is_lost=pieces is lost))
            repeated_from = min(repeated_from, float(series.x[0]))
        return lost + kept

    def value_at(self, step: float) -> tuple[float, float, int] | None:
        """Return (step, value, attempt) nearest to `step` in the newest attempt that covers it."""
        for attempt in sorted(self._series, reverse=True):
            series = self._series[attempt]
            # From half a step before it, the first point of the attempt is the nearest step.
            if step >= series.x[0] - 0.5:
                right = min(int(np.searchsorted(series.x, step)), len(series) - 1)
                near = max(right - 1, 0)
                if abs(series.x[right] - step) < abs(series.x[near] - step):
                    near = right
                return float(series.x[near]), float(series.y[near]), attempt
        return None
