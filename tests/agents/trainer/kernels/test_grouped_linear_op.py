"""The operator of a product of experts keeps what it promises the compiler."""

import pytest
import torch

from agents.trainer.kernels.grouped_linear_op import multiply, sort_by_expert


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_operator_is_what_it_says_to_the_compiler(is_transposed):
    route = sort_by_expert(torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2]]), 4)
    weight = torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=True)
    adapter = [torch.randn(8, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)]
    for one in adapter:
        one.requires_grad_()
    for gathers in (True, False):
        x = torch.randn(4 if gathers else 8, 6, dtype=torch.float64, requires_grad=True)
        sizes = [4, 6, 6, int(is_transposed), 0, 2, int(gathers), int(not gathers), 2]
        torch.library.opcheck(multiply, (x, route, [weight], adapter, sizes, 0.5))
