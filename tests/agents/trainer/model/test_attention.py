"""Attention within segments, apart from any model."""

import pytest
import torch

from agents.trainer.model.attention import Segments, attend_segments
from tests.draws import seed


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_wide_queries_beside_narrow_values_are_computed_as_autocast_would(softcap):
    """As they come in full training, where the rotary embedding is fp32."""
    torch.manual_seed(seed(0))
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    segments = Segments.of([5, 4], torch.device("cpu"))
    bounds = {
        "bounds_S": segments.bounds_S,
        "host_bounds_S": segments.host_bounds_S,
        "host_extent_2": segments.host_extent_2,
    }
    narrow = [x.bfloat16() for x in (query, key, value)]
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _ = attend_segments(None, query, key, narrow[2], None, **bounds, softcap=softcap)
        expected, _ = attend_segments(None, *narrow, None, **bounds, softcap=softcap)
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, expected)


@pytest.mark.parametrize("lengths", [[13, 4, 6, 12], [5, 3], [18]])
def test_chunks_begin_anew_in_each_segment_on_host_and_device(lengths):
    segments = Segments.of(lengths, torch.device("cpu"))
    place = torch.cat([torch.arange(length) for length in lengths])
    chunks = segments.split(6, place)
    pieces = [min(6, length - start) for length in lengths for start in range(0, length, 6)]
    assert chunks.bounds == Segments.of(pieces, torch.device("cpu")).bounds
    # Their number follows from sizes alone, so some may be empty.
    assert chunks.bounds_S.unique().tolist() == sorted(set(chunks.bounds))
    assert int(chunks.host_extent_2[0]) >= max(pieces)
