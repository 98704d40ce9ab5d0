"""Shapes of well-known models with random weights, for engines that are compared with each other.

Nothing is downloaded. A model is made on the device from its configuration, at its own depth or
with fewer layers, and its folder is saved once where an engine loads from disk. `narrow` has a
quarter of the width at the same number of launches, so that a fast card's work is negligible
beside its host's; `tiny` is for CPUs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.bench.engines.chat_rows import save_tokenizer

GIB = 2**30
Size = Literal["full", "narrow", "tiny"]
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NARROW_WORDS, _TINY_WORDS = 4096, 768


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model as its authors publish it."""

    config_class: str
    """Class of Transformers."""
    values: dict[str, Any]
    """What it gets, beside the tokens of `chat_rows`."""
    targets: tuple[str, ...] = SEVEN
    """Linear layers that get an adapter."""
    caps_scores: bool = False
    """Whether scores are soft-capped, which FlashAttention of torch does not support."""
    sees_past_rows: bool = False
    """Whether its own class lets packed rows see each other, so that peers pad instead."""
    experts: tuple[str, ...] = ()
    """Packed matrices of experts, which can get adapters, too."""
    period: int = 1
    """Layers after which their kinds repeat; a depth is a multiple of it."""
    tiny: dict[str, Any] = field(default_factory=dict)
    """Further values of the tiny one."""


def _sizes(
    words: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": words, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 32768, **more,
    }  # fmt: skip


SHAPES: dict[str, Shape] = {
    "llama-3.2-3b": Shape(
        config_class="LlamaConfig",
        values=_sizes(128256, 3072, 8192, 28, 24, 8, head_dim=128, tie_word_embeddings=True),
    ),
    "qwen2.5-7b": Shape(
        config_class="Qwen2Config",
        values=_sizes(152064, 3584, 18944, 28, 28, 4, tie_word_embeddings=False),
    ),
    "gemma-2-2b": Shape(
        config_class="Gemma2Config",
        values=_sizes(256000, 2304, 9216, 26, 8, 4, head_dim=256, tie_word_embeddings=True),
        caps_scores=True,
    ),
    "phi-3-mini": Shape(
        config_class="Phi3Config",
        values=_sizes(
            32064, 3072, 8192, 32, 32, 32, sliding_window=2047, tie_word_embeddings=False
        ),
        targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "mistral-7b": Shape(
        config_class="MistralConfig",
        values=_sizes(32768, 4096, 14336, 32, 32, 8, sliding_window=None, head_dim=128,
                      tie_word_embeddings=False),
    ),
    "qwen2.5-1.5b": Shape(
        config_class="Qwen2Config",
        values=_sizes(151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    ),
    "llama-2-13b": Shape(
        config_class="LlamaConfig",
        values=_sizes(32000, 5120, 13824, 40, 40, 40, tie_word_embeddings=False),
        targets=SEVEN[:4],
    ),
    "qwen2.5-32b": Shape(
        config_class="Qwen2Config",
        values=_sizes(152064, 5120, 27648, 64, 40, 8, tie_word_embeddings=False),
        targets=SEVEN[:4],
    ),
    "llama-2-70b": Shape(
        config_class="LlamaConfig",
        values=_sizes(32000, 8192, 28672, 80, 64, 8, tie_word_embeddings=False),
        targets=SEVEN[:4],
    ),
    "qwen3-30b-a3b": Shape(
        config_class="Qwen3MoeConfig",
        values=_sizes(151936, 2048, 6144, 48, 32, 4, head_dim=128, moe_intermediate_size=768,
                      num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
                      tie_word_embeddings=False),
        targets=SEVEN[:4],
        experts=("gate_up_proj", "down_proj"),
        tiny={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen3.5-9b": Shape(
        config_class="Qwen3_5TextConfig",
        values=_sizes(248320, 4096, 12288, 32, 16, 4, head_dim=256, tie_word_embeddings=False),
        targets=(*SEVEN, "in_proj_qkv", "in_proj_z", "out_proj"),
        sees_past_rows=True,
        period=4,
        tiny={"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
              "linear_num_value_heads": 4, "head_dim": 32},
    ),
}  # fmt: skip
CHAT_SHAPES = ("llama-3.2-3b", "qwen2.5-7b", "gemma-2-2b", "phi-3-mini", "mistral-7b")


def round_depth(name: str, layers: int | None) -> int:
    """Return the number of layers that is possible, at least `layers`; None: all.

    >>> round_depth("qwen3.5-9b", 6), round_depth("llama-3.2-3b", None)
    (8, 28)
    """
    shape = SHAPES[name]
    full: int = shape.values["num_hidden_layers"]
    return full if layers is None else min(full, -(-layers // shape.period) * shape.period)


def list_values(name: str, *, layers: int | None = None, size: Size = "full") -> dict[str, Any]:
    """Return what the configuration class gets for a shape at this depth and size."""
    shape = SHAPES[name]
    values = {**shape.values, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if size == "narrow":
        width = {key: values[key] // 4 for key in ("hidden_size", "intermediate_size")}
        heads, kv_heads = heads // 4, max(1, kv_heads // 4)
        values |= {**width, "vocab_size": _NARROW_WORDS}
    elif size == "tiny":
        heads, kv_heads = 4, 4 if kv_heads == heads else 2
        values |= {"vocab_size": _TINY_WORDS, "hidden_size": 64, "intermediate_size": 128}
        values |= {"initializer_range": 0.2}  # so that a loss shows what a token attends to
        values |= {"head_dim": 16} if "head_dim" in values else {}
        values |= shape.tiny
    depth = round_depth(name, layers)
    return values | {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": depth,
    }  # fmt: skip


def make_config(name: str, *, layers: int | None = None, size: Size = "full") -> Any:
    """Return the configuration of a shape.

    Raises:
        AttributeError: this version of Transformers does not have the family.
    """
    import transformers

    config_class = getattr(transformers, SHAPES[name].config_class)
    return config_class(**list_values(name, layers=layers, size=size))


def make_model(config: Any, device: Any, attention: str) -> Any:
    """Return a model of random weights on the device: in bf16 on GPUs, in fp32 on CPUs."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(device)


def save_model(folder: Path, name: str, *, layers: int | None, size: Size, device: str) -> Path:
    """Save a model of random weights with its tokenizer, unless the folder has it already."""
    if not (folder / "saved").exists():
        from transformers.utils import logging

        logging.disable_progress_bar()
        config = make_config(name, layers=layers, size=size)
        make_model(config, device, "eager").save_pretrained(folder)
        save_tokenizer(folder, config.vocab_size)
        (folder / "saved").write_text("whole", encoding="ascii")
    return folder


def quantize_linears(model: Any) -> Any:
    """Put 4-bit layers in the place of the linear ones, except for the head."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, old in list(parent.named_children()):
            if type(old) is not torch.nn.Linear or old is head:
                continue
            new = Linear4bit(
                old.in_features, old.out_features, bias=old.bias is not None, device="meta",
                compute_dtype=old.weight.dtype, compress_statistics=True, quant_type="nf4",
            )  # fmt: skip
            new.weight = Params4bit(
                old.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4",
                module=new,
            ).to(old.weight.device)  # fmt: skip
            if old.bias is not None:
                new.bias = torch.nn.Parameter(old.bias.data, requires_grad=False)
            setattr(parent, name, new)
    model.is_loaded_in_4bit = True
    return model


def scale_cap(cap_gib: float, name: str, layers: int | None) -> float:
    """Return the cap of a model with fewer layers in place of `cap_gib` at full depth.

    Embeddings and the head's weights stay whole; what is left is shared by the layers. Logits are
    not counted, so it is tighter for engines that hold them all at once.

    >>> round(scale_cap(16, "llama-3.2-3b", 7), 2), scale_cap(16, "llama-3.2-3b", None)
    (4.55, 16)
    """
    values = SHAPES[name].values
    full, layers = values["num_hidden_layers"], round_depth(name, layers)
    if layers == full:
        return cap_gib
    matrices = 1 if values["tie_word_embeddings"] else 2
    fixed_gib = matrices * 2 * values["vocab_size"] * values["hidden_size"] / GIB
    return fixed_gib + (cap_gib - fixed_gib) * layers / full


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a model's folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return found
