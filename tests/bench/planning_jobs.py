"""What bench_planning measures: models as they are loaded, and the settings tried with each.

Jobs and their rows are in the order of what they tell, since the time may not do for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALL, NONE, HALF, QUARTER = 1.0, 0.0, 0.5, 0.25
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
           "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8},
    "3B": {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
           "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8},
    "7B": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
    "8B": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "13B": {"vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
            "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40},
    "Gemma-2-2B": {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
                   "intermediate_size": 9216, "num_hidden_layers": 4, "num_attention_heads": 8,
                   "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256},
    "Gemma-3-4B": {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560,
                   "intermediate_size": 10240, "num_hidden_layers": 4, "num_attention_heads": 8,
                   "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024},
    "Qwen3-4B": {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560,
                 "intermediate_size": 9728, "num_hidden_layers": 4, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128},
    "Phi-4-mini": {"model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072,
                   "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 24,
                   "num_key_value_heads": 8, "pad_token_id": 0, "eos_token_id": 1,
                   "bos_token_id": 2},
    "SmolLM3-3B": {"model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048,
                   "intermediate_size": 11008, "num_hidden_layers": 4, "num_attention_heads": 16,
                   "num_key_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1,
                   "bos_token_id": 2},
    "Mistral-7B": {"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
                   "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "sliding_window": None},
    "gpt-oss-20b": {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
                    "intermediate_size": 2880, "num_hidden_layers": 2, "num_attention_heads": 64,
                    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
                    "num_experts_per_tok": 4, "sliding_window": 128},
    "tiny": {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 176,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
"""Llama 3.2 1B and 3B (tied embeddings), Llama 2 7B, Llama 3 8B, Llama 2 13B; then a few layers of
other families, as wide as they are."""
TIED = ("1B", "3B", "Gemma-2-2B", "Gemma-3-4B", "Qwen3-4B", "Phi-4-mini", "SmolLM3-3B")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting to measure."""

    sequence: int
    batch: int
    recomputed: float
    """Share of the layers."""
    moved: float = 0.0
    optimizer: str = "adamw"
    unequal: bool = False
    """Sequences of several lengths, which take another kernel of attention."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model as it is loaded, and what to measure with it."""

    shape: str
    kind: str
    gib: float
    """That the model takes, roughly; so many are there at once."""
    rows: tuple[Row, ...]
    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    dropout: float = 0.05
    dora: bool = False


def row(sequence: int, batch: int, recomputed: float, optimizer: str = "adamw", **more: Any) -> Row:
    """Return a row in few words."""
    return Row(sequence=sequence, batch=batch, recomputed=recomputed, optimizer=optimizer, **more)


FIRST = (row(2048, 1, ALL), row(2048, 1, NONE), row(1024, 8, ALL), row(512, 4, NONE))
EIGHT, PAGED = "adamw_8bit", "paged_adamw_8bit"
FULL = (
    row(2048, 1, ALL), row(2048, 1, NONE), row(512, 8, ALL, EIGHT), row(512, 2, NONE, EIGHT),
    row(4096, 1, HALF, EIGHT), row(8192, 1, ALL, PAGED), row(1024, 1, NONE, PAGED),
)  # fmt: skip
JOBS = (
    Job(shape="7B", kind="qlora", gib=14, rows=(
        *FIRST, row(2048, 2, NONE), row(8192, 1, ALL, EIGHT), row(4096, 2, HALF, EIGHT),
        row(2048, 2, HALF, unequal=True), row(1024, 2, NONE, unequal=True),
        row(2048, 2, NONE, moved=HALF))),
    Job(shape="1B", kind="lora", gib=4, rank=64, rows=(
        *FIRST, row(8192, 2, ALL), row(4096, 2, NONE, EIGHT), row(2048, 4, HALF, PAGED),
        row(1024, 8, QUARTER, unequal=True))),
    Job(shape="8B", kind="qlora", gib=17, rank=32, rows=(
        *FIRST, row(8192, 1, ALL), row(2048, 2, HALF), row(1024, 4, NONE, EIGHT),
        row(4096, 1, QUARTER, unequal=True), row(2048, 1, NONE, moved=QUARTER))),
    Job(shape="3B", kind="lora", gib=9, targets=ATTENTION, dropout=0.0, rows=(
        *FIRST, row(8192, 1, NONE), row(4096, 2, ALL, EIGHT), row(512, 8, HALF))),
    Job(shape="1B", kind="full", gib=34, rows=FULL),
    Job(shape="13B", kind="qlora", gib=27, rows=(
        *FIRST, row(4096, 1, NONE), row(8192, 1, ALL, PAGED), row(4096, 2, HALF),
        row(512, 1, NONE, EIGHT))),
    Job(shape="7B", kind="lora", gib=15, rank=8, targets=("q_proj", "v_proj"), rows=(
        *FIRST, row(4096, 1, NONE, EIGHT), row(8192, 1, ALL), row(2048, 4, HALF))),
    Job(shape="1B", kind="qlora", gib=4, rows=(
        *FIRST, row(8192, 2, ALL), row(4096, 1, NONE), row(512, 8, QUARTER, EIGHT))),
    Job(shape="8B", kind="lora", gib=18, rows=(
        *FIRST, row(4096, 1, NONE), row(8192, 1, ALL, PAGED), row(2048, 4, QUARTER))),
    Job(shape="3B", kind="qlora", gib=9, rank=8, targets=ATTENTION, rows=(
        *FIRST, row(4096, 2, HALF), row(8192, 2, ALL), row(2048, 2, NONE, unequal=True))),
    Job(shape="7B", kind="qlora", gib=14, targets=ATTENTION, dropout=0.0, rows=(
        *FIRST, row(2048, 4, ALL))),
    Job(shape="3B", kind="full", gib=80, rows=FULL[:5]),
    Job(shape="13B", kind="lora", gib=29, targets=ATTENTION, rows=(
        *FIRST, row(4096, 1, NONE), row(8192, 1, ALL))),
    Job(shape="7B", kind="full", gib=92, rows=(
        row(2048, 1, ALL, EIGHT), row(1024, 1, NONE, EIGHT), row(4096, 1, HALF, PAGED))),
)  # fmt: skip
FEW = (row(2048, 2, ALL), row(2048, 2, NONE), row(1024, 8, ALL), row(512, 8, NONE))
FAMILIES = (
    Job(shape="Gemma-2-2B", kind="lora", gib=4, rows=(*FEW, row(512, 8, HALF, unequal=True))),
    Job(shape="Mistral-7B", kind="qlora", gib=6, dora=True, rows=FEW),
    Job(shape="Qwen3-4B", kind="lora", gib=4, dropout=0.0, rows=FEW),
    Job(shape="Gemma-3-4B", kind="lora", gib=4, rank=64, rows=FEW),
    Job(shape="Phi-4-mini", kind="lora", gib=4, rows=FEW),
    Job(shape="SmolLM3-3B", kind="qlora", gib=4, targets=ATTENTION, rows=FEW),
    Job(shape="gpt-oss-20b", kind="lora", gib=8, targets=ATTENTION, rows=FEW[:2]),
    Job(shape="Gemma-2-2B", kind="qlora", gib=4, dropout=0.0, rows=FEW[:3]),
    Job(shape="Mistral-7B", kind="lora", gib=6, dora=True, dropout=0.0, rows=FEW[:3]),
)  # fmt: skip
"""A few layers of other families: their peaks tell the bytes of one layer."""
TINY = (
    Job(shape="tiny", kind="qlora", gib=30, rows=(
        row(64, 1, ALL), row(96, 2, HALF, moved=QUARTER), row(64, 2, NONE, unequal=True))),
    Job(shape="tiny", kind="full", gib=80, rows=(row(64, 2, NONE), row(64, 1, ALL))),
    Job(shape="tiny", kind="lora", gib=30, targets=ATTENTION, dropout=0.0, rows=(
        row(64, 1, NONE),)),
)  # fmt: skip


def make_base(job: Job, device: Any) -> Any:
    """Return a frozen model of random weights as `load_model` gives it, made on the device."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"model_type": "llama", **SHAPES[job.shape]}
    config = CONFIG_MAPPING[sizes.pop("model_type")](
        **sizes, max_position_embeddings=16384, tie_word_embeddings=job.shape in TIED
    )
    wide = job.kind == "full" or device.type == "cpu"
    torch.set_default_dtype(torch.float32 if wide else torch.bfloat16)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval()
    model.requires_grad_(False)
    if job.kind == "qlora":
        quantize(model, device)
    return model


def quantize(model: Any, device: Any) -> None:
    """Put 4-bit layers in the place of the linear ones of all decoder layers."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    for block in model.model.layers:
        for parent in list(block.modules()):
            for name, old in list(parent.named_children()):
                if type(old) is not torch.nn.Linear:
                    continue
                new = Linear4bit(
                    old.in_features, old.out_features, bias=False, device="meta",
                    compute_dtype=old.weight.dtype, compress_statistics=True, quant_type="nf4",
                )  # fmt: skip
                new.weight = Params4bit(
                    old.weight.data, requires_grad=False, compress_statistics=True,
                    quant_type="nf4", module=new,
                ).to(device)  # fmt: skip
                new.training = True  # see model._keep_layout
                setattr(parent, name, new)
    model.is_loaded_in_4bit = True
