"""On a GPU: losses by the kernel are those of plain operations."""

import pytest
import torch

from agents.trainer.kernels.cross_entropy import compute_losses
from agents.trainer.model.micro_batch import NO_LABEL
from tests.draws import seed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("vocab_size", "scale", "softcap"), [(700, 1.0, None), (20_001, 0.25, None), (999, 0.5, 2.0)]
)
def test_losses_by_the_kernel_are_those_of_plain_operations(dtype, vocab_size, scale, softcap):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    draw = torch.Generator("cuda").manual_seed(seed(2))
    logits = (3 * torch.randn(37, vocab_size, generator=draw, device="cuda")).to(dtype)
    label = torch.randint(vocab_size, (37,), generator=draw, device="cuda")
    exact = logits.double().requires_grad_()
    label[5] = NO_LABEL
    capped = softcap * torch.tanh(exact * scale / softcap) if softcap else exact * scale
    losses = torch.nn.functional.cross_entropy(
        capped, label, reduction="none", ignore_index=NO_LABEL
    )
    (expected,) = torch.autograd.grad(128 * losses.sum(), exact)
    kept = logits.clone()
    found = compute_losses(logits, label, scale, softcap, wants_gradient=False)
    assert torch.allclose(found.double(), losses, atol=1e-5)
    assert torch.equal(logits, kept)
    factor = torch.full((), 128.0, device="cuda")
    found = compute_losses(
        logits, label, scale, softcap, wants_gradient=True, gradient_scale=factor
    )
    assert torch.allclose(found.double(), losses, atol=1e-5)
    assert torch.allclose(logits.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
