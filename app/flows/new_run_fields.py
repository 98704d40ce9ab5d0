"""The questions of the New run dialog that everybody is asked, and the list of all."""

from __future__ import annotations

from app.flows.field import Field
from app.flows.new_run_advanced import ADVANCED

_WHAT, _HOW, _MUCH, _WHERE = "What to train", "How", "How much", "Where"

MAIN: tuple[Field, ...] = (
    Field(
        key="name",
        section=_WHAT,
        label="Name",
        is_wide=True,
        help="How the run is called in lists and on cards.",
    ),
    Field(
        key="model",
        section=_WHAT,
        label="Model",
        kind="path",
        is_wide=True,
        placeholder="meta-llama/Llama-2-7b-hf, or a folder",
        help="A Hugging Face id, or a folder on this PC. A folder is copied to each node once.",
    ),
    Field(
        key="train",
        section=_WHAT,
        label="Training data",
        kind="path",
        is_wide=True,
        placeholder="chats.jsonl",
        help="JSONL, JSON, CSV, TSV, Parquet or text on this PC, copied to each node once; or the "
        "id of a public data set, which each node downloads.",
    ),
    Field(
        key="objective",
        section=_HOW,
        label="What it learns",
        kind="choice",
        is_wide=True,
        choices=(
            ("sft", "To answer like the examples (SFT)"),
            ("dpo", "To prefer one answer over another (DPO)"),
        ),
        help="SFT needs chats, instructions or text. DPO needs pairs of a chosen and a rejected "
        "answer, and comes after SFT.",
    ),
    Field(
        key="adapter",
        section=_HOW,
        label="Method",
        kind="choice",
        is_wide=True,
        choices=(
            ("lora", "LoRA: small matrices beside the frozen model"),
            ("qlora", "QLoRA: the frozen model in 4 bits, a quarter of the memory"),
            ("full", "Full: every weight, needs the most memory"),
        ),
        help="LoRA suits most fine-tuning; take QLoRA when the model does not fit in VRAM.",
    ),
    Field(
        key="rank",
        section=_HOW,
        label="Rank",
        help="Width of the adapter. 8 to 64 is usual; more learns more and costs more memory.",
    ),
    Field(
        key="alpha",
        section=_HOW,
        label="Alpha",
        help="Strength of the adapter; twice the rank is a good start.",
    ),
    Field(
        key="dpo_beta",
        section=_HOW,
        label="Beta",
        help="How hard DPO holds on to the model it began with. Less lets it move further away.",
    ),
    Field(
        key="sequence_tokens",
        section=_MUCH,
        label="Sequence length",
        unit="tokens",
        help="Longer rows are cut, and counted. Memory grows with it.",
    ),
    Field(
        key="batch_sequences",
        section=_MUCH,
        label="Batch",
        unit="sequences",
        help="Per step over all devices together; pairs with DPO. Shares follow speed.",
    ),
    Field(
        key="epochs",
        section=_MUCH,
        label="Epochs",
        help="How often every row is seen.",
    ),
    Field(
        key="learning_rate",
        section=_MUCH,
        label="Learning rate",
        help="2e-4 suits LoRA and QLoRA, 2e-5 full training, 5e-6 DPO.",
    ),
    Field(
        key="packing",
        section=_MUCH,
        label="Pack short rows together",
        kind="tick",
        is_wide=True,
        help="Several rows share one sequence and never see each other. A batch then holds more "
        "rows, so there are fewer steps.",
    ),
    Field(
        key="nodes",
        section=_WHERE,
        label="Nodes",
        kind="nodes",
        is_wide=True,
        help="The PCs that train together. Unequal ones are welcome.",
    ),
)

FIELDS: tuple[Field, ...] = (*MAIN, *ADVANCED)
