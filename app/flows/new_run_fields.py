"""Main questions of the New run dialog, and the list of all questions."""

from __future__ import annotations

from agents.contract.objectives import OBJECTIVES
from app.flows.field import Field
from app.flows.new_run_advanced import ADVANCED

_WHAT, _HOW, _MUCH, _WHERE = "Model and data", "Training method", "Batch and length", "Where to run"

MAIN: tuple[Field, ...] = (
    Field(
        key="name",
        section=_WHAT,
        label="Name",
        is_wide=True,
        help="Name shown in lists and run files.",
    ),
    Field(
        key="model",
        section=_WHAT,
        label="Model",
        kind="path",
        is_wide=True,
        placeholder="meta-llama/Llama-2-7b-hf, or a folder",
        help="Hugging Face id, or a folder on this PC, which is copied to each node once.",
    ),
    Field(
        key="train",
        section=_WHAT,
        label="Training data",
        kind="path",
        is_wide=True,
        placeholder="chats.jsonl",
        help="JSONL, JSON, CSV, TSV, Parquet or text file on this PC, copied to each node once. "
        "Or the id of a public data set, which each node downloads.",
    ),
    Field(
        key="objective",
        section=_HOW,
        label="Objective",
        kind="choice",
        is_wide=True,
        choices=tuple((row.name, row.summary) for row in OBJECTIVES.values()),
        help="SFT needs chats, instructions or text. DPO needs pairs of a chosen and a rejected "
        "answer, and usually follows SFT.",
    ),
    Field(
        key="adapter",
        section=_HOW,
        label="Method",
        kind="choice",
        is_wide=True,
        choices=(
            ("lora", "LoRA: train small matrices, the model stays frozen"),
            ("qlora", "QLoRA: LoRA on a 4-bit model, a quarter of the memory"),
            ("full", "Full: train every weight, needs the most memory"),
        ),
        help="LoRA suits most fine-tuning. Choose QLoRA if the model does not fit in VRAM.",
    ),
    Field(
        key="rank",
        section=_HOW,
        label="Rank",
        help="Size of the adapter, usually 8 to 64. Larger learns more and needs more memory.",
    ),
    Field(
        key="alpha",
        section=_HOW,
        label="Alpha",
        help="Strength of the adapter. Twice the rank is a good start.",
    ),
    Field(
        key="dpo_beta",
        section=_HOW,
        label="Beta",
        help=(
            "How closely DPO stays to the model it starts from. Lower values allow larger changes."
        ),
    ),
    Field(
        key="sequence_tokens",
        section=_MUCH,
        label="Sequence length",
        unit="tokens",
        help="Longer rows are cut. Longer sequences need more memory.",
    ),
    Field(
        key="batch_sequences",
        section=_MUCH,
        label="Batch",
        unit="sequences",
        help="Sequences per step (pairs with DPO), divided over all devices by their speed.",
    ),
    Field(
        key="epochs",
        section=_MUCH,
        label="Epochs",
        help="How often each row is seen.",
    ),
    Field(
        key="learning_rate",
        section=_MUCH,
        label="Learning rate",
        help="2e-4 suits LoRA and QLoRA, 2e-5 full fine-tuning, 5e-6 DPO.",
    ),
    Field(
        key="packing",
        section=_MUCH,
        label="Pack short rows",
        kind="tick",
        is_wide=True,
        help="Puts several rows in one sequence, kept separate from each other. Each batch holds "
        "more rows, so there are fewer steps.",
    ),
    Field(
        key="nodes",
        section=_WHERE,
        label="Nodes",
        kind="nodes",
        is_wide=True,
        help="PCs that train together. They can have different GPUs.",
    ),
)

FIELDS: tuple[Field, ...] = (*MAIN, *ADVANCED)
