"""The original is measured once, where it can be, and leaves nothing of itself in memory."""

import gc
import io
import weakref

import pytest
import torch
from accelerate import cpu_offload

from agents.quantizers.inference.models import choose_place, load_model
from agents.quantizers.job.job import JobProgress
from agents.quantizers.proof import reference_model
from tests.agents.trainer.ranks import DEMO

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
        if may_stream:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load_model(model, device)

    found = look(tmp_path, monkeypatch, load)
    assert asked == [("cuda:0", True), ("cpu", False)]
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
    ("free_gpu_gib", "free_gib", "resident_gib", "device"),
    [
        (16, 20, None, "cuda:0"),
        (12, 20, 9.5, "cuda:0"),
        (12, 10, None, "cpu"),  # what does not stay on the GPU has to be somewhere
        (3, 20, None, "cpu"),
    ],
)
def test_where_a_model_of_13_gib_is_measured(free_gpu_gib, free_gib, resident_gib, device):
    place = choose_place(13 * GIB, "cuda:0", free_gpu_gib * GIB, free_gib * GIB, may_stream=True)
    assert place.device == device
    assert place.resident_bytes == (None if resident_gib is None else resident_gib * GIB)
