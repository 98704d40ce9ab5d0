"""What bench_planning measures: models as they are loaded, and the settings tried with each.

Jobs and their rows are in the order of what they tell, since the time may not do for all of them.
Every second job is held out: whoever fits a constant looks at the others only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ALL, NONE, HALF, QUARTER = 1.0, 0.0, 0.5, 0.25
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _sizes(
    family: str, words: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "vocab_size": words, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


_TIED = {"tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _sizes("llama", 128256, 2048, 8192, 16, 32, 8, **_TIED),
    "Llama-3.2-3B": _sizes("llama", 128256, 3072, 8192, 28, 24, 8, **_TIED),
    "Llama-2-7B": _sizes("llama", 32000, 4096, 11008, 32, 32, 32),
    "Llama-3.1-8B": _sizes("llama", 128256, 4096, 14336, 32, 32, 8),
    "Llama-2-13B": _sizes("llama", 32000, 5120, 13824, 40, 40, 40),
    "SmolLM2-1.7B": _sizes("llama", 49152, 2048, 8192, 24, 32, 32, **_TIED),
    "Phi-3-mini": _sizes("phi3", 32064, 3072, 8192, 32, 32, 32, sliding_window=2047, **_SPECIAL),
    "Mistral-7B": _sizes("mistral", 32768, 4096, 14336, 32, 32, 8, sliding_window=None,
                         head_dim=128),
    "Qwen2.5-1.5B": _sizes("qwen2", 151936, 1536, 8960, 28, 12, 2, **_TIED),
    "Qwen2.5-7B": _sizes("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "Gemma-2-2B": _sizes("gemma2", 256000, 2304, 9216, 6, 8, 4, head_dim=256,
                         query_pre_attn_scalar=256, **_TIED),
    "Gemma-3-4B": _sizes("gemma3_text", 262208, 2560, 10240, 6, 8, 4, head_dim=256,
                         sliding_window=1024, **_TIED),
    "Qwen3-4B": _sizes("qwen3", 151936, 2560, 9728, 6, 32, 8, head_dim=128, **_TIED),
    "Phi-4-mini": _sizes("phi3", 200064, 3072, 8192, 6, 24, 8, partial_rotary_factor=0.75,
                         **_TIED, **_SPECIAL),
    "SmolLM3-3B": _sizes("smollm3", 128256, 2048, 11008, 8, 16, 4, **_TIED, **_SPECIAL),
    "Mistral-7B of 6": _sizes("mistral", 32768, 4096, 14336, 6, 32, 8, sliding_window=None,
                              head_dim=128),
    "gpt-oss-20b": _sizes("gpt_oss", 201088, 2880, 2880, 4, 64, 8, head_dim=64,
                          num_local_experts=32, num_experts_per_tok=4, sliding_window=128),
    "Qwen3-30B-A3B": _sizes("qwen3_moe", 151936, 2048, 6144, 4, 32, 4, head_dim=128,
                            moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
                            norm_topk_prob=True),
    "Qwen3.5-9B": _sizes("qwen3_5_text", 248320, 4096, 12288, 4, 16, 4, head_dim=256),
    "Granite-4-micro": _sizes(
        "granitemoehybrid", 100352, 2048, 8192, 5, 32, 8, shared_intermediate_size=8192,
        num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=64, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_expand=2, mamba_d_conv=4,
        layer_types=["mamba", "mamba", "mamba", "mamba", "attention"], **_TIED),
    "tiny": _sizes("llama", 1024, 64, 176, 4, 4, 2),
    "tiny mixture": _sizes("qwen3_moe", 1024, 64, 176, 2, 4, 2, moe_intermediate_size=32,
                           num_experts=4, num_experts_per_tok=2, head_dim=16),
    "tiny hybrid": _sizes(
        "qwen3_5_text", 1024, 64, 176, 4, 4, 2, head_dim=16, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4),
}  # fmt: skip
"""Models as their authors publish them: whole ones, then a few layers of other families."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting to measure."""

    sequence: int
    """Limit of a row's length, in tokens."""
    batch: int
    """Rows of this length that a micro-batch has room for; of a pair either answer counts."""
    recomputed: float
    """Share of the layers."""
    moved: float = 0.0
    optimizer: str = "adamw"
    unlike: bool = False
    """Whether lengths are those of conversations, whose micro-batches are padded."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model as it is loaded, and what to measure with it."""

    shape: str
    kind: str
    gib: float
    """Memory that the model takes at most, roughly; so many are there at once."""
    rows: tuple[Row, ...]
    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    dropout: float = 0.05
    dora: bool = False
    experts: bool = False
    """Whether experts get adapters, too."""
    objective: Literal["sft", "dpo"] = "sft"
    held_out: bool = False


def row(sequence: int, batch: int, recomputed: float, optimizer: str = "adamw", **more: Any) -> Row:
    """Return a row in few words."""
    return Row(sequence=sequence, batch=batch, recomputed=recomputed, optimizer=optimizer, **more)


EIGHT, PAGED = "adamw_8bit", "paged_adamw_8bit"
FULL = (row(2048, 2, NONE), row(512, 8, HALF, EIGHT), row(4096, 2, ALL, PAGED))
FIRST = (row(2048, 2, NONE), row(2048, 2, ALL))
JOBS = (
    Job(shape="Mistral-7B", kind="qlora", gib=16, dora=True, held_out=True, rows=(
        *FIRST, row(512, 16, HALF, unlike=True))),
    Job(shape="Phi-3-mini", kind="qlora", gib=10, rows=(
        row(2048, 2, NONE), row(4096, 2, ALL), row(1024, 4, QUARTER, unlike=True))),
    Job(shape="Llama-3.2-3B", kind="lora", gib=8, held_out=True, rows=(
        *FIRST, row(1024, 8, HALF, unlike=True))),
    Job(shape="Qwen2.5-7B", kind="qlora", gib=17, dropout=0.0, rows=(
        *FIRST, row(1024, 8, QUARTER, unlike=True))),
    Job(shape="Llama-3.1-8B", kind="qlora", gib=18, rank=32, held_out=True, rows=(
        row(8192, 1, ALL, EIGHT), row(2048, 2, QUARTER, moved=HALF),
        row(4096, 2, HALF, unlike=True))),
    Job(shape="Llama-3.2-1B", kind="full", gib=25, rows=FULL),
    Job(shape="Llama-3.2-3B", kind="qlora", gib=8, dora=True, dropout=0.0, held_out=True, rows=(
        *FIRST, row(4096, 2, HALF))),
    Job(shape="Qwen2.5-1.5B", kind="lora", gib=5, dropout=0.0, objective="dpo", rows=(
        row(1024, 4, NONE), row(1024, 8, ALL), row(1024, 8, HALF, unlike=True))),
    Job(shape="Llama-2-7B", kind="qlora", gib=15, targets=ATTENTION, dropout=0.0, rows=(
        row(2048, 1, NONE), row(2048, 4, ALL), row(2048, 2, HALF, moved=QUARTER))),
    Job(shape="SmolLM2-1.7B", kind="lora", gib=5, rank=64, held_out=True, rows=(
        *FIRST, row(2048, 8, ALL, unlike=True))),
    Job(shape="Qwen2.5-1.5B", kind="full", gib=30, held_out=True, rows=(
        row(2048, 2, ALL, EIGHT), row(1024, 2, NONE, EIGHT), row(512, 16, HALF, unlike=True))),
    Job(shape="Llama-3.2-1B", kind="qlora", gib=5, rank=64, targets=ATTENTION, rows=(
        *FIRST, row(4096, 4, ALL, unlike=True))),
    Job(shape="Llama-2-7B", kind="lora", gib=16, rank=8, targets=("q_proj", "v_proj"), rows=(
        row(2048, 2, NONE), row(8192, 1, HALF))),
    Job(shape="Llama-2-13B", kind="qlora", gib=28, dropout=0.0, held_out=True, rows=(
        row(2048, 1, NONE), row(4096, 2, ALL), row(2048, 2, HALF, PAGED))),
)  # fmt: skip
FEW = (row(2048, 2, NONE), row(1024, 8, ALL, unlike=True))
FAMILIES = (
    Job(shape="Qwen3.5-9B", kind="qlora", gib=8, rows=FEW),
    Job(shape="Granite-4-micro", kind="lora", gib=4, held_out=True, rows=FEW),
    Job(shape="Mistral-7B of 6", kind="lora", gib=5, dora=True, rows=FEW),
    Job(shape="gpt-oss-20b", kind="lora", gib=9, targets=ATTENTION, held_out=True, rows=FEW),
    Job(shape="Gemma-2-2B", kind="lora", gib=4, rows=FEW),
    Job(shape="Gemma-3-4B", kind="lora", gib=4, rank=64, held_out=True, rows=FEW),
    Job(shape="Qwen3-30B-A3B", kind="qlora", gib=8, targets=ATTENTION, dropout=0.0, experts=True,
        rows=FEW),
    Job(shape="Phi-4-mini", kind="lora", gib=4, held_out=True, rows=FEW),
    Job(shape="Qwen3-4B", kind="lora", gib=4, dropout=0.0, rows=FEW),
    Job(shape="SmolLM3-3B", kind="qlora", gib=4, targets=ATTENTION, held_out=True, rows=FEW),
    Job(shape="Qwen3.5-9B", kind="lora", gib=8, dropout=0.0, rows=FEW),
    Job(shape="Gemma-2-2B", kind="qlora", gib=4, dropout=0.0, held_out=True, rows=FEW),
    Job(shape="Granite-4-micro", kind="qlora", gib=4, dropout=0.0, rows=FEW),
    Job(shape="Qwen3-30B-A3B", kind="lora", gib=10, targets=ATTENTION, held_out=True, rows=FEW),
)  # fmt: skip
"""A few layers of other families: their peaks tell the bytes of one layer."""
TINY = (
    Job(shape="tiny", kind="qlora", gib=20, rows=(
        row(64, 1, ALL), row(96, 2, HALF, moved=QUARTER), row(64, 2, NONE, unlike=True))),
    Job(shape="tiny", kind="full", gib=30, held_out=True, rows=(
        row(64, 2, NONE), row(64, 1, ALL))),
    Job(shape="tiny", kind="lora", gib=20, targets=ATTENTION, dropout=0.0, objective="dpo", rows=(
        row(64, 2, NONE),)),
    Job(shape="tiny mixture", kind="qlora", gib=20, targets=ATTENTION, dropout=0.0, experts=True,
        rows=(
        row(64, 1, ALL),)),
    Job(shape="tiny hybrid", kind="lora", gib=20, dora=True, held_out=True, rows=(
        row(64, 2, HALF),)),
)  # fmt: skip
