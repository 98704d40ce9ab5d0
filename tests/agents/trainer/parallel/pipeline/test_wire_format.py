"""Features arrive as they were sent, or in 8 bits with a known error."""

from __future__ import annotations

import pytest
import torch

from agents.trainer.parallel.pipeline.wire_format import WireFormat
from tests.draws import seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_stages_compute_with_arrives_bit_by_bit(dtype):
    wire = WireFormat(96, dtype)
    hidden = torch.randn(5, 96).to(dtype)
    message = wire.encode(hidden)
    assert message.nbytes == 5 * wire.row_bytes
    assert torch.equal(wire.decode(message), hidden)


@pytest.mark.parametrize("width", [64, 200])
def test_eight_bits_cost_half_the_bytes_and_less_than_a_hundredth(width):
    torch.manual_seed(seed(0))
    wire = WireFormat(width, torch.bfloat16, bits=8)
    hidden = torch.randn(300, width)
    hidden[:, 3] *= 50  # as in residual streams: one feature is far larger
    message = wire.encode(hidden)
    assert message.shape == wire.make_buffer(300).shape
    found = wire.decode(message).float()
    # Blocks without the large feature: 127 steps to the largest of 64 values.
    error = (found - hidden)[:, 64:].norm() / hidden[:, 64:].norm().clamp(min=1)
    assert error < 0.01
    steps = hidden.abs().amax(1, keepdim=True) / 127
    # Half a step, and the rounding to bf16.
    assert ((found - hidden).abs() <= 0.51 * steps + hidden.abs() / 128).all()
    assert torch.equal(wire.encode(torch.zeros(2, width)), wire.encode(torch.zeros(2, width)))
    assert torch.equal(
        wire.decode(wire.encode(torch.zeros(2, width))).float(), torch.zeros(2, width)
    )


def test_eight_bits_halve_the_message_of_a_wide_model():
    assert WireFormat(8192, torch.bfloat16, bits=8).row_bytes == pytest.approx(8192, rel=0.07)
