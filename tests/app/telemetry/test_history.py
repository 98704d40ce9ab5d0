"""Rings, growing series and downsampling: order, no lost peak, gaps stay gaps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from app.telemetry.history import GrowingSeries, Ring, downsample, finite_parts


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.integers(1, 12))
def test_a_ring_shows_the_newest_rows_oldest_first(values, capacity):
    ring = Ring(2, capacity)
    for value in values:
        ring.append((value, None))
    view = ring.view()
    assert view[0].tolist() == values[-capacity:]
    assert np.isnan(view[1]).all()
    assert len(ring) == min(len(values), capacity)
    assert view[0].base is not None, "a view, not a copy"


def test_a_growing_series_keeps_every_point_over_many_enlargements():
    series = GrowingSeries()
    for start in range(0, 5000, 7):
        series.extend(range(start, start + 7), [2.0 * v for v in range(start, start + 7)])
    assert len(series) == 5005
    assert series.x.tolist() == list(range(5005))
    assert (series.y == 2 * series.x).all()


@given(
    hnp.arrays(np.float64, st.integers(1, 400), elements=st.floats(-1e9, 1e9)), st.integers(1, 40)
)
def test_downsampling_keeps_the_extremes_and_invents_nothing(y, num_buckets):
    x = np.arange(len(y), dtype=np.float64)
    small_x, small_y = downsample(x, y, num_buckets)
    assert small_y.max() == y.max()
    assert small_y.min() == y.min()
    assert len(small_y) <= max(2 * num_buckets, len(y) if len(y) <= 2 * num_buckets else 0)
    assert (np.diff(small_x) > 0).all(), "old order"
    assert (y[small_x.astype(int)] == small_y).all(), "real points only"


def test_a_single_peak_in_a_million_points_survives():
    y = np.zeros(1_000_000)
    y[654_321] = 7.0
    x, small = downsample(np.arange(1e6), y, 500)
    assert x[np.argmax(small)] == 654_321
    assert small.max() == 7.0


def test_values_that_are_not_finite_hide_no_peak_and_an_empty_bucket_stays_a_gap():
    y = np.array([np.nan, 5.0, np.inf, 1.0] * 10 + [np.nan] * 40)
    _, small = downsample(np.arange(80.0), y, 8)
    finite = small[np.isfinite(small)]
    assert finite.max() == 5.0
    assert finite.min() == 1.0
    assert np.isnan(small[-1])


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ([], []),
        ([1.0, 2.0], [(0, 2)]),
        ([np.nan, 1.0, np.nan, 2.0, 3.0], [(1, 2), (3, 5)]),
        ([np.nan], []),
    ],
)
def test_finite_parts(values, parts):
    assert [(p.start, p.stop) for p in finite_parts(np.array(values))] == parts
