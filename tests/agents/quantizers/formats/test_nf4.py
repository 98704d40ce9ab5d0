"""NF4 written weight by weight: the bytes of a model that was quantized as a whole."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from agents.contract.requests.exports import MakeJob, Origin, TextSource
from agents.quantizers.formats import nf4
from agents.quantizers.formats.registry import WriteRequest
from agents.quantizers.job.job import JobProgress
from agents.quantizers.merging import shard_files
from tests.agents.quantizers.own_memory import OwnMemory
from tests.agents.trainer.model.mixtures import save_mixture
from tests.agents.trainer.ranks import DEMO, make_tiny_model

INDEX = "model.safetensors.index.json"


def write(model: Path, folder: Path) -> Path:
    folder.mkdir()
    job = MakeJob(
        python="python",
        model=str(model),
        method="nf4",
        destination=str(folder),
        origin=Origin(base="b", data="d", run_id="r1", run_name="valley", step=1),
        train=TextSource(path="t"),
    )
    nf4.write(
        WriteRequest(
            job=job,
            model=model,
            folder=folder,
            calibration=(),
            tokenizer=None,
            tools=folder,
            progress=JobProgress(io.StringIO()),
        )
    )
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["demo", "mixture", "untied"])
def test_the_bytes_are_those_of_the_model_saved_as_a_whole(kind, tmp_path):
    if kind == "demo":
        model = DEMO / "model"
    elif kind == "mixture":  # whose experts are one parameter in memory and many in files
        model = save_mixture(tmp_path / "model", "qwen3_moe")
    else:
        model = make_tiny_model(tmp_path / "model", hidden_size=64, tie_word_embeddings=False)
    nf4.load_quantized(model, "cpu").save_pretrained(tmp_path / "whole")
    # That of the merged model is taken instead, which names the tokens that end an answer.
    (tmp_path / "whole" / "generation_config.json").unlink()
    assert read_files(write(model, tmp_path / "made")) == read_files(tmp_path / "whole")


def test_a_model_in_several_files_becomes_several_files(tmp_path, monkeypatch):
    base = make_tiny_model(tmp_path / "base", 4, hidden_size=64)
    model = LlamaForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "model", max_shard_size="150KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= 3
    nf4.load_quantized(base, "cpu").save_pretrained(tmp_path / "whole")
    monkeypatch.setattr(shard_files, "SHARD_BYTES", 60_000)
    made = write(tmp_path / "model", tmp_path / "made")
    index = json.loads((made / INDEX).read_bytes())
    parts = {path.name: load_file(path) for path in made.glob("*.safetensors")}
    assert len(parts) >= 3
    assert {name: file for file, part in parts.items() for name in part} == index["weight_map"]
    found = {name: one for part in parts.values() for name, one in part.items()}
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], one) for name, one in whole.items())
    assert not [path for path in made.iterdir() if path.name.startswith(".")]


@pytest.mark.campaign
def test_memory_holds_a_few_weights_of_many(tmp_path, monkeypatch):
    monkeypatch.setattr(nf4, "_WRITTEN_BYTES", 1 << 20)
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=48,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(tmp_path / "model", max_shard_size="50MB")
    whole = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    del model
    write(DEMO / "model", tmp_path / "imports")
    with OwnMemory() as memory:
        made = write(tmp_path / "model", tmp_path / "made")
    result = (made / "model.safetensors").stat().st_size
    print(f"peak {memory.peak_bytes:,} of {whole:,}, result {result:,}")
    assert memory.peak_bytes < result < whole / 3
