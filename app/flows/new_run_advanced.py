"""The questions of the New run dialog that are folded away: their defaults suit most runs."""

from __future__ import annotations

from functools import partial

from agents.contract.parallel import PARALLEL
from app.flows.field import Field

_data = partial(Field, section="Data and evaluation", advanced=True)
_adapter = partial(Field, section="Adapter", advanced=True)
_learning = partial(Field, section="Learning", advanced=True)
_memory = partial(Field, section="Memory and arithmetic", advanced=True)
_devices = partial(Field, section="Several devices", advanced=True)
_saving = partial(Field, section="Checkpoints", advanced=True)

ADVANCED: tuple[Field, ...] = (
    _data(
        key="eval",
        label="Evaluation data",
        kind="path",
        is_wide=True,
        placeholder="none",
        help="Rows the model never trains on; leave it empty to train without evaluation.",
    ),
    _data(
        key="evaluate_every_steps",
        label="Evaluate every",
        unit="steps",
        placeholder="after each epoch",
        help="Empty: after each epoch and at the end.",
    ),
    _data(
        key="format",
        label="Format of a row",
        kind="choice",
        choices=(
            ("auto", "Find out from the first rows"),
            ("chat", "Chat: a list of messages"),
            ("alpaca", "Instruction, input, output"),
            ("text", "Plain text"),
            ("preference", "Pairs: chosen and rejected"),
        ),
        help="How a row becomes text for the model.",
    ),
    _adapter(
        key="targets",
        label="Layers with an adapter",
        is_wide=True,
        help="all-linear, or names of linear layers with commas between: q_proj, v_proj.",
    ),
    _adapter(
        key="dropout",
        label="Dropout",
        help="Share of the adapter's input set to zero while training, against rote learning.",
    ),
    _adapter(
        key="rslora",
        label="Scale by the root of the rank (rsLoRA)",
        kind="tick",
        is_wide=True,
        help="Keeps a large rank as lively as a small one. Meant for large ranks.",
    ),
    _adapter(
        key="dora",
        label="Learn lengths apart from directions (DoRA)",
        kind="tick",
        is_wide=True,
        help="Often better at a small rank, and slower: each step computes more.",
    ),
    _learning(
        key="optimizer",
        label="Optimizer",
        kind="choice",
        is_wide=True,
        choices=(
            ("adamw", "AdamW"),
            ("adamw_8bit", "AdamW, its state in 8 bits"),
            ("paged_adamw_8bit", "AdamW in 8 bits, moved to RAM when VRAM is short"),
        ),
        help="8 bits save memory in full training; an adapter's state is small anyway.",
    ),
    _learning(
        key="schedule",
        label="Learning rate over time",
        kind="choice",
        choices=(
            ("cosine", "Falls like a cosine"),
            ("linear", "Falls in a line"),
            ("constant", "Stays as it is"),
        ),
        help="How it goes on after the warm-up.",
    ),
    _learning(
        key="warmup_share",
        label="Warm-up",
        unit="of all steps",
        help="In this share of the steps the learning rate rises from 0: 0.03 is 3 %.",
    ),
    _learning(
        key="max_gradient_norm",
        label="Gradient clipping",
        help="Longer gradients are cut to this length, so that one odd batch does no harm.",
    ),
    _learning(
        key="weight_decay",
        label="Weight decay",
        help="How strongly weights are pulled towards 0. Fine-tuning mostly does without: 0.",
    ),
    _learning(
        key="max_steps",
        label="Steps at most",
        placeholder="no limit",
        help="Ends the run earlier than the epochs would; empty: no limit.",
    ),
    _learning(
        key="seed",
        label="Seed",
        help="Order of the rows and all chance follow from it: the same seed, the same run.",
    ),
    _memory(
        key="precision",
        label="Precision",
        kind="choice",
        choices=(
            ("auto", "What each device does best"),
            ("bf16", "bf16"),
            ("fp16", "fp16, with a scaled loss"),
            ("fp32", "fp32: exact, slow on GPUs"),
        ),
        help="Best is bf16 on GPUs that have it, else fp16; fp32 on CPUs.",
    ),
    _memory(
        key="recompute",
        label="Compute activations twice",
        kind="choice",
        choices=(
            ("auto", "In as few layers as memory forces"),
            ("none", "In no layer: fastest"),
            ("all", "In all layers: least memory"),
        ),
        help="Saves memory and costs time; each GPU chooses for itself.",
    ),
    _memory(
        key="compile",
        label="Compile layers",
        kind="choice",
        choices=(("auto", "On GPUs, where a compiler is"), ("off", "Never")),
        help="Faster steps; the first start of a model on a node takes longer.",
    ),
    _memory(
        key="memory_gib",
        label="Most GPU memory",
        unit="GiB",
        placeholder="what is free",
        help="A limit for each GPU, so that a desktop keeps some for itself.",
    ),
    _memory(
        key="exact",
        label="Same to the last bit",
        kind="tick",
        is_wide=True,
        help="A resumed run repeats every bit; without it some GPUs are faster.",
    ),
    _devices(
        key="parallel",
        label="How devices work together",
        kind="choice",
        is_wide=True,
        choices=(
            ("auto", "Choose for me"),
            *((row.name, row.summary) for row in PARALLEL.values() if row.runnable),
        ),
        help="Every device needs room for the whole model, 4-bit with QLoRA.",
    ),
    _devices(
        key="rebalance",
        label="Measure shares again during the run",
        kind="tick",
        is_wide=True,
        help="Follows a GPU that gets slower or faster. Off: a resumed run equals the "
        "uninterrupted one to the last bit even where speeds vary.",
    ),
    _devices(
        key="shares",
        label="Shares of a batch",
        placeholder="measured",
        help="One number per device, with commas between: 2, 1, 1.",
    ),
    _devices(
        key="compression",
        label="Gradients travel as",
        kind="choice",
        choices=(
            ("none", "fp32: exact"),
            ("bf16", "bf16: half the bytes"),
            ("powersgd", "PowerSGD: far fewer bytes"),
        ),
        help="For slow links. What is lost on the way is added to the next step.",
    ),
    _saving(
        key="every_minutes",
        label="A checkpoint every",
        unit="minutes",
        placeholder="not by time",
        help="A power cut costs at most this much work.",
    ),
    _saving(
        key="every_steps",
        label="And every",
        unit="steps",
        placeholder="not by steps",
        help="Also after this many steps; empty: by time alone.",
    ),
    _saving(
        key="keep",
        label="Keep the newest",
        help="Older ones are deleted once a newer one is safely written.",
    ),
    _saving(
        key="copies",
        label="Copies",
        help="On how many nodes each is kept, so that a dead disk loses nothing.",
    ),
)
