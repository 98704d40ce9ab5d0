"""Advice on settings of a run that are allowed but probably not intended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.contract.spec import RunSpec

HIGH_LEARNING_RATE = 0.01
"""Learning rate above which most runs diverge, with any method."""
HIGH_DPO_LEARNING_RATE = 1e-4
"""Learning rate above which DPO tends to ruin a model. Rafailov et al. 2023 (arXiv:2305.18290,
appendix B) train all weights with 1e-6; adapters take more, but not a hundred times as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldAdvice:
    key: str
    """Key of the run file, such as `compression` or `checkpoint.every_minutes`."""
    text: str


def advise(spec: RunSpec, devices: Sequence[str]) -> tuple[FieldAdvice, ...]:
    """Return advice on the settings of a run.

    Args:
        spec: run to check.
        devices: device of each rank, such as `cpu` or `cuda:0`; empty when unknown.
    """
    return (
        *_advise_rates(spec),
        *_advise_evaluation(spec),
        *_advise_devices(spec, devices),
        *_advise_checkpoints(spec),
    )


def _advise_rates(spec: RunSpec) -> list[FieldAdvice]:
    rate = spec.learning_rate
    if rate > HIGH_LEARNING_RATE:
        return [
            FieldAdvice(key="learning_rate", text="Unusually high: most runs diverge above 0.01.")
        ]
    if spec.objective == "dpo" and rate > HIGH_DPO_LEARNING_RATE:
        text = f"{rate:g} is high for DPO, which then forgets how to write; 5e-6 is a good start."
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
        text = "Without effect: a single rank sends its gradients to nobody."
        found.append(FieldAdvice(key="compression", text=text))
    if not devices or any(device != "cpu" for device in devices):
        return found
    if spec.optimizer == "paged_adamw_8bit":
        text = "Trains as adamw_8bit here: only a GPU has memory that can be paged out."
        found.append(FieldAdvice(key="optimizer", text=text))
    if spec.precision == "fp16":
        text = "Slow here: CPUs have no arithmetic for it; auto takes fp32."
        found.append(FieldAdvice(key="precision", text=text))
    if spec.memory_gib is not None:
        text = "Without effect: it caps the memory of GPUs, and there is none."
        found.append(FieldAdvice(key="memory_gib", text=text))
    return found


def _advise_checkpoints(spec: RunSpec) -> list[FieldAdvice]:
    if spec.checkpoint.every_minutes is None and spec.checkpoint.every_steps is None:
        text = "Without periodic checkpoints a power cut loses the run."
        return [FieldAdvice(key="checkpoint.every_minutes", text=text)]
    return []
