"""Time series for charts: rings for devices, growing series for runs, and downsampling.

Unknown values are NaN, since the arrays hold floats. Downsampling keeps the minimum and maximum of
each bucket, so that a peak of a single sample is visible at every zoom level.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Ring:
    """Ring of the newest `capacity` rows of `num_series` values each, readable without a copy.

    Each value is written twice, `capacity` apart, so that the newest rows are always contiguous and
    `view` is a slice.
    """

    def __init__(self, num_series: int, capacity: int) -> None:
        self.capacity = capacity
        self._values = np.full((num_series, 2 * capacity), np.nan)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, self.capacity)

    def append(self, values: Sequence[float | None]) -> None:
        """Add one row; None becomes NaN."""
        row = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
        position = self._count % self.capacity
        self._values[:, position] = row
        self._values[:, position + self.capacity] = row
        self._count += 1

    def view(self) -> Array:
        """Return (num_series, len) values, oldest first; valid until the next `append`."""
        if self._count <= self.capacity:
            return self._values[:, : self._count]
        start = self._count % self.capacity
        return self._values[:, start : start + self.capacity]


class GrowingSeries:
    """Points (x, y) in the order of arrival; the capacity doubles when needed."""

    def __init__(self) -> None:
        self._points = np.empty((2, 256))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def x(self) -> Array:
        return self._points[0, : self._count]

    @property
    def y(self) -> Array:
        return self._points[1, : self._count]

    def extend(self, x: Sequence[float] | Array, y: Sequence[float] | Array) -> None:
        """Append points."""
        needed = self._count + len(x)
        if needed > self._points.shape[1]:
            grown = np.empty((2, max(needed, 2 * self._points.shape[1])))
            grown[:, : self._count] = self._points[:, : self._count]
            self._points = grown
        self._points[0, self._count : needed] = x
        self._points[1, self._count : needed] = y
        self._count = needed


def downsample(x: Array, y: Array, num_buckets: int) -> tuple[Array, Array]:
    """Return at most `2 * num_buckets` of the points: each bucket's minimum and maximum of y.

    Only existing points are returned, in their order. Values that are not finite are ignored, but a
    bucket without finite values keeps its first point, so that a gap stays visible.
    """
    count = len(y)
    if num_buckets < 1 or count <= 2 * num_buckets:
        return x, y
    size = -(-count // num_buckets)
    finite = np.isfinite(y)
    lows = highs = y
    # argmin would return the index of a NaN, so replace it by a value that is never the minimum.
    if not finite.all():
        lows, highs = np.where(finite, y, np.inf), np.where(finite, y, -np.inf)
    keep = np.concatenate((_find_lowest(lows, size), _find_lowest(-highs, size)))
    keep.sort()  # np.unique would first import numpy.ma, which takes 30 ms during a frame
    keep = keep[np.concatenate(([True], keep[1:] != keep[:-1]))]
    return x[keep], y[keep]


def _find_lowest(values: Array, size: int) -> NDArray[np.intp]:
    """Return the index of the smallest value in each `size` values; the last bucket is shorter."""
    whole = len(values) // size
    # A reshaped view lets numpy search all buckets in one call, without a copy.
    buckets = values[: whole * size].reshape(whole, size)
    found: NDArray[np.intp] = buckets.argmin(axis=1) + np.arange(whole) * size
    if whole * size == len(values):
        return found
    rest = whole * size + int(values[whole * size :].argmin())
    return np.append(found, rest)


def finite_parts(y: Array) -> list[slice]:
    """Return the contiguous finite parts of `y`, as slices."""
    finite = np.isfinite(y)
    if finite.all():
        return [slice(0, len(y))] if len(y) else []
    # A False at both ends gives each part a start and an end.
    turns = np.flatnonzero(np.diff(np.concatenate(([False], finite, [False])).astype(np.int8)))
    return [
        slice(int(first), int(last)) for first, last in zip(turns[::2], turns[1::2], strict=True)
    ]
