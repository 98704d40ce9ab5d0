"""Merging tensor by tensor gives the bytes of merging the whole model, in far less memory."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from agents.errors import ExpectedError
from agents.quantizers.job.job import JobProgress
from agents.quantizers.merge import write_model
from agents.quantizers.merging import output_files, updates
from agents.trainer.checkpoint.sharded_files import write_shards
from agents.trainer.checkpoint.state import ADAPTER_CONFIG, ADAPTER_FILE, FULL_STEM, adapter_config
from agents.trainer.model.experts import names_as_they_are
from agents.trainer.model.model import build_trained_model
from tests.agents.quantizers.own_memory import OwnMemory
from tests.agents.trainer.model.families import make_family
from tests.agents.trainer.model.mixtures import make_mixture, pack_mxfp4
from tests.draws import seed

MIB = 1 << 20
INDEX = "model.safetensors.index.json"


def save_adapter(folder: Path, model, *, scale: float = 0.1, **settings):
    """Save an adapter that changes a model, in a checkpoint's folder."""
    spec = RunSpec(
        model="m",
        data=DataSpec(train="x"),
        adapter=AdapterSpec(rank=3, dropout=0.0, **settings),
        sequence_tokens=64,
    )
    trained = build_trained_model(
        spec, model, None, plain_template=False, device=torch.device("cpu")
    )
    draw = torch.Generator().manual_seed(seed(7))
    values = {
        name: (0.0 if "lora" in name else 1.0) + scale * torch.randn(one.shape, generator=draw)
        for name, one in trained.named_parameters()
    }
    folder.mkdir()
    save_file(values, folder / ADAPTER_FILE)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(trained, spec)))
    return SimpleNamespace(path=folder)


def merge_whole(base: Path, checkpoint, folder: Path, shard_size: str, **settings) -> None:
    """Merge with the whole model in memory, as PEFT does, but for the types of the sums."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", **settings)
    with torch.no_grad(), names_as_they_are():
        adapted = PeftModel.from_pretrained(model, checkpoint.path)
        layers = [one for one in adapted.modules() if isinstance(one, LoraLayer)]
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if head in layers and head.get_base_layer().weight is embeddings.weight:
            head.get_base_layer().weight = torch.nn.Parameter(embeddings.weight.clone())
            model.config.tie_word_embeddings = False
        for layer in layers:
            weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
            wide = weight.float()
            weight.data = wide  # so that PEFT rounds no delta
            delta = ParamWrapper.get_delta_weight if isinstance(layer, ParamWrapper) else None
            found = delta(layer, "default") if delta else layer.get_delta_weight("default")
            merged = wide + found
            if "default" in layer.lora_magnitude_vector:
                norm = torch.linalg.norm(merged, dim=1)
                merged = merged * (layer.lora_magnitude_vector["default"].weight / norm)[:, None]
            weight.data = merged.to(model.dtype)
        adapted.unload().save_pretrained(folder, max_shard_size=shard_size)


def read_all(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files but those of weights, and of all tensors, as the index says."""
    found = {one.name: one.read_bytes() for one in folder.iterdir() if "model" not in one.name}
    places = json.loads((folder / INDEX).read_bytes())["weight_map"]
    for name in set(places.values()):
        for key, one in load_file(folder / name).items():
            assert places.pop(key) == name
            found[f"{key} {one.dtype} {tuple(one.shape)}"] = one.view(torch.uint8).numpy().tobytes()
    assert not places
    return found


def is_near(name: str, found: bytes, whole: bytes) -> bool:
    """Return whether all bytes are equal, or fp32 values but for their last digits.

    Some CPUs add up a product of a few rows in another order than that of all.
    """
    if found == whole or "torch.float32" not in name or len(found) != len(whole):
        return found == whole
    one, other = (torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (found, whole))
    return torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def make_tied() -> torch.nn.Module:
    return make_family("Llama 3, biased and tied", torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: make_mixture("qwen3_moe", torch.bfloat16), {"experts": True}),
        (lambda: make_mixture("gpt_oss"), {"experts": True, "targets": "all-linear"}),
        (lambda: make_mixture("llama4_text", torch.bfloat16), {"experts": True}),
        (lambda: make_mixture("glm4_moe", torch.bfloat16), {"targets": "all-linear"}),
        (make_tied, {"targets": ("q_proj", "lm_head"), "dora": True}),
    ],
    ids=["experts", "transposed experts", "Llama 4", "shared experts", "tied head, DoRA"],
)
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")
def test_all_files_are_those_of_a_whole_merge(make, settings, tmp_path, monkeypatch):
    base = make()
    base.save_pretrained(tmp_path / "base", max_shard_size="30KB")
    checkpoint = save_adapter(tmp_path / "adapter", base, **settings)
    merge_whole(tmp_path / "base", checkpoint, tmp_path / "whole", "20KB")
    monkeypatch.setattr(output_files, "_SHARD_SIZE", "20KB")
    monkeypatch.setattr(updates, "_MAX_PART", 500)  # a few rows, or one expert, at a time
    write_model(tmp_path / "base", checkpoint, tmp_path / "out", JobProgress(io.StringIO()))
    whole, found = read_all(tmp_path / "whole"), read_all(tmp_path / "out")
    assert len(whole) > 20
    assert found.keys() == whole.keys()
    assert [name for name in whole if not is_near(name, found[name], whole[name])] == []
    assert all(one.stat().st_size < 120_000 for one in (tmp_path / "out").iterdir())


def test_experts_in_mxfp4_are_merged_in_16_bits(tmp_path):
    base = make_mixture("gpt_oss", torch.bfloat16, intermediate_size=64)
    base.save_pretrained(tmp_path / "base")
    checkpoint = save_adapter(tmp_path / "adapter", base, experts=True)
    pack_mxfp4(tmp_path / "base")
    settings = {"quantization_config": Mxfp4Config(dequantize=True)}
    merge_whole(tmp_path / "base", checkpoint, tmp_path / "whole", "5GB", **settings)
    write_model(tmp_path / "base", checkpoint, tmp_path / "out", JobProgress(io.StringIO()))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_other_quantized_bases_are_refused_by_name(tmp_path):
    base = make_family("Llama 3")
    base.save_pretrained(tmp_path / "base")
    checkpoint = save_adapter(tmp_path / "adapter", base)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExpectedError, match=r"is quantized \(gptq\)"):
        write_model(tmp_path / "base", checkpoint, tmp_path / "out", JobProgress(io.StringIO()))


@pytest.mark.parametrize("repeats_head", [False, True])
def test_full_weights_replace_those_of_the_base(repeats_head, tmp_path):
    base = make_tied()
    base.save_pretrained(tmp_path / "base")
    if repeats_head:  # as some checkpoints do; it says nothing that the embeddings do not
        embeddings = base.get_input_embeddings().weight.data
        tensors = {**base.state_dict(), "lm_head.weight": embeddings.clone()}
        save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    trained = {name: torch.randn(one.shape) for name, one in base.named_parameters()}
    (tmp_path / "full").mkdir()
    write_shards(trained, tmp_path / "full", FULL_STEM, 3000)
    checkpoint = SimpleNamespace(path=tmp_path / "full")
    write_model(tmp_path / "base", checkpoint, tmp_path / "out", JobProgress(io.StringIO()))
    for name, one in base.named_parameters():
        one.data.copy_(trained[name])
    base.save_pretrained(tmp_path / "whole")
    found, whole = (tmp_path / one / "model.safetensors" for one in ("out", "whole"))
    assert found.read_bytes() == whole.read_bytes()


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    base = make_family("Llama 3")
    base.save_pretrained(tmp_path / "base")
    checkpoint = save_adapter(tmp_path / "adapter", base, scale=float("inf"))
    with pytest.raises(ExpectedError, match="holds numbers that are not finite"):
        write_model(tmp_path / "base", checkpoint, tmp_path / "out", JobProgress(io.StringIO()))


def test_memory_stays_near_the_largest_tensor(tmp_path):
    sizes = {
        "hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 8, "vocab_size": 2048,
        "num_hidden_layers": 20, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    config = AutoConfig.for_model("qwen3_moe", **sizes)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.to_empty(device="cpu")  # random weights would take longer than all else
    for parameter in base.parameters():
        parameter.data.zero_()
    base.save_pretrained(tmp_path / "base", max_shard_size="100MB")
    checkpoint = save_adapter(tmp_path / "adapter", base, experts=True)
    whole = sum(path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors"))
    assert whole > 150 * MIB
    del base
    with OwnMemory() as memory:
        write_model(tmp_path / "base", checkpoint, tmp_path / "out", JobProgress(io.StringIO()))
    assert memory.peak_bytes < whole / 2
