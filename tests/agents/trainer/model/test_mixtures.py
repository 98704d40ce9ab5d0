"""A mixture of experts in 4 bits with adapters on its experts: trained, resumed and merged."""

from __future__ import annotations

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agents.contract.spec import AdapterSpec
from agents.quantizers.job.job import JobProgress
from agents.quantizers.merge import merge, read_job
from tests.agents.quantizers.forked_converter import convert
from tests.agents.trainer.checkpoint.test_promises import (
    HALF,
    NUM_STEPS,
    copy_half,
    file_hashes,
    hex_losses,
    long_spec,
)
from tests.agents.trainer.model.mixtures import save_mixture
from tests.agents.trainer.ranks import Run

pytestmark = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
IDS_BT = torch.arange(6, 46)[None]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("mixture")
    model = save_mixture(folder / "model", "qwen2_moe")  # with a shared expert
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


@pytest.fixture(scope="module")
def merged(run, tmp_path_factory) -> Path:
    """Return the folder of the merged model."""
    tmp_path = tmp_path_factory.mktemp("merged")
    job = {
        "run_id": "r1", "step": NUM_STEPS, "python": sys.executable,
        "model_path": str(run.model), "destination": str(tmp_path / "out"),
        "agent_home": str(run.home),
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    merge(read_job(tmp_path / "job.json"), JobProgress(io.StringIO()))
    return tmp_path / "out"


def test_the_merged_model_is_base_and_adapter_together(run, merged):
    base = AutoModelForCausalLM.from_pretrained(run.model)
    plain = logits(base)
    found = logits(AutoModelForCausalLM.from_pretrained(merged))
    both = logits(PeftModel.from_pretrained(base, merged / "adapter"))
    assert torch.allclose(found, both, rtol=1e-3, atol=1e-3 * plain.abs().max().item())
    assert (found - plain).abs().max() > 0.01
    # The files have the names that other programs know: one matrix for each expert.
    names = [set(load_file(one / "model.safetensors")) for one in (run.model, merged)]
    assert names[0] == names[1]
    assert any(name.endswith(".experts.3.gate_proj.weight") for name in names[0])


def test_llama_cpp_predicts_what_the_merged_model_does(merged, tmp_path):
    pytest.importorskip("xllamacpp")
    from agents.quantizers.inference.llama_cpp import LlamaCpp

    convert(merged, tmp_path / "model.gguf", "F16")
    row = IDS_BT[0].tolist()
    found = LlamaCpp(tmp_path / "model.gguf", num_words=768, context_tokens=64).predict(row)
    model = AutoModelForCausalLM.from_pretrained(merged)
    expected = torch.log_softmax(logits(model)[0, :-1], dim=-1)
    divergence = (expected.exp() * (expected - found)).sum(dim=-1)
    assert divergence.mean() < 0.01


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS_BT).logits.double()
