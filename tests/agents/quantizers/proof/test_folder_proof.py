"""A result that no memory holds is measured by its weights on the disk, with the same figures."""

import gc
import io
import shutil
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from agents.errors import ExpectedError
from agents.quantizers import make
from agents.quantizers.formats import nf4
from agents.quantizers.formats.unpacking import PackedModel
from agents.quantizers.inference import models
from agents.quantizers.job.job import JobProgress
from agents.quantizers.proof import folder_proof
from agents.quantizers.proof.folder_proof import is_held_packed, prove_folder, prove_unpacked
from agents.quantizers.proof.reference_model import look_at_original
from tests.agents.quantizers.own_memory import OwnMemory
from tests.agents.quantizers.proof.packed_folders import pack_folder
from tests.agents.quantizers.test_make import job_for, run
from tests.draws import seed

pytest.importorskip("bitsandbytes")
GIB = 1 << 30
FILE = "model.safetensors"


class Disk(NamedTuple):
    free: int


def test_the_unpacked_result_has_the_figures_of_the_packed_one_but_its_speed(tmp_path, monkeypatch):
    usual = []

    def prove_both(job, folder, first, progress):
        usual.append(prove_folder(job, folder, first, progress))
        return prove_unpacked(job, folder, first, progress)

    monkeypatch.setattr(make, "prove_folder", prove_both)
    told, about = run(job_for(tmp_path, "nf4"), tmp_path)
    (packed,), (proof,) = usual, about["proofs"]
    # Both compute in float32; weights in 16 bits are 1 / 500 off at most.
    assert proof["distance"]["kl"] == pytest.approx(packed.distance.kl, rel=0.02)
    assert proof["distance"]["perplexity"] == pytest.approx(packed.distance.perplexity, rel=1e-3)
    assert (proof["same_answers"], proof["keep"]) == (packed.same_answers, packed.keep)
    assert proof["size_bytes"] == packed.size_bytes
    assert packed.tokens_per_s > 0
    assert (proof["tokens_per_s"], proof["first_token_s"]) == (None, None)
    assert any("unpacking it to 16 bits" in line["message"] for line in told)
    folder = tmp_path / "nf4"
    card = (folder / "README.md").read_text()
    assert "| not measured | not measured |" in card
    assert "unpacked to 16 bits on the disk" in card
    assert "Loaded and answered" not in card
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    disk = {one["name"]: one["disk_bytes"] for one in about["measured"]["phases"]}
    assert disk["proof"] > disk["quantize"] + proof["original_bytes"] / 3


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Return a model of 70 MB in several files, and the same in NF4."""
    sizes = {
        "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 8, "max_position_embeddings": 512,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("result")
    torch.manual_seed(seed(5))
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="20MB")
    nf4.load_quantized(folder / "model", "cpu").save_pretrained(folder / "nf4")
    del model
    gc.collect()
    return folder


def test_it_is_unpacked_and_measured_in_a_part_of_its_memory(result, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "ANSWER_TOKENS", 2)
    rows = [tuple(range(30, 400, 7))]
    progress = JobProgress(io.StringIO())
    shutil.copytree(result / "nf4", tmp_path / "nf4")
    whole = models.weigh(result / "model")
    monkeypatch.setattr(models, "read_available_bytes", lambda: whole // 3)
    first = look_at_original(result / "model", "cpu", rows, tmp_path / "first", progress)
    job = job_for(tmp_path, "nf4")
    gc.collect()
    with OwnMemory() as memory:
        proof = prove_folder(job, tmp_path / "nf4", first, progress)
    assert proof.is_unpacked
    # Both in bfloat16, of random weights.
    assert proof.distance.kl == pytest.approx(first.control.kl, rel=0.5)
    assert memory.peak_bytes < whole / 2
    assert PackedModel(tmp_path / "nf4").unpacked_bytes == pytest.approx(whole, rel=0.01)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(whole))
    with pytest.raises(ExpectedError, match=r"needed in .*, where 0\.1 GB are free"):
        prove_folder(job, tmp_path / "nf4", first, progress)
    assert not list((tmp_path / "nf4").glob(".*"))
    before = job_for(tmp_path, "nf4", model=str(result / "model"), destination="new/made")
    with pytest.raises(ExpectedError, match=r"needed in .*, where 0\.1 GB are free"):
        make.make(before, tmp_path, progress)
    assert not (tmp_path / "new").exists(), "refused before it begins"
    monkeypatch.setattr(models, "read_available_bytes", lambda: 3 * whole)
    folder_proof.expect_room(before, result / "model", tmp_path / "new")


@pytest.mark.parametrize(
    ("method", "device"),
    [
        ("awq", "cpu"),
        ("gptq", "cpu"),
        *(pytest.param(one, "cuda:0", marks=pytest.mark.gpu) for one in ("nf4", "awq", "gptq")),
    ],
)
def test_a_result_of_each_layout_is_unpacked_on_its_device(method, device, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "ANSWER_TOKENS", 4)
    sizes = {
        "hidden_size": 256, "intermediate_size": 512, "vocab_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(seed(3))
    model, made = tmp_path / "model", tmp_path / method
    LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(model)
    if method == "nf4":
        nf4.load_quantized(model, device).save_pretrained(made)
    else:
        pack_folder(model, made, method)
    for place in {"cpu", device}:
        PackedModel(made).unpack(tmp_path / f"unpacked-{place}", place)
    here, there = (load_file(tmp_path / f"unpacked-{one}" / FILE) for one in ("cpu", device))
    assert here.keys() == there.keys() == load_file(model / FILE).keys()
    # bitsandbytes has a kernel of its own for each device.
    off = 2**-7 if method == "nf4" else 0.0
    assert all(torch.allclose(here[name], one, rtol=off, atol=0) for name, one in there.items())

    rows, progress = [tuple(range(30, 200, 3)), tuple(range(5, 90))], JobProgress(io.StringIO())
    first = look_at_original(model, device, rows, tmp_path / "first", progress)
    job = job_for(tmp_path, method, *(("4-bit",) if method == "gptq" else ()), device=device)
    proof = prove_unpacked(job, made, first, progress)
    assert proof.is_unpacked
    # Groups of 64 for two of them, and the control has groups of 128.
    assert 0.2 * first.control.kl < proof.distance.kl < 1.5 * first.control.kl
    assert not list(made.glob(".*"))


@pytest.mark.parametrize(
    ("device", "gpu_gib", "ram_shares", "has_disk", "is_held"),
    [
        ("cuda:0", 16.0, 0.1, True, True),
        ("cuda:0", 3.6, 9.0, True, True),
        ("cuda:0", 1.0, 9.0, True, True),  # too little for layers in turn
        ("cuda:0", 1.0, 2.0, True, False),
        ("cpu", 0.0, 2.6, True, True),
        ("cpu", 0.0, 2.2, True, False),
        ("cpu", 0.0, 2.2, False, False),
    ],
)
def test_where_a_result_is_held(
    result, monkeypatch, device, gpu_gib, ram_shares, has_disk, is_held
):
    free = int(gpu_gib * GIB), int(ram_shares * models.weigh(result / "model"))
    monkeypatch.setattr(folder_proof, "read_free_memory", lambda device: free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(GIB if has_disk else 0))
    assert is_held_packed(result / "nf4", device) is is_held
