"""The questions of the New run dialog, as data: the window draws them, the tests read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FieldKind = Literal["text", "path", "choice", "nodes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    key: str
    section: str
    label: str
    help: str
    """What it means and what a good value is, in one or two sentences."""
    kind: FieldKind = "text"
    choices: tuple[tuple[str, str], ...] = ()
    """(value, what the person reads)."""
    placeholder: str = ""
    unit: str = ""
    advanced: bool = False


FIELDS: tuple[Field, ...] = (
    Field(
        key="name",
        section="What to train",
        label="Name",
        help="How the run is called in lists and on cards.",
    ),
    Field(
        key="model",
        section="What to train",
        label="Model",
        kind="path",
        placeholder="meta-llama/Llama-2-7b-hf, or a folder",
        help="A Hugging Face id, or a folder on this PC. A folder is copied to each node once.",
    ),
    Field(
        key="train",
        section="What to train",
        label="Training data",
        kind="path",
        placeholder="chats.jsonl",
        help="JSONL, JSON, CSV, TSV or text on this PC. It is copied to each node once.",
    ),
    Field(
        key="eval",
        section="What to train",
        label="Evaluation data",
        kind="path",
        placeholder="none",
        advanced=True,
        help="Rows the model never trains on; leave it empty to train without evaluation.",
    ),
    Field(
        key="format",
        section="What to train",
        label="Format of a row",
        kind="choice",
        advanced=True,
        choices=(
            ("auto", "Find out from the first rows"),
            ("chat", "Chat: a list of messages"),
            ("alpaca", "Instruction, input, output"),
            ("text", "Plain text"),
        ),
        help="How a row becomes text for the model.",
    ),
    Field(
        key="adapter",
        section="How",
        label="Method",
        kind="choice",
        choices=(
            ("lora", "LoRA: small matrices beside the frozen model"),
            ("qlora", "QLoRA: the frozen model in 4 bits, a quarter of the memory"),
            ("full", "Full: every weight, needs the most memory"),
        ),
        help="LoRA suits most fine-tuning; take QLoRA when the model does not fit in VRAM.",
    ),
    Field(
        key="rank",
        section="How",
        label="Rank",
        help="Width of the adapter. 8 to 64 is usual; more learns more and costs more memory.",
    ),
    Field(
        key="alpha",
        section="How",
        label="Alpha",
        help="Strength of the adapter; twice the rank is a good start.",
    ),
    Field(
        key="dropout",
        section="How",
        label="Dropout",
        advanced=True,
        help="Share of the adapter's input set to zero while training, against rote learning.",
    ),
    Field(
        key="targets",
        section="How",
        label="Layers with an adapter",
        advanced=True,
        help="all-linear, or names of linear layers with commas between: q_proj, v_proj.",
    ),
    Field(
        key="sequence_tokens",
        section="How much",
        label="Sequence length",
        unit="tokens",
        help="Longer rows are cut, and counted. Memory grows with it.",
    ),
    Field(
        key="batch_sequences",
        section="How much",
        label="Batch",
        unit="sequences",
        help="Per step over all devices together. Each device's share follows its speed.",
    ),
    Field(
        key="epochs",
        section="How much",
        label="Epochs",
        help="How often every row is seen.",
    ),
    Field(
        key="max_steps",
        section="How much",
        label="Steps at most",
        placeholder="no limit",
        help="Ends the run earlier than the epochs would; leave it empty for no limit.",
    ),
    Field(
        key="learning_rate",
        section="How much",
        label="Learning rate",
        help="2e-4 suits LoRA and QLoRA, 2e-5 full training.",
    ),
    Field(
        key="nodes",
        section="Where",
        label="Nodes",
        kind="nodes",
        help="The PCs that train together. Unequal ones are welcome.",
    ),
    Field(
        key="every_minutes",
        section="Checkpoints",
        label="Every",
        unit="minutes",
        placeholder="not by time",
        help="A power cut costs at most this much work.",
    ),
    Field(
        key="every_steps",
        section="Checkpoints",
        label="Every",
        unit="steps",
        placeholder="not by steps",
        advanced=True,
        help="Also after this many steps; leave it empty to go by time alone.",
    ),
    Field(
        key="keep",
        section="Checkpoints",
        label="Keep the newest",
        help="Older ones are deleted once a newer one is safely written.",
    ),
    Field(
        key="copies",
        section="Checkpoints",
        label="Copies",
        help="On how many nodes each is kept, so that a dead disk loses nothing.",
    ),
)
