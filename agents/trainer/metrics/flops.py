"""FLOPs of a training step, by formula.

Model FLOPs as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): a matrix of P weights
costs 2 P per token in the forward pass, 2 P in the backward pass for its input, and 2 P for the
weights themselves if they are trained: a frozen weight counts 4 per token, a trained one 6.
Attention counts only the causal half, and only within a segment: 6 x layers x width x length per
token for both passes. The head counts only for learned predictions. Recomputation to save memory is
no model FLOP: it counts only in HFU (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import nn

# FLOPs per weight and token: frozen and trained, for both passes, and recomputed.
_FROZEN, _TRAINED, _RECOMPUTED = 4, 6, 2
# Keys of a config: number of experts of a layer, and of those that process a token.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
# FLOPs of attention per layer, feature and pair of tokens, halved for the causal mask.
_ATTENTION, _ATTENTION_RECOMPUTED = 6, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Sizes of a model that determine its FLOPs: weights of matrices that every token uses.

    Llama-2-7B with LoRA r=16 on q, k, v and o, one sequence of 2,048 tokens:

    >>> llama = ModelFlops(frozen=6_476_005_376, trained=16_777_216, head=131_072_000,
    ...                    head_trained=False, attention_width=4096, num_layers=32)
    >>> round(llama.count([2048], num_targets=2047) / 1e12, 2)
    57.63
    >>> round(llama.count_recomputed([2048]) / 1e12, 2)
    27.69
    """

    frozen: int
    """Number of frozen weights below the head."""
    trained: int
    """Number of trained weights below the head."""
    head: int
    """Number of weights that map a hidden state to the logits of the vocabulary."""
    head_trained: bool
    attention_width: int
    """Number of query heads times their width."""
    num_layers: int

    def count(self, lengths: Iterable[int], num_targets: int) -> float:
        """Return the model FLOPs of a forward and a backward pass.

        Args:
            lengths: tokens of each segment.
            num_targets: number of tokens whose prediction is learned.
        """
        sizes = list(lengths)
        body = (_FROZEN * self.frozen + _TRAINED * self.trained) * sum(sizes)
        head = (_TRAINED if self.head_trained else _FROZEN) * self.head * num_targets
        return float(body + head + _ATTENTION * self._attended(sizes))

    def count_recomputed(self, lengths: Iterable[int]) -> float:
        """Return the FLOPs of recomputing the activations of all layers."""
        sizes = list(lengths)
        body = _RECOMPUTED * (self.frozen + self.trained) * sum(sizes)
        return float(body + _ATTENTION_RECOMPUTED * self._attended(sizes))

    def _attended(self, lengths: list[int]) -> int:
        return self.num_layers * self.attention_width * sum(size * size for size in lengths)


def read_flops(module: nn.Module) -> ModelFlops:
    """Count the weights of a model in training, including adapters and quantized layers.

    Experts of a mixture count by the fraction of them that processes a token.
    """
    head_module = _head_of(module)
    # Adapters on the head count as part of it.
    inside_head = {id(part) for part in head_module.modules()} if head_module else set()
    config: Any = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()  # Gemma 3's own config has no number of layers
    frozen = trained = head = 0
    head_trained = False
    for part in module.modules():
        size, is_trained = _matrix(part)
        if id(part) in inside_head:
            head += size
            head_trained = head_trained or (is_trained and size > 0)
        elif is_trained:
            trained += size
        else:
            frozen += size
    in_frozen, in_trained = _experts(module, config)
    trained -= _idle_adapters(module, config)
    return ModelFlops(
        frozen=frozen + in_frozen,
        trained=trained + in_trained,
        head=head,
        head_trained=head_trained,
        attention_width=_attention_width(config),
        num_layers=int(getattr(config, "num_hidden_layers", 0) or 0),
    )


def _head_of(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    if get is None:
        get = getattr(getattr(module, "base_model", None), "get_output_embeddings", None)
    head = get() if get is not None else None
    return head if isinstance(head, nn.Module) else None


def _matrix(part: nn.Module) -> tuple[int, bool]:
    """Return the number of weights of a linear layer, and whether they are trained.

    By its shape, since a quantized layer stores two weights per number.
    """
    width_in, width_out = getattr(part, "in_features", None), getattr(part, "out_features", None)
    weight = getattr(part, "weight", None)
    # PEFT wraps a layer in one of the same shape; only the innermost one has the weights.
    is_leaf = isinstance(weight, nn.Parameter) and not hasattr(part, "base_layer")
    if not (is_leaf and isinstance(width_in, int) and isinstance(width_out, int)):
        return 0, False
    assert isinstance(weight, nn.Parameter)
    return width_in * width_out, weight.requires_grad


def _experts(module: nn.Module, config: Any) -> tuple[int, int]:
    """Return frozen and trained weights of experts kept as one tensor (E, out, in) per matrix."""
    num_experts, num_used = _read_experts(config)
    if not num_experts or not num_used:
        return 0, 0
    sizes = [
        (parameter.numel() * num_used // num_experts, parameter.requires_grad)
        for parameter in module.parameters()
        if parameter.dim() == 3 and parameter.shape[0] == num_experts
    ]
    return sum(s for s, on in sizes if not on), sum(s for s, on in sizes if on)


def _idle_adapters(module: nn.Module, config: Any) -> int:
    """Return the weights of adapters on experts that do not process a token."""
    num_experts, num_used = _read_experts(config)
    sizes = (
        _matrix(layer)[0]
        for part in module.modules()
        if isinstance(part, ParamWrapper) and part.num_experts == num_experts
        for layer in (*part.lora_A.values(), *part.lora_B.values())
    )
    return sum(size - size * num_used // num_experts for size in sizes)


def _read_experts(config: Any) -> tuple[int, int]:
    """Return the experts of a layer, and those that process a token; 0 without experts."""

    def read(names: Iterable[str]) -> int:
        return next((int(n) for name in names if (n := getattr(config, name, None))), 0)

    return read(_EXPERTS), read(_USED)


def _attention_width(config: Any) -> int:
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    width = getattr(config, "head_dim", None)
    if width is None and heads:
        width = int(getattr(config, "hidden_size", 0)) // heads
    return heads * int(width or 0)
