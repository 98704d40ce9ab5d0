"""cuDNN's deterministic gradient: how its work is divided, and what a Hopper card computes."""

import pytest
import torch

from agents.trainer.kernels import cudnn_attention
from agents.trainer.kernels.cudnn_attention import MAX_SCRATCH_BYTES, divide
from tests.draws import seed


def test_sequences_are_divided_before_heads():
    asked = []

    def scratch(sequences, keys):
        asked.append((sequences, keys))
        return sequences * keys * (MAX_SCRATCH_BYTES // 8)

    assert divide(3, 32, scratch) == (1, 8)
    assert asked == [(3, 32), (2, 32), (1, 32), (1, 16), (1, 8)]


def test_what_fits_is_taken_at_once_and_a_refusal_ends_it():
    assert divide(4, 6, lambda sequences, keys: MAX_SCRATCH_BYTES) == (4, 6)
    assert divide(4, 6, lambda sequences, keys: None) is None
    assert divide(1, 5, lambda sequences, keys: MAX_SCRATCH_BYTES + 1) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sequences", "length", "heads", "keys", "width"),
    [(1, 2048, 32, 32, 128), (5, 2048, 32, 8, 128), (9, 512, 12, 12, 64), (1, 4096, 16, 4, 128)],
)
def test_gradients_are_the_same_every_time_and_right(sequences, length, heads, keys, width):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper card")
    torch.manual_seed(seed(0))
    wide, narrow = (sequences * length, heads, width), (sequences * length, keys, width)
    query, key, value, gradient = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in (wide, narrow, narrow, wide)
    )
    scale = width**-0.5
    bounds = torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device="cuda")
    aten = torch.ops.aten
    settings = (bounds, bounds, length, length, 0.0, True)
    out, lse, *_ = aten._flash_attention_forward(query, key, value, *settings, False, scale=scale)
    inputs = (gradient, query, key, value, out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = cudnn_attention.differentiate(inputs, lse, length, scale)
    assert found is not None
    taken = torch.cuda.max_memory_allocated() - before
    results = sum(x.numel() * x.element_size() for x in found)
    assert taken < results + MAX_SCRATCH_BYTES + (8 << 20)
    for _ in range(5):
        again = cudnn_attention.differentiate(inputs, lse, length, scale)
        assert all(torch.equal(one, two) for one, two in zip(found, again, strict=True))
    unused = torch.zeros(2, dtype=torch.uint64, device="cuda")
    expected = aten._flash_attention_backward(
        gradient, query, key, value, out, lse, *settings, unused, unused, scale=scale
    )
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).norm() < 0.01 * other.norm()
