"""Rows of a group meet the matrix of their group, in every way to compute that."""

from __future__ import annotations

import pytest
import torch

from agents.trainer.kernels import grouped
from tests.draws import seed

# Rows, groups, inner and outer features: groups without rows, sides that fill no tile.
SIZES = [(50, 5, 40, 24), (200, 7, 130, 200), (33, 9, 3, 5), (1, 3, 16, 16), (300, 2, 256, 128)]


def make(rows, groups, inner, outer, dtype, device="cpu"):
    torch.manual_seed(seed(rows))
    ends = torch.randint(0, rows + 1, (groups,)).sort().values
    ends[-1] = rows
    x = torch.randn(rows, inner, dtype=dtype)
    w = torch.randn(groups, outer, inner, dtype=dtype).transpose(1, 2)
    group = torch.searchsorted(ends, torch.arange(rows), right=True)
    return x.to(device), w.to(device), ends.int().to(device), group.to(device)


@pytest.mark.parametrize("sizes", SIZES)
def test_each_row_meets_its_matrix(sizes):
    x, w, ends, group = make(*sizes, torch.float64)
    expected = torch.einsum("sk,skn->sn", x, w[group])
    assert torch.allclose(grouped.multiply_rows(x, w, ends), expected)
    base = torch.randn_like(expected)
    assert torch.allclose(grouped.multiply_rows(x, w, ends, base.clone()), base + expected)
    one_hot = torch.nn.functional.one_hot(group, len(ends)).to(x)
    outer = 0.5 * torch.einsum("sg,sk,sn->gkn", one_hot, x, expected)
    found = grouped.multiply_outer(x, expected, ends, torch.float64, 0.5)
    assert torch.allclose(found, outer)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [*SIZES, (4096, 64, 512, 1024)])
def test_a_gpu_gets_the_same(sizes, dtype):
    x, w, ends, group = make(*sizes, dtype, "cuda")
    expected = torch.stack([row.float() @ w[g].float() for row, g in zip(x, group, strict=True)])
    close = {"rtol": 2e-2, "atol": 0.3} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-3}
    for found in (grouped.multiply_rows(x, w, ends), grouped.launch_rows(x, w, ends)):
        assert torch.allclose(found.float(), expected, **close)
        again = grouped.multiply_rows(x, w, ends)
        assert torch.equal(again, grouped.multiply_rows(x, w, ends))
    outer = grouped.multiply_outer(x, x, ends, torch.float32)
    on_cpu = grouped.multiply_outer(x.cpu(), x.cpu(), ends.cpu(), torch.float32)
    assert torch.allclose(outer.cpu(), on_cpu, rtol=1e-2, atol=1e-2)
