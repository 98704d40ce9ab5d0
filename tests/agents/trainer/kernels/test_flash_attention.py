"""FlashAttention as an operator of compiled layers."""

import pytest
import torch

from agents.trainer.kernels.flash_attention import flash_attention
from tests.draws import seed


@pytest.mark.gpu
def test_the_order_of_axes_in_memory_changes_nothing():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(seed(0))
    query, key, value = (torch.randn(heads, 96, 64, **kind) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 60, 96], dtype=torch.int32, device="cuda")
    extent = torch.tensor([60, 0], dtype=torch.int32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(query, key, value):
        # An operation after each input leaves the order that the input has.
        heads_second = [(2 * x).transpose(0, 1) for x in (query, key, value)]
        return flash_attention(*heads_second, bounds, extent, 0.125, 0)

    inputs = [x.requires_grad_() for x in (query, key, value)]
    found = attend(*inputs)
    gradients = torch.autograd.grad(found.square().sum(), inputs)
    tokens_first = [(2 * x.detach()).transpose(0, 1).contiguous() for x in inputs]
    plain = [x.requires_grad_() for x in tokens_first]
    expected = flash_attention(*plain, bounds, extent, 0.125, 0)
    assert torch.equal(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), plain)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one.transpose(0, 1), 2 * other, rtol=0.02, atol=0.02)
