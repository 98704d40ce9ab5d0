"""Sizes of artifacts against those of real files, and room on disks."""

import pytest

from app.artifacts.estimates.forecast import describe_forecast, forecast_artifact
from app.planning.shape.model_shape import read_shape

LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip
TIED = {
    "model_type": "llama", "vocab_size": 768, "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}  # fmt: skip
APART = {
    **TIED, "vocab_size": 8192, "intermediate_size": 1536, "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
ODD = {
    **TIED, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
}  # fmt: skip
SMALL = {
    **TIED, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
MIXTURE = {
    "model_type": "qwen3_moe", "vocab_size": 768, "num_experts_per_tok": 4,
    "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
MEASURED = [
    (TIED, "F16", 95254496), (TIED, "Q8_0", 50649056), (TIED, "Q6_K", 41919456),
    (TIED, "Q5_K_M", 35521504), (TIED, "Q4_K_M", 30835680), (TIED, "Q3_K_M", 24581088),
    (APART, "F16", 126081088), (APART, "Q8_0", 67098688), (APART, "Q6_K", 51861568),
    (APART, "Q5_K_M", 45176896), (APART, "Q4_K_M", 38885440), (APART, "Q3_K_M", 31873088),
    (ODD, "F16", 3568096), (ODD, "Q8_0", 1909216), (ODD, "Q4_K_M", 1316320),
]  # fmt: skip
"""Made by the converter and llama-quantize of llama.cpp b10605."""


@pytest.mark.parametrize(("config", "kind", "size"), MEASURED)
def test_gguf_files_are_as_large_as_foretold(config, kind, size):
    (found,) = forecast_artifact(read_shape(config), "gguf", (kind,)).files
    tokenizer = 25_000 if config is not APART else 184_000
    assert found == (kind, pytest.approx(size - tokenizer, rel=0.005))


def test_experts_are_quantized_in_gguf_as_other_matrices():
    """A Qwen3-MoE of 1,114 MB became 593 MB in Q8_0, made by that converter."""
    config = {
        **MIXTURE, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512,
        "num_experts": 16, "num_hidden_layers": 20, "num_attention_heads": 16,
    }  # fmt: skip
    files = dict(forecast_artifact(read_shape(config), "gguf", ("Q8_0", "Q4_K_M")).files)
    assert files["Q8_0"] == pytest.approx(593e6, rel=0.005)
    assert files["Q4_K_M"] < 0.6 * files["Q8_0"]


def test_experts_are_quantized_by_gptqmodel_and_not_in_nf4():
    """A Qwen3-MoE of two layers, made in both ways on a CPU."""
    config = {
        **MIXTURE, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128,
        "num_experts": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    shape = read_shape(config)
    gptq = forecast_artifact(shape, "gptq", ("4-bit",)).final_bytes
    assert gptq == pytest.approx(1_569_032, rel=0.03)
    assert forecast_artifact(shape, "nf4").final_bytes > 2 * shape.num_all_experts
    assert forecast_artifact(shape, "awq").final_bytes < gptq


@pytest.mark.parametrize(
    ("config", "method", "types", "size"),
    [(ODD, "nf4", (), 1190256), (SMALL, "awq", (), 1425640), (SMALL, "gptq", ("4-bit",), 1452296)],
)
def test_folders_are_as_large_as_foretold(config, method, types, size):
    (found,) = forecast_artifact(read_shape(config), method, types).files
    assert found[1] == pytest.approx(size, rel=0.01)


def test_what_the_node_needs_counts_all_that_is_there_at_once():
    shape = read_shape(LLAMA)
    merged = forecast_artifact(shape, "merged")
    assert merged.node_bytes == int(1.03 * 2 * shape.num_parameters)
    small = forecast_artifact(shape, "gguf", ("Q4_K_M",))
    with_whole = forecast_artifact(shape, "gguf", ("F16", "Q4_K_M"))
    assert small.temporary_bytes > with_whole.temporary_bytes, "F16 is made in either case"
    assert small.node_bytes > small.final_bytes + 2 * merged.merged_bytes
    awq = forecast_artifact(shape, "awq")
    assert awq.temporary_bytes > 2 * awq.final_bytes, "layers are kept, to go on with them"
    other = forecast_artifact(read_shape({**LLAMA, "model_type": "mistral"}), "awq")
    assert other.temporary_bytes < 1.4 * awq.final_bytes, "and where they cannot be, they are not"
    once = forecast_artifact(shape, "awq", engine="autoawq")
    assert once.final_bytes == awq.final_bytes
    assert once.temporary_bytes < 0.2 * awq.temporary_bytes, "AutoAWQ keeps none"
    assert describe_forecast(small) == "Q4_K_M 3.8 GiB; 29.8 GiB on the node while it is made"


def test_fewer_bits_are_never_larger():
    shape = read_shape(LLAMA)
    kinds = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M")
    sizes = [size for _, size in forecast_artifact(shape, "gguf", kinds).files]
    assert sizes == sorted(sizes, reverse=True)
    wide, narrow = (forecast_artifact(shape, "gptq", (kind,)) for kind in ("8-bit", "4-bit"))
    assert wide.final_bytes > 1.8 * narrow.final_bytes
