"""Attention with caps, sinks and wide heads equals its formula, gradients included.

The kernels run on a GPU, or without one in Triton's interpreter where triton is installed:
`TRITON_INTERPRET=1 pytest tests/agents/trainer/kernels/test_segment_attention.py`.
"""

import itertools
import os

import pytest
import torch

from agents.trainer.kernels import compiling, segment_attention, segment_launcher, segment_loop
from tests.draws import seed

CPU = torch.device("cpu")
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
CASES = [  # lengths, query heads, key heads, widths, window, cap, sinks
    ((20, 1, 37, 0, 0), 4, 2, (16, 16), 0, 0.0, False),
    ((70,), 2, 2, (32, 32), 0, 5.0, False),
    ((33, 50), 4, 1, (24, 24), 17, 0.0, True),
    ((64, 16, 1, 1, 1, 15), 2, 1, (16, 16), 16, 3.0, True),
    ((90, 0, 0), 8, 2, (16, 16), 40, 0.0, True),
    ((5, 3), 6, 2, (80, 48), 2, 0.0, False),
    ((17, 17, 17, 0), 2, 2, (16, 16), 18, 2.0, True),
]
LARGE = [  # what models have: Gemma 2 2B and 27B, gpt-oss, Gemma 4, DeepSeek's two widths
    ((700, 1, 300, 23, 0), 8, 4, (256, 256), 128, 50.0, False),
    ((900, 124), 32, 16, (128, 128), 0, 50.0, False),
    ((513, 255, 256), 16, 2, (64, 64), 128, 0.0, True),
    ((400, 100), 4, 1, (512, 512), 0, 0.0, False),
    ((300, 212), 4, 4, (192, 128), 0, 0.0, False),
]


def compute_by_formula(query, key, value, bounds, sinks, scale, window, cap):
    outs = []
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    for start, stop in itertools.pairwise(bounds):
        scores = torch.einsum("mhd,nhd->hmn", query[start:stop], key[start:stop]) * scale
        scores = torch.tanh(scores / cap) * cap if cap else scores
        place = torch.arange(stop - start, device=query.device)
        distance = place[:, None] - place
        allowed = (distance >= 0) & (distance < (window or stop + 1))
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None:
            sink = sinks[:, None, None].expand(-1, stop - start, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        outs.append(torch.einsum("hmn,nhe->mhe", weights, value[start:stop]))
    return torch.cat(outs)


def make_inputs(case, dtype, device):
    lengths, heads, key_heads, (width, value_width), _, _, has_sinks = case
    draw = torch.Generator().manual_seed(seed(4))
    bounds = [0, *itertools.accumulate(lengths)]

    def make(*size):
        return torch.randn(*size, generator=draw).to(device, dtype)

    query = make(heads, bounds[-1], width).transpose(0, 1)  # as Transformers lays them out
    key = make(key_heads, bounds[-1], width).transpose(0, 1)
    value = make(bounds[-1], key_heads, value_width)
    sinks = make(heads) if has_sinks else None
    return [query, key, value, sinks], make(bounds[-1], heads, value_width), bounds


def differentiate(compute, inputs, gradient):
    """Return the output and the gradients of all inputs."""
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    out = compute(*inputs)
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None], gradient)]


def measure_errors(case, dtype, device):
    """Return the errors of output and gradients relative to those of the formula in fp64."""
    *_, window, cap, _ = case
    inputs, gradient, bounds = make_inputs(case, dtype, device)
    host = torch.tensor(bounds, dtype=torch.int32)
    scale = 1.3 * inputs[0].shape[2] ** -0.5

    def attend(query, key, value, sinks):
        return segment_attention.attend(
            query, key, value, host.to(device), host,
            sinks_H=sinks, scale=scale, window=window, softcap=cap,
        )  # fmt: skip

    def refer(query, key, value, sinks):
        return compute_by_formula(query, key, value, bounds, sinks, scale, window, cap)

    found = differentiate(attend, inputs, gradient)
    again = differentiate(attend, inputs, gradient)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    exact = [None if x is None else x.double() for x in inputs]
    expected = differentiate(refer, exact, gradient.double())
    return [
        ((one.double() - other).norm() / other.norm()).item()
        for one, other in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loop_equals_the_formula(case, monkeypatch):
    assert max(measure_errors(case, torch.float64, CPU)) < 1e-12
    monkeypatch.setattr(segment_loop, "_MAX_SCORES", 100)  # the heads one after the other
    assert max(measure_errors(case, torch.float64, CPU)) < 1e-12


def test_the_operator_keeps_its_promises_to_the_compiler():
    inputs, _, bounds = make_inputs(CASES[3], torch.float32, CPU)
    host = torch.tensor(bounds, dtype=torch.int32)
    inputs = [x.detach().requires_grad_() for x in inputs]
    given = (*inputs[:3], host, host, inputs[3], 0.3, 16, 3.0)
    torch.library.opcheck(segment_attention._attend, given)


def test_bounds_of_the_host_are_not_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    assert segment_loop.read_bounds(bounds, CPU) == [0, 3]
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        segment_loop.read_bounds(bounds, torch.device("cuda"))


def test_a_card_that_refuses_the_kernels_does_without_them(monkeypatch, capsys):
    def refuse(*given):
        raise ValueError("out of resource: shared memory")

    segment_attention.has_kernel.cache_clear()
    monkeypatch.setattr(compiling, "find_obstacle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(segment_launcher, "attend", refuse)
    assert not segment_attention.has_kernel(CPU, torch.float16, 64, 64)
    assert not segment_attention.has_kernel(CPU, torch.float16, 64, 64)
    assert capsys.readouterr().err.count("segment by segment: out of resource") == 1
    assert not segment_attention.has_kernel(CPU, torch.float64, 64, 64)
    assert not segment_attention.has_kernel(CPU, torch.float16, 1024, 64)
    segment_attention.has_kernel.cache_clear()


@pytest.mark.skipif(not IN_INTERPRETER, reason="needs Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of rows beyond a segment, never stored
@pytest.mark.parametrize("tile", [(16, 16), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernels_equal_the_formula(case, tile, monkeypatch):
    for name in ("_FORWARD", "_QUERIES", "_KEYS"):
        tiles = (segment_launcher.Tile(*tile, num_warps=4, num_stages=1),)
        monkeypatch.setattr(segment_launcher, name, {64: tiles, 128: tiles})
    monkeypatch.setattr(segment_launcher, "_chosen", {})
    is_small = tile == (16, 16)
    monkeypatch.setattr(segment_launcher, "_is_small", lambda query, keys: is_small)
    monkeypatch.setattr(segment_attention, "_takes_kernel", lambda *given: True)
    assert max(measure_errors(case, torch.float32, CPU)) < 2e-6
    assert max(measure_errors(case, torch.float16, CPU)) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_kernels_equal_the_formula(case, dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", 0)
    if not segment_attention.has_kernel(device, dtype, *case[3]):
        pytest.skip("needs a newer GPU")
    assert max(measure_errors(case, dtype, device)) < 2 * torch.finfo(dtype).eps
