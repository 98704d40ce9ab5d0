"""Output projection and its loss, in chunks of tokens: the full logits never exist.

For Llama 3 (vocabulary of 128,256) the logits of 4,096 tokens and their gradient take 4 GB in fp32;
a chunk is limited to `_CHUNK_VALUES` logits. The cross-entropy computes its gradient in the forward
pass, because its loss is a plain sum whose gradient is known at once (Hsu et al. 2024, Liger
kernel, arXiv:2410.10989). Log-probabilities of single tokens recompute their chunk in the backward
pass, because only then the incoming gradient is known.

Shape letters: N targets, C of one chunk, H hidden features, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from agents.trainer.kernels.cross_entropy import compute_losses, is_supported
from agents.trainer.model.micro_batch import NO_LABEL

# Number of logits of a chunk: 64 MB in fp32.
_CHUNK_VALUES = 1 << 24
# Number of logits of a chunk with the `cross_entropy` kernel: 64 MB in half precision.
_KERNEL_VALUES = 1 << 25
# Rows of a matrix product's tile. Chunks are multiples of it.
_TILE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Head:
    """Maps hidden features to logits: softcap(scale * (hidden @ weight.T + bias))."""

    weight_VH: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None
    """Limit of the logits' magnitude, applied with tanh (Gemma 2); None for no limit."""
    dtype: torch.dtype
    """Type of the product; the softmax uses at least float32."""

    def sum_loss(
        self,
        hidden_NH: Tensor,
        label_N: Tensor,
        gradient_scale: Tensor | None = None,
        weight_N: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the cross-entropies times their weights, float64; `NO_LABEL` has none.

        Its gradient contains the factor `gradient_scale`, a scalar: loss scaling in fp16 needs the
        factor before the gradient is rounded, so scaling the returned loss would be too late.
        """
        wanted = _Wanted(torch.is_grad_enabled(), gradient_scale, weight_N)
        return _SumLoss.apply(hidden_NH, self.weight_VH, self.bias_V, label_N, self, wanted)

    def log_probabilities(self, hidden_NH: Tensor, label_N: Tensor) -> Tensor:
        """Return the log-probability of each label (N,); 0 for `NO_LABEL`."""
        return _LogProbabilities.apply(hidden_NH, self.weight_VH, self.bias_V, label_N, self)

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Return the logits (C, V), scaled and capped."""
        return self.cap(self.raw(hidden_CH, self.weight_VH.to(self.dtype)))

    def raw(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """Return the uncapped logits (C, V), in at least float32."""
        logits_CV = _widen(self.product(hidden_CH, weight_VH))
        return logits_CV if self.scale == 1.0 else logits_CV * self.scale

    def product(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """Return the product (C, V) without scale and cap."""
        bias = None if self.bias_V is None else self.bias_V.to(self.dtype)
        return F.linear(hidden_CH.to(self.dtype), weight_VH, bias)

    def uses_kernel(self, device: torch.device) -> bool:
        """Return whether the `cross_entropy` kernel computes the losses."""
        is_narrow = self.dtype in (torch.bfloat16, torch.float16)
        return is_narrow and is_supported(device)

    def cap(self, logits_CV: Tensor) -> Tensor:
        """Apply the soft cap."""
        return (
            logits_CV
            if self.softcap is None
            else torch.tanh(logits_CV / self.softcap) * (self.softcap)
        )

    def backward_through_cap(self, gradient_CV: Tensor, capped_CV: Tensor) -> Tensor:
        """Turn the gradient of the capped logits into that of the product, in place."""
        if self.softcap is not None:
            gradient_CV *= 1 - (capped_CV / self.softcap).square()
        return gradient_CV if self.scale == 1.0 else gradient_CV.mul_(self.scale)


class FullLogitsHead:
    """Replacement of `Head` for models that compute all logits with their own code."""

    @staticmethod
    def sum_loss(
        logits_NV: Tensor,
        label_N: Tensor,
        gradient_scale: Tensor | None = None,
        weight_N: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the cross-entropies; see `Head.sum_loss`."""
        wide_NV = _widen(logits_NV)
        if weight_N is None:
            loss = F.cross_entropy(wide_NV, label_N, reduction="sum", ignore_index=NO_LABEL)
        else:
            loss_N = F.cross_entropy(wide_NV, label_N, reduction="none", ignore_index=NO_LABEL)
            loss = (loss_N * weight_N).sum()
        if gradient_scale is None:
            return loss
        return _ScaleGradient.apply(loss, gradient_scale)

    @staticmethod
    def log_probabilities(logits_NV: Tensor, label_N: Tensor) -> Tensor:
        """Return the log-probability of each label (N,); 0 for `NO_LABEL`."""
        wide_NV = _widen(logits_NV)
        return -F.cross_entropy(wide_NV, label_N, reduction="none", ignore_index=NO_LABEL)


def find_head(model: nn.Module, dtype: torch.dtype) -> Head | None:
    """Return the head of a causal language model, or None if its kind is not supported."""
    last = model.get_output_embeddings()
    # A subclass may compute more than a product.
    if type(last) is not nn.Linear:
        return None
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(last.weight, last.bias, scale, float(softcap) if softcap else None, dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _chunks(num_tokens: int, vocab_size: int, num_values: int) -> Iterator[slice]:
    size = max(16, num_values // vocab_size)
    size = size // _TILE_TOKENS * _TILE_TOKENS or size
    for start in range(0, num_tokens, size):
        yield slice(start, start + size)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.scale, None


class _Gradients:
    """Gradients of a head's inputs, accumulated chunk by chunk."""

    def __init__(self, head: Head, hidden_NH: Tensor, needs: tuple[bool, ...]) -> None:
        self._head = head
        self._weight = head.weight_VH.to(head.dtype)
        # Chunks accumulate in at least fp32, so that their number does not cost precision.
        wide = torch.promote_types(head.dtype, torch.float32)
        self.hidden_NH = torch.empty_like(hidden_NH) if needs[0] else None
        self.weight_VH = torch.zeros_like(head.weight_VH, dtype=wide) if needs[1] else None
        self.bias_V = None
        if needs[2] and head.bias_V is not None:
            self.bias_V = torch.zeros_like(head.bias_V, dtype=wide)

    def add(self, cut: slice, hidden_CH: Tensor, gradient_CV: Tensor) -> None:
        narrow_CV = gradient_CV.to(self._head.dtype)
        if self.hidden_NH is not None:
            self.hidden_NH[cut] = narrow_CV @ self._weight
        if self.weight_VH is not None:
            self.weight_VH += narrow_CV.T @ hidden_CH.to(self._head.dtype)
        if self.bias_V is not None:
            self.bias_V += gradient_CV.sum(0)

    def scaled(self, factor: Tensor | float) -> tuple[Tensor | None, ...]:
        """Return the gradients times a factor, each in the type of its input."""
        head = self._head
        pairs = (
            (self.hidden_NH, None),
            (self.weight_VH, head.weight_VH.dtype),
            (self.bias_V, head.bias_V.dtype if head.bias_V is not None else None),
        )
        return tuple(None if g is None else (g * factor).to(d or g.dtype) for g, d in pairs)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Results of a chunk in addition to its losses."""

    gradient: bool
    gradient_scale: Tensor | None
    """Factor of the gradient, a scalar; None for 1."""
    weight_N: Tensor | None
    """Weight of each target's loss, float32; None for 1."""

    def of(self, cut: slice) -> _Wanted:
        """Return what is wanted of a chunk."""
        return self if self.weight_N is None else replace(self, weight_N=self.weight_N[cut])


def _compute_chunk(
    head: Head, hidden_CH: Tensor, weight_VH: Tensor, label_C: Tensor, wanted: _Wanted
) -> tuple[Tensor, Tensor]:
    """Return cross-entropies (C,) and the gradient of the product (C, V), if requested."""
    label_C1, real_C1 = _read_labels(label_C)
    logits_CV = head.cap(head.raw(hidden_CH, weight_VH))
    log_sum_C1 = logits_CV.logsumexp(1, keepdim=True)
    loss_C = ((log_sum_C1 - logits_CV.gather(1, label_C1)) * real_C1).squeeze(1)
    if wanted.weight_N is not None:
        loss_C = loss_C * wanted.weight_N
    if not wanted.gradient:
        return loss_C, logits_CV
    # Gradient of cross-entropy: softmax minus the one-hot label; zero for padding.
    gradient_CV = torch.exp(logits_CV - log_sum_C1.masked_fill(~real_C1, torch.inf))
    gradient_CV.scatter_add_(1, label_C1, -real_C1.to(gradient_CV.dtype))
    gradient_CV = head.backward_through_cap(gradient_CV, logits_CV)
    if wanted.weight_N is not None:
        gradient_CV *= wanted.weight_N[:, None]
    if wanted.gradient_scale is not None:
        gradient_CV *= wanted.gradient_scale
    return loss_C, gradient_CV


def _read_labels(label_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return valid labels (C, 1), and the mask of those that count (C, 1)."""
    return label_C.clamp(min=0)[:, None], (label_C >= 0)[:, None]


def _compute_chunk_with_kernel(
    head: Head, hidden_CH: Tensor, weight_VH: Tensor, label_C: Tensor, wanted: _Wanted
) -> tuple[Tensor, Tensor]:
    """Return the result of `_compute_chunk`, computed by the `cross_entropy` kernel."""
    logits_CV = head.product(hidden_CH, weight_VH)
    loss_C = compute_losses(
        logits_CV,
        label_C,
        head.scale,
        head.softcap,
        wants_gradient=wanted.gradient,
        gradient_scale=wanted.gradient_scale,
    )
    return loss_C, logits_CV


class _SumLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        label_N: Tensor,
        head: Head,
        wanted: _Wanted,
    ) -> Tensor:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight = weight_VH.to(head.dtype)
            gradients = (
                _Gradients(head, hidden_NH, ctx.needs_input_grad) if wanted.gradient else None
            )
            loss = torch.zeros((), dtype=torch.float64, device=hidden_NH.device)
            # The kernel knows no weights.
            uses_kernel = wanted.weight_N is None and head.uses_kernel(hidden_NH.device)
            take, most = (
                (_compute_chunk_with_kernel, _KERNEL_VALUES)
                if uses_kernel
                else (_compute_chunk, _CHUNK_VALUES)
            )
            for cut in _chunks(len(label_N), len(weight_VH), most):
                inputs = (hidden_NH[cut], weight, label_N[cut], wanted.of(cut))
                loss_C, gradient_CV = take(head, *inputs)
                loss += loss_C.sum(dtype=torch.float64)
                if gradients is not None:
                    gradients.add(cut, hidden_NH[cut], gradient_CV)
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # The node lives as long as the loss and would hold the gradients to the end of the pass.
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.scaled(gradient), None, None, None


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        label_N: Tensor,
        head: Head,
    ) -> Tensor:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight = weight_VH.to(head.dtype)
            values, sums = [], []
            for cut in _chunks(len(label_N), len(weight_VH), _CHUNK_VALUES):
                label_C1, real_C1 = _read_labels(label_N[cut])
                logits_CV = head.cap(head.raw(hidden_NH[cut], weight))
                sums.append(logits_CV.logsumexp(1, keepdim=True))
                values.append(((logits_CV.gather(1, label_C1) - sums[-1]) * real_C1).squeeze(1))
        ctx.head = head
        ctx.save_for_backward(hidden_NH, label_N, torch.cat(sums))
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> Any:
        hidden_NH, label_N, log_sum_N1 = ctx.saved_tensors
        head = ctx.head
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight = head.weight_VH.to(head.dtype)
            gradients = _Gradients(head, hidden_NH, ctx.needs_input_grad)
            for cut in _chunks(len(label_N), len(weight), _CHUNK_VALUES):
                label_C1, real_C1 = _read_labels(label_N[cut])
                hidden_CH, factor_C1 = hidden_NH[cut], gradient_N[cut, None] * real_C1
                logits_CV = head.cap(head.raw(hidden_CH, weight))
                gradient_CV = torch.exp(logits_CV - log_sum_N1[cut]).mul_(-factor_C1)
                gradient_CV.scatter_add_(1, label_C1, factor_C1.to(gradient_CV.dtype))
                gradients.add(cut, hidden_CH, head.backward_through_cap(gradient_CV, logits_CV))
        return *gradients.scaled(1.0), None, None
