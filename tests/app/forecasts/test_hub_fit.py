"""A model of the hub is judged by the planner, from its config alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from app.forecasts.hub_fit import judge_fit
from app.forecasts.planner import Planner, describe_nodes
from app.hub.hub_item import HubFit
from app.runs.services import Services
from tests.app.forecasts.test_planner import gpu_facts

LLAMA = "meta-llama/Llama-2-7b-hf"


def judge(
    services: Services, model: str, config: Mapping[str, Any] | None, *sizes_gib: int
) -> HubFit:
    facts = {f"pc-{n}": gpu_facts(gib=gib) for n, gib in enumerate(sizes_gib)}
    cluster, planner = describe_nodes(services.planning, facts), Planner(services)
    if config is None:
        found = services.configs.find_here(model)
        assert found is not None
        config = found.config
    return asyncio.run(
        judge_fit(model, config, len(facts), lambda spec: planner.plan(spec, cluster))
    )


@pytest.mark.parametrize(
    ("sizes_gib", "verdict", "adapter", "text"),
    [
        ((48,), "fits", "lora", "LoRA on pc-0"),
        ((24, 24, 24), "fits", "lora", "LoRA on all three PCs"),
        ((12, 12, 12), "fits", "qlora", "QLoRA on all three PCs"),
        ((8,), "fits", "qlora", "QLoRA on pc-0"),
        ((6,), "fits", "lora", "LoRA on pc-0, with its weights streamed"),
        ((2,), "too-large", "", r"Too large: QLoRA needs [\d.]+ GiB on pc-0, which has 1\.8 GiB"),
    ],
)
def test_a_model_fits_with_lora_else_with_qlora_else_not(
    services: Services, sizes_gib: tuple[int, ...], verdict: str, adapter: str, text: str
) -> None:
    found = judge(services, LLAMA, None, *sizes_gib)
    assert (found.verdict, found.adapter) == (verdict, adapter)
    assert re.fullmatch(text, found.text)
    assert bool(found.nodes) == (verdict == "fits")


def test_a_shape_that_cannot_be_read_is_told_from_a_model_that_cannot_be_trained(
    services: Services,
) -> None:
    folder = services.paths.configs
    folder.mkdir(parents=True)
    (folder / "org--odd.json").write_text('{"model_type": "llama"}')
    odd = judge(services, "org/odd", None, 24)
    assert odd.verdict == "unknown"
    assert odd.text.startswith("Unknown shape: The planner does not know the sizes of llama")
    found = services.configs.find_here(LLAMA)
    assert found is not None
    text = json.dumps({**found.config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    (folder / "org--gptq.json").write_text(text)
    gptq = judge(services, "org/gptq", None, 24)
    assert gptq.verdict == "unusable"
    assert "gptq" in gptq.text
