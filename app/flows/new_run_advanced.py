"""Advanced questions of the New run dialog, collapsed as their defaults suit most runs."""

from __future__ import annotations

from functools import partial

from agents.contract.objectives import ROW_FORMATS
from agents.contract.parallel import PARALLEL
from app.flows.field import Field

_data = partial(Field, section="Data and evaluation", advanced=True)
_adapter = partial(Field, section="Adapter", advanced=True)
_learning = partial(Field, section="Optimization", advanced=True)
_memory = partial(Field, section="Memory and speed", advanced=True)
_devices = partial(Field, section="Multiple devices", advanced=True)
_saving = partial(Field, section="Checkpoints", advanced=True)

ADVANCED: tuple[Field, ...] = (
    _data(
        key="eval",
        label="Evaluation data",
        kind="path",
        is_wide=True,
        placeholder="none",
        help="Rows that the model never trains on. Leave empty to skip evaluation.",
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
        label="Data format",
        kind="choice",
        choices=(
            ("auto", "Detect from the first rows"),
            *((row.name, row.summary) for row in ROW_FORMATS.values()),
        ),
        help="How each row is turned into text for the model.",
    ),
    _data(
        key="ignore_columns",
        label="Columns to ignore",
        is_wide=True,
        placeholder="none",
        help="Names separated by commas. The data is read as if it had no such columns.",
    ),
    _adapter(
        key="targets",
        label="Layers with an adapter",
        is_wide=True,
        help="all-linear, or linear layers separated by commas: q_proj, v_proj.",
    ),
    _adapter(
        key="dropout",
        label="Dropout",
        help="Share of the adapter's input set to zero in training, to reduce overfitting.",
    ),
    _adapter(
        key="rslora",
        label="rsLoRA: scale by the square root of the rank",
        kind="tick",
        is_wide=True,
        help="Keeps updates equally strong at large ranks. Meant for large ranks.",
    ),
    _adapter(
        key="dora",
        label="DoRA: separate magnitude and direction",
        kind="tick",
        is_wide=True,
        help="Often better at a small rank. The plan shows what a step then takes.",
    ),
    _adapter(
        key="experts",
        label="Adapters on the experts of a mixture, too",
        kind="tick",
        is_wide=True,
        help="Matrices for each expert, which take much memory. Needs dropout 0, and no DoRA.",
    ),
    _learning(
        key="optimizer",
        label="Optimizer",
        kind="choice",
        is_wide=True,
        choices=(
            ("adamw", "AdamW"),
            ("adamw_8bit", "AdamW, 8-bit"),
            ("paged_adamw_8bit", "AdamW, 8-bit, paged to RAM when VRAM is short"),
        ),
        help="8-bit saves memory in full fine-tuning. An adapter's state is small anyway.",
    ),
    _learning(
        key="schedule",
        label="Learning rate schedule",
        kind="choice",
        choices=(
            ("cosine", "Cosine decay"),
            ("linear", "Linear decay"),
            ("constant", "Constant"),
        ),
        help="How the learning rate changes after the warm-up.",
    ),
    _learning(
        key="warmup_share",
        label="Warm-up",
        unit="of all steps",
        help="Share of the steps in which the learning rate rises from 0: 0.03 is 3 %.",
    ),
    _learning(
        key="max_gradient_norm",
        label="Gradient clipping",
        help="Maximum gradient norm, so that one unusual batch does no harm.",
    ),
    _learning(
        key="weight_decay",
        label="Weight decay",
        help="How strongly weights are pulled towards 0. Fine-tuning mostly uses 0.",
    ),
    _learning(
        key="max_steps",
        label="Max steps",
        placeholder="no limit",
        help="Ends the run before its epochs are complete. Empty: no limit.",
    ),
    _learning(
        key="seed",
        label="Seed",
        help="Sets the row order and all randomness: the same seed gives the same run.",
    ),
    _memory(
        key="precision",
        label="Precision",
        kind="choice",
        choices=(
            ("auto", "Best for each device"),
            ("bf16", "bf16"),
            ("fp16", "fp16 with loss scaling"),
            ("fp32", "fp32: exact, slow on GPUs"),
        ),
        help="Best is bf16 on GPUs that support it, fp16 on other GPUs, and fp32 on CPUs.",
    ),
    _memory(
        key="recompute",
        label="Recompute activations",
        kind="choice",
        choices=(
            ("auto", "Only when memory requires"),
            ("none", "Never: fastest"),
            ("all", "In all layers: least memory"),
        ),
        help="Saves memory but takes time. Decided for each GPU.",
    ),
    _memory(
        key="compile",
        label="Compile layers",
        kind="choice",
        choices=(("auto", "On GPUs, if a compiler is installed"), ("off", "Never")),
        help="Faster steps, but the first start of a model on a node takes longer.",
    ),
    _memory(
        key="memory_gib",
        label="GPU memory limit",
        unit="GiB",
        placeholder="all that is free",
        help="Limit per GPU, to leave some for the desktop.",
    ),
    _memory(
        key="exact",
        label="Bit-exact resume",
        kind="tick",
        is_wide=True,
        help="A resumed run gives exactly the same result. Some GPUs are faster without it.",
    ),
    _devices(
        key="parallel",
        label="Parallelism",
        kind="choice",
        is_wide=True,
        choices=(
            ("auto", "Automatic"),
            *((row.name, row.summary) for row in PARALLEL.values() if row.runnable),
        ),
        help="Every device must fit the whole model (4-bit with QLoRA).",
    ),
    _devices(
        key="rebalance",
        label="Rebalance shares during the run",
        kind="tick",
        is_wide=True,
        help="Adapts when a GPU gets slower or faster. Turn off for a bit-exact resume even if "
        "speeds vary.",
    ),
    _devices(
        key="shares",
        label="Batch shares",
        placeholder="measured",
        help="One number per device, such as 2, 1, 1.",
    ),
    _devices(
        key="compression",
        label="Gradient compression",
        kind="choice",
        choices=(
            ("none", "None: fp32, exact"),
            ("bf16", "bf16: half the data"),
            ("powersgd", "PowerSGD: far less data"),
        ),
        help="For slow links. What compression loses is added back in the next step.",
    ),
    _devices(
        key="activation_bits",
        label="Pipeline features",
        kind="choice",
        choices=(("16", "16 bits: as computed"), ("8", "8 bits: half the data")),
        help="What the stages of a pipeline send each other. 8 bits change results a little.",
    ),
    _saving(
        key="every_minutes",
        label="Save every",
        unit="minutes",
        placeholder="not by time",
        help="A power cut loses at most this much work.",
    ),
    _saving(
        key="every_steps",
        label="And every",
        unit="steps",
        placeholder="not by steps",
        help="Also save after this many steps. Empty: only by time.",
    ),
    _saving(
        key="keep",
        label="Checkpoints to keep",
        help="Older checkpoints are deleted once a newer one is saved.",
    ),
    _saving(
        key="copies",
        label="Copies",
        help="Number of nodes that keep each checkpoint, in case a disk fails.",
    ),
    _saving(
        key="recovery",
        label="After a loss",
        kind="choice",
        choices=(
            ("auto", "Go on, or resume"),
            ("resume", "Always resume"),
            ("off", "Wait for me"),
        ),
        help="Of three or more nodes, those that are left go on in their processes. Else this "
        "window, rackless watch or the nodes resume the run from the newest checkpoint.",
    ),
    _saving(
        key="rejoin",
        label="When a node returns",
        kind="choice",
        choices=(
            ("auto", "Join if it pays off"),
            ("always", "Always join"),
            ("off", "Go on without it"),
        ),
        help="Stops the run at a checkpoint and resumes it on all of its nodes. It pays off where "
        "the rest of the run is longer than a restart.",
    ),
    _saving(
        key="divergence",
        label="If the loss is not finite",
        kind="choice",
        choices=(("wait", "Wait for me"), ("retry", "Halve the learning rate")),
        help="Halving resumes from the newest checkpoint, up to three times.",
    ),
)
