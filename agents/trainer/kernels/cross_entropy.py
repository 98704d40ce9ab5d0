"""Cross-entropy of a chunk of tokens and its gradient, fused into one Triton kernel.

Each row of logits is read twice and overwritten by its gradient, in the type of the product: a
fifth of the memory traffic of separate operations. Only for GPUs that Triton supports.

Shape letters: C tokens of a chunk, V entries of the vocabulary.
"""

# ruff: noqa: ANN001, ANN202 - Triton itself finds the types of a kernel's parameters

from __future__ import annotations

import functools

import torch
from torch import Tensor

from agents.trainer.kernels import compiling

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without it
    triton = None

# Number of logits that one program loads at a time. A row is longer, so the kernel loops over it.
_BLOCK_LOGITS = 8192

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _cap(logit, inside, scale, softcap, is_capped: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
        """Return scaled and capped logits, and the derivative of the cap."""
        logit = logit.to(tl.float32) * scale
        slope = 1.0
        if is_capped:
            tanh = 2.0 * tl.sigmoid(2.0 * logit / softcap) - 1.0
            logit = tl.where(inside, softcap * tanh, float("-inf"))
            slope = 1.0 - tanh * tanh
        return logit, slope

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _loss_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        logits, label, loss, scale, softcap, gradient_scale,
        vocab_size: tl.constexpr, is_capped: tl.constexpr, is_scaled: tl.constexpr,
        wants_gradient: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        # int64, because the offset of a row may overflow int32.
        row = tl.program_id(0).to(tl.int64)
        logits += row * vocab_size
        target = tl.load(label + row)
        is_target = target >= 0  # a negative label is padding
        most = float("-inf")
        total = 0.0
        # Online softmax: the sum is rescaled when a block has a new maximum, so that the first pass
        # reads each logit once.
        for start in range(0, vocab_size, size):
            word = start + tl.arange(0, size)
            inside = word < vocab_size
            logit = tl.load(logits + word, mask=inside, other=float("-inf"))
            logit, _ = _cap(logit, inside, scale, softcap, is_capped)
            higher = tl.maximum(most, tl.max(logit, 0))
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(logit - higher), 0)
            most = higher
        log_sum = most + tl.log(total)
        own = tl.load(logits + target, mask=is_target, other=0.0)
        own, _ = _cap(own, is_target, scale, softcap, is_capped)
        tl.store(loss + row, tl.where(is_target, log_sum - own, 0.0))
        if wants_gradient:
            tl.debug_barrier()  # before the label's own logit is overwritten
            factor = tl.where(is_target, scale, 0.0)
            if is_scaled:
                factor *= tl.load(gradient_scale)
            for start in range(0, vocab_size, size):
                word = start + tl.arange(0, size)
                inside = word < vocab_size
                logit = tl.load(logits + word, mask=inside, other=float("-inf"))
                logit, slope = _cap(logit, inside, scale, softcap, is_capped)
                share = tl.exp(logit - log_sum)
                gradient = (share - (word == target).to(tl.float32)) * slope * factor
                tl.store(logits + word, gradient.to(logits.dtype.element_ty), mask=inside)


@functools.cache
def is_supported(device: torch.device) -> bool:
    """Return whether the kernel can be compiled for this device."""
    return triton is not None and compiling.find_obstacle(device) is None


def compute_losses(
    logits_CV: Tensor,
    label_C: Tensor,
    scale: float,
    softcap: float | None,
    *,
    wants_gradient: bool,
    gradient_scale: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of each token (C,), float32.

    Args:
        logits_CV: unscaled products on a GPU, overwritten by their gradient if requested.
        label_C: target token ids, int64. Negative ones have neither loss nor gradient.
        scale: positive factor of the logits.
        softcap: limit of the scaled logits' magnitude, applied with tanh; None for no limit.
        wants_gradient: True to compute the gradient.
        gradient_scale: factor of the gradient, a scalar on the GPU; None for 1.
    """
    num_tokens, vocab_size = logits_CV.shape
    loss_C = torch.empty(num_tokens, dtype=torch.float32, device=logits_CV.device)
    if num_tokens:
        _loss_kernel[(num_tokens,)](
            logits_CV, label_C, loss_C, scale, softcap or 0.0,
            loss_C if gradient_scale is None else gradient_scale,
            vocab_size=vocab_size, is_capped=softcap is not None,
            is_scaled=gradient_scale is not None, wants_gradient=wants_gradient,
            size=_BLOCK_LOGITS, num_warps=16,
        )  # fmt: skip
    return loss_C
