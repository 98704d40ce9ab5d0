"""Linear attention over flat rows against its recurrence, one token at a time."""

import pytest
import torch

from agents.trainer.kernels.linear_attention import attend_linearly, convolve
from tests.draws import seed


def read_states(query, key, value, decay, strength, lengths, scale, normalizes):
    """The recurrence as the papers write it; a state of zeros begins each segment."""
    times = value.shape[1] // query.shape[1]
    if normalizes:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(times, 1) for x in (query * scale, key))
    rows, token = [], 0
    for length in lengths:
        state = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1])
        for _ in range(length):
            state = state * decay[token].exp()[:, None, None]
            new = value[token]
            if strength is not None:
                known = torch.einsum("hkv,hk->hv", state, key[token])
                new = strength[token][:, None] * (new - known)
            state = state + key[token][:, :, None] * new[:, None, :]
            rows.append(torch.einsum("hkv,hk->hv", state, query[token]))
            token += 1
    return torch.stack(rows)


def draw(num_tokens, heads=(2, 4), widths=(5, 3)):
    torch.manual_seed(seed(num_tokens))
    query, key = (torch.randn(num_tokens, heads[0], widths[0]) for _ in range(2))
    value = torch.randn(num_tokens, heads[1], widths[1])
    decay = -torch.rand(num_tokens, heads[1])
    strength = torch.rand(num_tokens, heads[1])
    return [x.double().requires_grad_() for x in (query, key, value, decay, strength)]


# Segments within a chunk, over several chunks, ending with one, of one token.
ROWS = [[7], [64, 64], [3, 61, 5, 1], [130, 1, 40, 90]]


@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize("is_delta", [True, False])
def test_a_flat_row_is_what_the_recurrence_makes_of_each_segment(lengths, is_delta):
    inputs = draw(sum(lengths))
    if not is_delta:
        inputs[4] = None
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    out = attend_linearly(*inputs, segment.int(), 0.5, is_delta)
    expected = read_states(*inputs, lengths, 0.5, is_delta)
    assert torch.allclose(out, expected, atol=1e-11, rtol=1e-9)
    weights = torch.randn_like(out)
    leaves = [x for x in inputs if x is not None]
    found = torch.autograd.grad((out * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-10, rtol=1e-8)
    # As the compiler is told, which asserts it on a GPU.
    assert all(one.is_contiguous() for one in found)


def test_it_is_a_sound_operation_to_the_compiler():
    inputs = [x.detach().float().requires_grad_() for x in draw(70)]
    segment = torch.tensor([0] * 30 + [1] * 40, dtype=torch.int32)
    arguments = (*inputs, segment, 1.0, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attend_linearly, arguments, test_utils=checks)
    torch.library.opcheck(attend_linearly, (*inputs[:4], None, *arguments[5:]), test_utils=checks)


def test_only_its_inputs_are_kept_for_the_backward_pass():
    kept = []
    inputs = draw(200)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        attend_linearly(*inputs, torch.zeros(200, dtype=torch.int32), 1.0, True)
    assert sum(x.numel() for x in kept) == sum(x.numel() for x in inputs) + 200


def test_autocast_does_not_narrow_it():
    inputs = [x.detach().float() for x in draw(90)]
    segment = torch.zeros(90, dtype=torch.int32)
    expected = attend_linearly(*inputs, segment, 1.0, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend_linearly(*inputs, segment, 1.0, True), expected)


def test_a_convolution_begins_anew_in_each_segment():
    torch.manual_seed(seed(1))
    x, weight, bias = torch.randn(1, 6, 11), torch.randn(6, 4), torch.randn(6)
    lengths = [5, 1, 3, 2]
    place = torch.cat([torch.arange(n) for n in lengths])
    found = convolve(x, weight, bias, place)
    parts = []
    for part in x.split(lengths, -1):
        plain = torch.nn.functional.conv1d(part, weight[:, None], bias, padding=3, groups=6)
        parts.append(plain[..., : part.shape[-1]])
    assert torch.allclose(found, torch.cat(parts, -1), atol=1e-6)
