"""Optimizer steps on the stream that wrote the gradients."""

import pytest
import torch
from torch import nn

from agents.trainer.optim.optimizer import take_step
from tests.draws import seed


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW8bit"])
def test_a_step_waits_for_gradients_and_what_follows_waits_for_it(kind):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    make = getattr(pytest.importorskip("bitsandbytes.optim"), kind)
    draw = torch.Generator("cuda").manual_seed(seed(0))
    start, *gradients = torch.randn(4, 1 << 20, device="cuda", generator=draw)

    def train(stream, sleep_cycles):
        weight = nn.Parameter(start.clone())
        weight.grad = torch.zeros_like(start)
        optimizer = make([weight], lr=1e-2)
        seen = []
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for gradient in gradients:
                torch.cuda._sleep(sleep_cycles)  # the card is still busy as the host goes on
                weight.grad.copy_(gradient)
                take_step(optimizer)
                seen.append(weight.detach().clone())
        torch.cuda.synchronize()
        return torch.stack(seen)

    expected = train(torch.cuda.default_stream(), 0)
    assert torch.equal(train(torch.cuda.Stream(), 100_000_000), expected)
