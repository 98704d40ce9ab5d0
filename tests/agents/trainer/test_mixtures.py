"""A mixture of experts in 4 bits with adapters on its experts: trained, resumed and merged."""

from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agents.contract.spec import AdapterSpec
from agents.quantizers.job.job import JobProgress
from agents.quantizers.merge import merge, read_job
from tests.agents.trainer.mixtures import save_mixture
from tests.agents.trainer.ranks import Run
from tests.agents.trainer.test_promises import (
    HALF,
    NUM_STEPS,
    copy_half,
    file_hashes,
    hex_losses,
    long_spec,
)

pytestmark = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
IDS_BT = torch.arange(6, 46)[None]


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def run(request, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_mixture(folder / "model", request.param)
    adapter = AdapterSpec(kind="qlora", rank=4, alpha=8, dropout=0.0, experts=True)
    run = Run(folder / "home", model, long_spec(adapter=adapter))
    run.train_to_end()
    return run


def test_a_resume_is_exact_to_the_last_bit(run, tmp_path):
    half = copy_half(run, tmp_path / "half")
    half.train_to_end(resume_step=HALF)
    expected = hex_losses(run, 1)
    assert hex_losses(half, 2) == {s: expected[s] for s in range(HALF + 1, NUM_STEPS + 1)}
    made = file_hashes(run.checkpoint(NUM_STEPS))
    assert file_hashes(half.checkpoint(NUM_STEPS)) == made


def test_the_merged_model_is_base_and_adapter_together(run, tmp_path):
    job = {
        "run_id": "r1", "step": NUM_STEPS, "python": sys.executable,
        "model_path": str(run.model), "destination": str(tmp_path / "out"),
        "agent_home": str(run.home),
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    merge(read_job(tmp_path / "job.json"), JobProgress(io.StringIO()))
    base = AutoModelForCausalLM.from_pretrained(run.model)
    plain = logits(base)
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    both = logits(PeftModel.from_pretrained(base, tmp_path / "out" / "adapter"))
    assert torch.allclose(merged, both, rtol=1e-3, atol=1e-3 * plain.abs().max().item())
    assert (merged - plain).abs().max() > 0.01
    # The files have the names that other programs know: one matrix for each expert.
    names = [
        set(load_file(folder / "model.safetensors")) for folder in (run.model, tmp_path / "out")
    ]
    assert names[0] == names[1]
    assert any(name.endswith(".experts.3.gate_proj.weight") for name in names[0])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS_BT).logits.double()
