"""Advice about runs that are allowed: each piece is said when it applies, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from agents.contract.spec import CheckpointSpec, DataSpec, RunSpec
from app.runfile.advice import advise

CARDS = ("cuda:0", "cuda:0")


def advised(devices: tuple[str, ...], **changes: Any) -> dict[str, str]:
    spec = RunSpec(model="m", data=DataSpec(train="t"), **changes)
    return {advice.key: advice.text for advice in advise(spec, devices)}


@pytest.mark.parametrize("devices", [(), ("cpu",), ("cuda:0",), CARDS])
def test_the_defaults_need_no_advice(devices: tuple[str, ...]) -> None:
    assert advised(devices) == {}


@pytest.mark.parametrize(
    ("devices", "changes", "key", "words"),
    [
        (("cuda:0",), {"compression": "bf16"}, "compression", "single rank"),
        (("cpu", "cpu"), {"optimizer": "paged_adamw_8bit"}, "optimizer", "adamw_8bit"),
        (("cpu",), {"precision": "fp16"}, "precision", "fp32"),
        (("cpu",), {"memory_gib": 8.0}, "memory_gib", "GPUs"),
        ((), {"learning_rate": 0.5}, "learning_rate", "diverge"),
        ((), {"learning_rate": 2e-4, "objective": "dpo"}, "learning_rate", "DPO"),
        (
            (),
            {"checkpoint": CheckpointSpec(every_minutes=None)},
            "checkpoint.every_minutes",
            "power cut",
        ),
    ],
)
def test_each_is_said_where_it_applies(
    devices: tuple[str, ...], changes: dict[str, Any], key: str, words: str
) -> None:
    found = advised(devices, **changes)
    assert list(found) == [key]
    assert words in found[key]


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (CARDS, {"compression": "powersgd"}),
        (("cuda:0", "cpu"), {"optimizer": "paged_adamw_8bit", "memory_gib": 8.0}),
        (("cpu",), {"optimizer": "adamw_8bit"}),
        (CARDS, {"objective": "dpo", "learning_rate": 5e-6}),
    ],
)
def test_and_nowhere_else(devices: tuple[str, ...], changes: dict[str, Any]) -> None:
    assert advised(devices, **changes) == {}
