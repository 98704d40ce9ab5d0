"""Hessians are summed, reordered and factored in place, as Cholesky's method has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agents.quantizers.formats import hessian
from agents.quantizers.formats.hessian import add_squares, factor_inverse, reorder
from tests.agents.quantizers.own_memory import OwnMemory
from tests.draws import seed


def make_inputs(num_tokens: int, num_inputs: int) -> Tensor:
    """Return inputs of unlike size that have much in common, as those of layers have."""
    torch.manual_seed(seed(num_inputs))
    common = 0.5 * torch.randn(num_tokens, 1)
    return common + torch.randn(num_tokens, num_inputs) * torch.rand(num_inputs).mul(3).exp()


def make_hessian(num_inputs: int) -> Tensor:
    inputs = make_inputs(2 * num_inputs, num_inputs)
    return inputs.t() @ inputs / num_inputs


def factor_usually(squares: Tensor, damping: float) -> Tensor:
    wide = squares.double()
    wide.diagonal().add_(damping * wide.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    return torch.linalg.cholesky(inverse, upper=True)


@pytest.mark.parametrize("block", [64, 100, 512])
def test_the_factor_is_that_of_the_inverse(block, monkeypatch):
    monkeypatch.setattr(hessian, "_BLOCK", block)
    made = make_hessian(300)
    before = made.clone()
    assert factor_inverse(made, 0.05, 0.01) == 0.05
    wanted = factor_usually(before, 0.05)
    assert (made.triu() - wanted).norm() < 1e-6 * wanted.norm()
    assert torch.equal(made.tril(-1), before.tril(-1)), "which another try needs"


def test_more_damping_is_tried_until_it_is_positive_definite(monkeypatch):
    monkeypatch.setattr(hessian, "_BLOCK", 64)
    made = make_hessian(200)
    # One input of its own, so that the damping that it needs does not depend on the others.
    made[7, :] = made[:, 7] = 0
    made[7, 7] = -0.2 * made.diagonal().mean()
    before = made.clone()
    damping = factor_inverse(made, 0.05, 0.01)
    with pytest.raises(torch.linalg.LinAlgError):
        factor_usually(before, damping - 0.011)
    wanted = factor_usually(before, damping)
    assert (made.triu() - wanted).norm() < 1e-3 * wanted.norm()
    # Without another damping the diagonal is raised.
    assert factor_inverse(before, 0.05, 0.0) == 0.05
    assert before.triu().isfinite().all()


def test_inputs_that_are_not_finite_are_named():
    made = make_hessian(50)
    made[3, 3] = float("nan")
    with pytest.raises(ValueError, match="inputs of a layer are not finite"):
        factor_inverse(made, 0.05, 0.2)


def test_sums_and_orders_are_exact(monkeypatch):
    monkeypatch.setattr(hessian, "_BLOCK", 64)
    inputs = make_inputs(5000, 150).bfloat16()
    sums = torch.zeros(150, 150)
    add_squares(sums, inputs)
    wide = inputs.double()
    assert torch.allclose(sums.double(), wide.t() @ wide, rtol=1e-4, atol=1e-1)
    order, before = torch.randperm(150), sums.clone()
    reorder(sums, order)
    assert torch.equal(sums, before[order][:, order])


def test_memory_holds_one_matrix(monkeypatch):
    monkeypatch.setattr(hessian, "_BLOCK", 256)
    num_inputs = 3072
    made, small = torch.eye(num_inputs), torch.eye(300)
    inputs = torch.ones(2, num_inputs)
    order = torch.arange(num_inputs).flip(0)
    factor_inverse(small, 0.05, 0.01)  # what libraries keep from their first use on
    with OwnMemory() as memory:
        add_squares(made, inputs)
        reorder(made, order)
        factor_inverse(made, 0.05, 0.01)
    print(f"peak {memory.peak_bytes:,} beside {made.nbytes:,}")
    # A copy of the matrix takes 38 MB; factoring it, inverting that and factoring again, two.
    assert memory.peak_bytes < made.nbytes / 2
