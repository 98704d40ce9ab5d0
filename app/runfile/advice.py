"""Advice on settings of a run that are allowed but probably not intended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import RunSpec
from app.text import capitalize, show_exponent

if TYPE_CHECKING:
    from agents.shared.models.folder import ModelFolder

HIGH_LEARNING_RATE = 0.01
"""Learning rate above which most runs diverge, with any method."""
LOW_LEARNING_RATE = 1e-8
"""Learning rate below which 16-bit values hardly change."""
HIGH_SCALE, HIGH_DROPOUT, HIGH_EPOCHS, HIGH_BATCH = 64.0, 0.5, 100, 4096
HIGH_WARMUP, HIGH_DECAY, LOW_NORM = 0.5, 1.0, 1e-3
"""Bounds of usual values; others are allowed but get advice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldAdvice:
    key: str
    """Key of the run file, such as `compression` or `checkpoint.every_minutes`."""
    text: str


def advise(
    spec: RunSpec,
    devices: Sequence[str],
    *,
    model: ModelFolder | None = None,
    num_rows: int | None = None,
) -> tuple[FieldAdvice, ...]:
    """Return advice on the settings of a run.

    Args:
        spec: spec of the run.
        devices: device of each rank, such as `cpu` or `cuda:0`; empty: unknown.
        model: inspected folder or config of its model; None: unknown.
        num_rows: number of examples of its training data; None: unknown.
    """
    return (
        *_advise_rates(spec),
        *_advise_adapter(spec),
        *_advise_length(spec, num_rows),
        *_advise_evaluation(spec),
        *_advise_devices(spec, devices),
        *_advise_checkpoints(spec),
        *_advise_model(spec, model),
    )


def _advise_adapter(spec: RunSpec) -> list[FieldAdvice]:
    adapter, found = spec.adapter, []
    if adapter.kind == "full":
        return []
    scale = adapter.alpha / (adapter.rank**0.5 if adapter.rslora else adapter.rank)
    if not 1 / HIGH_SCALE <= scale <= HIGH_SCALE:
        text = f"Scales the adapter by {scale:.3g}, with rank {adapter.rank}: usual is 1 to 4."
        found.append(FieldAdvice(key="adapter.alpha", text=text))
    if adapter.dropout > HIGH_DROPOUT:
        text = f"Keeps only {1 - adapter.dropout:.0%} of the adapter's inputs: 0 to 0.1 is usual."
        found.append(FieldAdvice(key="adapter.dropout", text=text))
    return found


def _advise_length(spec: RunSpec, num_rows: int | None) -> list[FieldAdvice]:
    found = []
    if spec.max_steps is None and spec.epochs > HIGH_EPOCHS:
        text = f"Reads all data {spec.epochs:,g} times: most models memorize it after 10."
        found.append(FieldAdvice(key="epochs", text=text))
    if num_rows is not None and spec.batch_sequences > num_rows:
        times = spec.batch_sequences / num_rows
        text = f"The data has {num_rows:,} examples, so each step reads all of them"
        text += f", {times:,.0f} times: usually 8 to 64 are enough." if times >= 1.5 else "."
        found.append(FieldAdvice(key="batch_sequences", text=text))
    elif num_rows is None and spec.batch_sequences > HIGH_BATCH:
        text = f"{spec.batch_sequences:,} sequences per step are far more than usual."
        found.append(FieldAdvice(key="batch_sequences", text=text))
    if spec.warmup_share > HIGH_WARMUP:
        text = f"The learning rate rises during {spec.warmup_share:.0%} of the run: 0.03 is usual."
        found.append(FieldAdvice(key="warmup_share", text=text))
    if spec.weight_decay > HIGH_DECAY:
        text = f"{spec.weight_decay:g} pulls weights to 0 quickly: 0 to 0.1 is usual."
        found.append(FieldAdvice(key="weight_decay", text=text))
    if spec.max_gradient_norm < LOW_NORM:
        text = f"{spec.max_gradient_norm:g} scales nearly all gradients away: 1 is usual."
        found.append(FieldAdvice(key="max_gradient_norm", text=text))
    return found


def _advise_model(spec: RunSpec, model: ModelFolder | None) -> list[FieldAdvice]:
    if model is None:
        return []
    # Imported on use, since a list of runs does not need it.
    from agents.shared.models.fit import find_misfits

    return [
        FieldAdvice(key=one.key, text=f"{capitalize(one.text)}. {one.hint}".rstrip(". ") + ".")
        for one in find_misfits(spec, model)
        if one.severity == "warning"
    ]


def _advise_rates(spec: RunSpec) -> list[FieldAdvice]:
    rate = spec.learning_rate
    if rate > HIGH_LEARNING_RATE:
        return [
            FieldAdvice(key="learning_rate", text="Unusually high: most runs diverge above 0.01.")
        ]
    if rate < LOW_LEARNING_RATE:
        text = f"{rate:g} is so low that nothing is learned; 2e-4 suits most adapters."
        return [FieldAdvice(key="learning_rate", text=text)]
    objective = OBJECTIVES[spec.objective]
    if objective.high_learning_rate is not None and rate > objective.high_learning_rate:
        text = (
            f"{rate:g} is high for {objective.label}, which then forgets how to write; "
            f"{show_exponent(objective.usual_learning_rate)} is a good start."
        )
        return [FieldAdvice(key="learning_rate", text=text)]
    return []


def _advise_evaluation(spec: RunSpec) -> list[FieldAdvice]:
    if spec.evaluate_every_steps is None or spec.data.eval is not None:
        return []
    text = "Without effect: there is no evaluation data."
    return [FieldAdvice(key="evaluate_every_steps", text=text)]


def _advise_devices(spec: RunSpec, devices: Sequence[str]) -> list[FieldAdvice]:
    found = []
    if spec.compression != "none" and len(devices) == 1:
        text = "Without effect: a single rank sends no gradients."
        found.append(FieldAdvice(key="compression", text=text))
    if not devices or any(device != "cpu" for device in devices):
        return found
    if spec.optimizer == "paged_adamw_8bit":
        text = "Trains as adamw_8bit here: only GPU memory can be paged out."
        found.append(FieldAdvice(key="optimizer", text=text))
    if spec.precision == "fp16":
        text = "Slow here: CPUs have no arithmetic for it; auto takes fp32."
        found.append(FieldAdvice(key="precision", text=text))
    if spec.memory_gib is not None:
        text = "Without effect: it limits the memory of GPUs, and no GPU is used."
        found.append(FieldAdvice(key="memory_gib", text=text))
    return found


def _advise_checkpoints(spec: RunSpec) -> list[FieldAdvice]:
    if spec.checkpoint.every_minutes is None and spec.checkpoint.every_steps is None:
        text = "Without periodic checkpoints a power cut loses the run."
        return [FieldAdvice(key="checkpoint.every_minutes", text=text)]
    return []
