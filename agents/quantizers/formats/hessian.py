"""GPTQ's Hessian of a linear layer, computed and factored within the memory of one matrix.

The Hessian is the sum of products of a layer's inputs with each other: 3.3 GB for the widest layer
of a 70B model, 28,672 inputs. GPTQ needs U, upper triangular, with U'U = H^-1 (Frantar et al. 2022,
arXiv:2210.17323, section 3.3). The usual way, to factor H, invert it and factor the inverse, needs
three such matrices at once. Here H = RR' with R upper triangular, which is Cholesky's method begun
at the last column, and U = R^-1: the same U, with a third of the products and in place. Only the
upper triangle is written to; the lower one keeps H for another try with more damping.

Shape letters: I inputs, T tokens, B inputs of a block, N inputs before that block.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bounds temporary copies: of a wide matrix 28,672 x 1,024 values of 4 bytes, 117 MB.
_BLOCK = 1024
# Number of tokens that are widened to float32 at a time.
_TOKENS_AT_ONCE = 2048
# If no damping helps, these shares of the largest diagonal value are added, in turn.
_FLOORS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def add_squares(sums_II: Tensor, inputs_TI: Tensor) -> None:
    """Add the products of some tokens' inputs with each other, in float32."""
    for some_TI in inputs_TI.split(_TOKENS_AT_ONCE):
        wide_TI = some_TI.float()
        sums_II.addmm_(wide_TI.t(), wide_TI)


def reorder(matrix_II: Tensor, order_I: Tensor) -> None:
    """Reorder rows and columns of a matrix, in place."""
    for rows_BI in matrix_II.split(_BLOCK):
        rows_BI.copy_(rows_BI[:, order_I])
    for columns_IB in matrix_II.split(_BLOCK, dim=1):
        columns_IB.copy_(columns_IB[order_I])


def factor_inverse(hessian_II: Tensor, damping: float, step: float) -> float:
    """Put U with U'U = H^-1 into the upper triangle of H; return the damping that was needed.

    Args:
        hessian_II: H, symmetric, in float32; its strict lower triangle is unchanged.
        damping: share of the mean of the diagonal that is added to the diagonal, below 1.
        step: increment of the damping until H is positive definite; 0: no other is tried.

    Raises:
        ValueError: no damping makes H positive definite, for example if inputs are not finite.
    """
    diagonal_I = hessian_II.diagonal().clone()
    for floor in _FLOORS:
        least = floor * (float(diagonal_I.abs().max()) or 1.0)
        base_I = (diagonal_I + least).clamp(min=least) if floor else diagonal_I
        tried = damping
        while tried < 1:
            hessian_II.diagonal().copy_(base_I + tried * base_I.mean())
            if _factor(hessian_II):
                _invert(hessian_II)
                return tried
            _restore_upper(hessian_II)
            if not step:
                break
            tried += step
    raise ValueError("the inputs of a layer are not finite, or nearly all of them are the same")


def _begins(size: int) -> range:
    return range(0, size, _BLOCK)


def _factor(matrix_II: Tensor) -> bool:
    """Put R with RR' = H into the upper triangle; return whether H is positive definite."""
    for begin in reversed(_begins(len(matrix_II))):
        end = min(begin + _BLOCK, len(matrix_II))
        block_BB = matrix_II[begin:end, begin:end]
        # Cholesky's method reads the lower triangle, which is the flipped upper one.
        lower_BB, info = torch.linalg.cholesky_ex(block_BB.flip(0, 1))
        if int(info):
            return False
        root_BB = lower_BB.flip(0, 1)
        _write_upper(block_BB, root_BB)
        above_NB = matrix_II[:begin, begin:end]
        above_NB.copy_(
            torch.linalg.solve_triangular(root_BB.t(), above_NB, upper=False, left=False)
        )
        for first in _begins(begin):
            last = min(first + _BLOCK, begin)
            rest = matrix_II[first:last, first:begin]
            # `addmm_` writes whole blocks, so the lower triangle of the diagonal one is kept apart.
            kept = matrix_II[first:last, first:last].tril(-1)
            rest.addmm_(above_NB[first:last], above_NB[first:].t(), alpha=-1)
            matrix_II[first:last, first:last].triu_().add_(kept)
    return True


def _invert(matrix_II: Tensor) -> None:
    """Replace the upper triangle by its inverse."""
    for begin in _begins(len(matrix_II)):
        end = min(begin + _BLOCK, len(matrix_II))
        block_BB = matrix_II[begin:end, begin:end]
        unit_BB = torch.eye(end - begin, dtype=matrix_II.dtype, device=matrix_II.device)
        inverse_BB = torch.linalg.solve_triangular(block_BB.triu(), unit_BB, upper=True)
        above_NB = matrix_II[:begin, begin:end]
        product_NB = torch.empty_like(above_NB)
        for first in _begins(begin):
            last = min(first + _BLOCK, begin)
            rows = matrix_II[first:last, first:last].triu() @ above_NB[first:last]
            product_NB[first:last] = rows.addmm_(matrix_II[first:last, last:begin], above_NB[last:])
        torch.mm(product_NB, -inverse_BB, out=above_NB)
        _write_upper(block_BB, inverse_BB)


def _write_upper(block_BB: Tensor, upper_BB: Tensor) -> None:
    block_BB.copy_(upper_BB.triu() + block_BB.tril(-1))


def _restore_upper(matrix_II: Tensor) -> None:
    """Copy the strict lower triangle to the upper one."""
    for begin in _begins(len(matrix_II)):
        end = min(begin + _BLOCK, len(matrix_II))
        _write_upper(matrix_II[begin:end, begin:end], matrix_II[begin:end, begin:end].tril(-1).t())
        matrix_II[begin:end, end:] = matrix_II[end:, begin:end].t()
