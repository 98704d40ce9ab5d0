"""On a GPU: thin products by the kernels are those of plain operations."""

import pytest
import torch

from agents.trainer.kernels import lora_kernels
from tests.agents.trainer.execution.test_gpu_layers import difference
from tests.draws import seed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [8, 16, 24, 64])
@pytest.mark.parametrize("widths", [(512, 256, 256), (1408, 1408), (520,)], ids=str)
def test_thin_products_by_the_kernels_are_those_of_plain_operations(dtype, rank, widths):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    draw = torch.Generator("cuda").manual_seed(seed(2))

    def make(*size):
        return torch.randn(size, generator=draw, device="cuda").to(dtype)

    low, ups = make(300, rank * len(widths)), [make(width, rank) for width in widths]
    gradients = [make(300, width) for width in widths]
    assert lora_kernels.supports(low, ups)
    parts = low.double().split(rank, dim=1)
    expected = [part @ up.double().T for part, up in zip(parts, ups, strict=True)]
    for found, exact in zip(lora_kernels.expand(low, ups), expected, strict=True):
        assert difference(found, exact) < torch.finfo(dtype).eps
    exact = [g.double() @ up.double() for g, up in zip(gradients, ups, strict=True)]
    shrunk = lora_kernels.differentiate_low(gradients, ups)
    assert difference(shrunk, torch.cat(exact, 1)) < torch.finfo(dtype).eps
    of_ups = lora_kernels.differentiate_ups(gradients, low, ups, 2.0, torch.float32)
    for found, gradient, part in zip(of_ups, gradients, parts, strict=True):
        assert difference(found, 2 * gradient.double().T @ part) < 1e-5
