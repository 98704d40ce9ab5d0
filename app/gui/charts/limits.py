"""The range that an axis shows, and how zooming and panning change it; pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.telemetry.history import Array


@dataclass(frozen=True, slots=True)
class Limits:
    low: float
    high: float

    @property
    def span(self) -> float:
        return self.high - self.low

    def zoomed(self, factor: float, around: float) -> Limits:
        """Return the range scaled by `factor`, keeping `around` at the same place on screen."""
        return Limits(around - (around - self.low) * factor, around + (self.high - around) * factor)

    def moved(self, distance: float) -> Limits:
        return Limits(self.low + distance, self.high + distance)

    def inside(self, whole: Limits, minimum: float) -> Limits:
        """Return the range clamped to `whole`, and at least `minimum` long."""
        span = min(max(self.span, minimum), max(whole.span, minimum))
        middle = (self.low + self.high) / 2
        low = min(max(middle - span / 2, whole.low), max(whole.high - span, whole.low))
        return Limits(low, low + span)


def fit_values(values: Array, *, from_zero: bool) -> Limits:
    """Return a range around the finite `values`, with 8 % of margin.

    The highest and lowest 0.1 % are ignored, so that one outlier does not flatten the curve; it is
    drawn at the edge.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return Limits(0.0, 1.0)
    # In place: indexing with a mask has made a copy.
    finite.sort()
    outside = len(finite) // 1000
    low, high = float(finite[outside]), float(finite[-1 - outside])
    # A flat curve has no range of its own, and one at 0 has no size either.
    air = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return Limits(0.0 if from_zero else low - air, high + air)
