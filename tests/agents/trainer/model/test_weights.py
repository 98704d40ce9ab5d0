"""Weights read by several threads are those that Transformers reads itself, to the bit."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, modeling_utils

from agents.trainer.model import weights
from agents.trainer.model.weights import choose_piece, read_by_threads
from tests.draws import seed

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Sharded, tied, transposed, experts that are joined while they load, and types that are kept.
FAMILIES = {
    "llama": SMALL,
    "qwen2": {**SMALL, "tie_word_embeddings": True},
    "gemma2": SMALL,
    "phi3": {**SMALL, "pad_token_id": 0},
    "gpt2": {"vocab_size": 384, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen3_moe": {**SMALL, "num_experts": 4, "moe_intermediate_size": 64},
    "gpt_oss": {**SMALL, "num_local_experts": 4},
    "granitemoehybrid": {
        **SMALL,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
}


def save_family(folder, family, dtype=torch.bfloat16):
    torch.manual_seed(seed(1))
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def load(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": CPU}, output_loading_info=True, **settings
    )


def load_by_threads(monkeypatch, folder, **settings):
    """Load in pieces so small that even these weights need several."""
    monkeypatch.setattr(weights, "_MIN_PIECE_BYTES", 4096)
    monkeypatch.setattr(weights, "_MAX_PIECE_BYTES", 10_000)
    reports = []
    with read_by_threads(CPU, lambda done, total: reports.append((done, total))):
        model, info = load(folder, **settings)
    assert modeling_utils.safe_open is PLAIN
    return model, info, reports


PLAIN = modeling_utils.safe_open


def assert_same(one, other):
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(
            *(t.detach().flatten().view(torch.uint8) for t in (tensor, theirs[name]))
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_the_same(tmp_path, monkeypatch, family, dtype):
    folder = save_family(tmp_path, family)
    plain, told = load(folder, dtype=dtype)
    ours, ours_told, reports = load_by_threads(monkeypatch, folder, dtype=dtype)
    assert_same(ours, plain)
    assert ours_told == told
    file_bytes = sum(
        tensor.nbytes
        for path in folder.glob("*.safetensors")
        for tensor in load_file(path).values()
    )
    assert max(reports) == (file_bytes, file_bytes)


def test_4_bit_weights_are_the_same(tmp_path, monkeypatch):
    folder = save_family(tmp_path, "llama", torch.float32)
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    more = {"dtype": torch.bfloat16, "quantization_config": packing}
    plain, _ = load(folder, **more)
    ours, _, _ = load_by_threads(monkeypatch, folder, **more)
    assert_same(ours, plain)
    packed = {k: m.weight.quant_state for k, m in plain.named_modules() if "proj" in k}
    assert len(packed) == 14
    for name, state in packed.items():
        found = ours.get_submodule(name).weight.quant_state
        assert torch.equal(found.absmax, state.absmax)
        assert torch.equal(found.state2.absmax, state.state2.absmax)
        assert torch.equal(found.offset, state.offset)
    # What was packed before is read as it is.
    plain.save_pretrained(tmp_path / "packed")
    again, _, _ = load_by_threads(monkeypatch, tmp_path / "packed", dtype=torch.bfloat16)
    assert_same(again, plain)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    folder = save_family(tmp_path, "gpt2")
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        left = {k: t for k, t in tensors.items() if k != "transformer.h.1.mlp.c_fc.weight"}
        save_file(left, path, metadata={"format": "pt"})
    _, told, _ = load_by_threads(monkeypatch, folder, dtype=torch.float32)
    assert told["missing_keys"] == {"transformer.h.1.mlp.c_fc.weight"}


def test_a_file_that_becomes_shorter_ends_the_loading(tmp_path, monkeypatch):
    folder = save_family(tmp_path, "llama")
    path = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    find_ranges = weights.find_ranges

    def cut(name):
        ranges = find_ranges(name)
        if name == str(path):
            shutil.copyfile(path, tmp_path / "whole")
            with open(tmp_path / "whole", "r+b") as file:
                file.truncate(min(end for _, end in ranges.values()) - 2)
            (tmp_path / "whole").replace(path)  # the mapping of the whole file stays valid
        return ranges

    monkeypatch.setattr(weights, "find_ranges", cut)
    with pytest.raises(OSError, match="became shorter"):
        load_by_threads(monkeypatch, folder, dtype=torch.float32)
    assert modeling_utils.safe_open is PLAIN


def test_pieces_fit_the_buffers():
    for num_bytes in (1, 1 << 20, (1 << 24) + 1, 1 << 26, (1 << 32) - 1):
        assert weights._MIN_PIECE_BYTES <= choose_piece(num_bytes) <= weights._MAX_PIECE_BYTES
