"""What is exported of every family: the merge is base plus adapter; GGUF what llama.cpp knows."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agents.quantizers import merge
from agents.quantizers.job.job import JobProgress
from agents.trainer.checkpoint.state import ADAPTER_CONFIG, ADAPTER_FILE, adapter_config
from tests.agents.trainer.model.families import FAMILIES, adapt, adapt_all, make_family

IDS = torch.arange(3, 20)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_and_reloaded_adapters_compute_what_was_trained(family, tmp_path):
    base = make_family(family)
    base.save_pretrained(tmp_path / "base")
    plain = logits(base)
    adapted = adapt(base, dropout=0.0)
    trained = logits(adapted.module)
    largest = trained.abs().max()
    assert (trained - plain).abs().max() > 0.01 * largest
    (tmp_path / "adapter").mkdir()
    values = {name: value.detach().clone() for name, value in adapted.named_parameters()}
    save_file(values, tmp_path / "adapter" / ADAPTER_FILE)
    config = json.dumps(adapter_config(adapted, adapt_all(0.0)))
    (tmp_path / "adapter" / ADAPTER_CONFIG).write_text(config)

    checkpoint = SimpleNamespace(path=tmp_path / "adapter")
    progress = JobProgress(io.StringIO())
    merge.write_model(tmp_path / "base", checkpoint, tmp_path / "merged", progress)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - trained).abs().max() < 1e-4 * largest
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    reloaded = PeftModel.from_pretrained(reloaded, tmp_path / "adapter")
    assert (logits(reloaded) - trained).abs().max() < 1e-5 * largest
