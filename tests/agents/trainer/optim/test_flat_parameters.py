"""The norm of all gradients is right however many there are, and shows an overflow."""

from __future__ import annotations

import pytest
import torch

from agents.trainer.optim.flat_parameters import compute_norm
from tests.draws import seed


def test_the_norm_of_many_values_is_that_of_float64():
    values = torch.randn(1 << 25, generator=torch.Generator().manual_seed(seed(1)))
    values[: 1 << 24] *= 1e-3  # as of layers with small gradients
    exact = sum(part.double().square().sum() for part in values.split(1 << 20)).sqrt()
    assert compute_norm(values).item() == pytest.approx(exact.item(), rel=1e-5)
    assert compute_norm(values).dtype == torch.float32


def test_the_norm_of_few_values_is_that_of_torch_to_the_bit():
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(seed(1)))
    assert torch.equal(compute_norm(values), torch.linalg.vector_norm(values))


@pytest.mark.parametrize("overflow", [float("inf"), float("nan")])
def test_one_overflow_makes_the_norm_not_finite(overflow):
    values = torch.ones(1 << 18)
    values[-1] = overflow
    assert not compute_norm(values).isfinite()
