"""The original is measured once, where it can be, and leaves nothing of itself in memory."""

import gc
import io
import weakref

import pytest
import torch
from accelerate import cpu_offload
from transformers import LlamaConfig, LlamaForCausalLM

from agents.quantizers.inference import models
from agents.quantizers.inference.models import choose_place, load_model
from agents.quantizers.job.job import JobProgress
from agents.quantizers.proof import reference_model
from tests.agents.quantizers.own_memory import OwnMemory
from tests.agents.trainer.ranks import DEMO
from tests.draws import seed

ROWS = [(1, 4, 9, 33, 2, 8), (1, 7, 3, 3)]
GIB = 1 << 30


def look(tmp_path, monkeypatch, load):
    monkeypatch.setattr(reference_model, "load_model", load)
    progress = JobProgress(io.StringIO())
    return reference_model.look_at_original(
        DEMO / "model", "cuda:0", ROWS, tmp_path / "remembered", progress
    )


def test_a_gpu_that_is_taken_meanwhile_leaves_the_cpu(tmp_path, monkeypatch):
    asked = []

    def load(model, device, *, may_stream=False):
        asked.append((device, may_stream))
        if device != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load_model(model, device)

    found = look(tmp_path, monkeypatch, load)
    assert asked == [("cuda:0", True), ("cpu", True)], "what RAM does not hold comes from files"
    assert found.control.kl > 0
    assert reference_model.recall(tmp_path / "remembered", ROWS) == found


def test_a_model_whose_weights_come_for_each_pass_is_gone_afterwards(tmp_path, monkeypatch):
    seen = []

    def load(model, device, *, may_stream=False):
        loaded = load_model(model, "cpu")
        for layer in loaded.model.layers[1:]:
            cpu_offload(layer, torch.device("cpu"))
        seen.append(weakref.ref(loaded.model.layers[1]))
        return loaded

    plain = look(
        tmp_path / "plain", monkeypatch, lambda *_, **__: load_model(DEMO / "model", "cpu")
    )
    gc.disable()
    try:
        coming = look(tmp_path / "coming", monkeypatch, load)
        assert seen[0]() is None
    finally:
        gc.enable()
    assert coming.control == plain.control
    assert coming.answers == plain.answers


@pytest.mark.parametrize(
    ("free_gpu_gib", "free_gib", "resident_gib", "device", "ram_gib"),
    [
        (16, 20, None, "cuda:0", None),
        (12, 20, 9.5, "cuda:0", None),
        (12, 10, 9.5, "cuda:0", 5),  # what RAM does not hold comes from the files
        (3, 20, None, "cpu", None),
        (3, 10, None, "cpu", 5),
    ],
)
def test_where_a_model_of_13_gib_is_measured(free_gpu_gib, free_gib, resident_gib, device, ram_gib):
    place = choose_place(13 * GIB, "cuda:0", free_gpu_gib * GIB, free_gib * GIB, may_stream=True)
    assert place.device == device
    assert place.resident_bytes == (None if resident_gib is None else resident_gib * GIB)
    assert place.ram_bytes == (None if ram_gib is None else ram_gib * GIB)
    # The result of a method has to fit.
    assert choose_place(13 * GIB, "cpu", 0, free_gib * GIB).ram_bytes is None


def test_a_model_that_memory_does_not_hold_is_measured_from_its_files(tmp_path, monkeypatch):
    """Same figures to the last bit, in a third of the memory of the weights."""
    sizes = {
        "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 512, "num_hidden_layers": 12,
        "num_attention_heads": 8, "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(seed(5))
    base = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "model", max_shard_size="30MB")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    whole = models.weigh(tmp_path / "model")
    del base
    rows = [tuple(range(2, 90)), tuple(range(30, 400, 7))]

    def measure(name, free_bytes):
        monkeypatch.setattr(models, "read_available_bytes", lambda: free_bytes)
        gc.collect()
        with OwnMemory() as memory:
            found = reference_model.look_at_original(
                tmp_path / "model", "cpu", rows, tmp_path / name, JobProgress(io.StringIO())
            )
        return found, memory.peak_bytes

    # In bfloat16 both times: with twice the memory it would compute in float32.
    plain, _ = measure("plain", int(1.5 * whole))
    streamed, peak_bytes = measure("streamed", whole // 3)
    assert (streamed.control, streamed.answers) == (plain.control, plain.answers)
    assert streamed.reference.perplexity == plain.reference.perplexity
    assert peak_bytes < whole / 2
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before
