"""Cross-entropy of a chunk of tokens and its gradient, fused into one Triton kernel.

Each row of logits is read twice and overwritten by its gradient, in the type of the product. That
is a fifth of the memory traffic of separate operations. Only for GPUs that Triton compiles for.

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
except ImportError:  # torch for CPUs comes without
    triton = None

# Logits that one program loads at a time. A row is longer, so the kernel loops over it.
_BLOCK_LOGITS = 8192

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _loss_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        logits, label, loss, scale, gradient_scale,
        vocab_size: tl.constexpr, wants_gradient: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        # int64, because the offset of a row could overflow int32.
        row = tl.program_id(0).to(tl.int64)
        logits += row * vocab_size
        target = tl.load(label + row)
        most = float("-inf")
        total = 0.0
        # Online softmax: the sum is rescaled when a block holds a new maximum, so that the first
        # pass reads each logit once.
        for start in range(0, vocab_size, size):
            word = start + tl.arange(0, size)
            logit = tl.load(logits + word, mask=word < vocab_size, other=float("-inf"))
            logit = logit.to(tl.float32) * scale
            higher = tl.maximum(most, tl.max(logit, 0))
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(logit - higher), 0)
            most = higher
        log_sum = most + tl.log(total)
        tl.store(loss + row, log_sum - tl.load(logits + target).to(tl.float32) * scale)
        if wants_gradient:
            tl.debug_barrier()  # before the label's own logit is overwritten
            for start in range(0, vocab_size, size):
                word = start + tl.arange(0, size)
                inside = word < vocab_size
                logit = tl.load(logits + word, mask=inside, other=float("-inf"))
                share = tl.exp(logit.to(tl.float32) * scale - log_sum)
                gradient = (share - (word == target).to(tl.float32)) * (scale * gradient_scale)
                tl.store(logits + word, gradient.to(logits.dtype.element_ty), mask=inside)


@functools.cache
def is_supported(device: torch.device) -> bool:
    """Return whether the kernel can be compiled for this device."""
    return triton is not None and compiling.find_obstacle(device) is None


def compute_losses(
    logits_CV: Tensor, label_C: Tensor, scale: float, gradient_scale: float | None
) -> Tensor:
    """Return the cross-entropy of each token (C,), float32.

    Args:
        logits_CV: Unscaled products on a GPU. Overwritten by their gradient if one is requested.
        label_C: Target token ids, int64.
        scale: Positive factor of the logits.
        gradient_scale: Factor of the gradient, or None to compute the losses only.
    """
    num_tokens, vocab_size = logits_CV.shape
    loss_C = torch.empty(num_tokens, dtype=torch.float32, device=logits_CV.device)
    if num_tokens:
        _loss_kernel[(num_tokens,)](
            logits_CV, label_C, loss_C, scale, gradient_scale or 0.0,
            vocab_size=vocab_size, wants_gradient=gradient_scale is not None,
            size=_BLOCK_LOGITS, num_warps=16,
        )  # fmt: skip
    return loss_C
