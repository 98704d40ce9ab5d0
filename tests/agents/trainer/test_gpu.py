"""The same promises on an NVIDIA GPU: bfloat16, exact resume, cards that are too small."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from agents.contract.run import RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec
from tests.agents.trainer.ranks import DEMO, Run, finish, make_spec, run_trainer, start

pytestmark = pytest.mark.gpu
GPU = (RankPlacement(rank=0, local_rank=0, node="here", device="cuda:0", device_id="GPU-0"),)


def gpu_spec(**changes):
    checkpoint = CheckpointSpec(every_minutes=None, every_steps=4)
    return make_spec(max_steps=8, checkpoint=checkpoint, learning_rate=2e-3, **changes)


@pytest.mark.parametrize("kind", ["lora", "qlora", "full"])
def test_a_resume_is_exact_to_the_last_bit(tmp_path, kind):
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    spec = gpu_spec(adapter=AdapterSpec(kind=kind, rank=8, dropout=0.1))
    run = Run(tmp_path / "run", DEMO / "model", spec)
    run.train_to_end(ranks=GPU)
    shutil.rmtree(run.checkpoint(8))
    run.train_to_end(ranks=GPU, resume_step=4)
    first, second = run.steps(attempt=1), run.steps(attempt=2)
    assert list(second) == [5, 6, 7, 8]
    for step, line in second.items():
        assert line["loss_hex"] == first[step]["loss_hex"]
    assert first[8]["loss"] < first[1]["loss"]
    assert first[8]["memory_bytes"] > 0


def test_the_gpu_computes_what_the_cpu_does(tmp_path):
    spec = gpu_spec(precision="fp64")
    on_gpu, on_cpu = (Run(tmp_path / name, DEMO / "model", spec) for name in ("gpu", "cpu"))
    on_gpu.train_to_end(ranks=GPU)
    on_cpu.train_to_end()
    for step, line in on_gpu.steps().items():
        # RMSNorm of Transformers works in float32 whatever the precision.
        assert line["loss"] == pytest.approx(on_cpu.steps()[step]["loss"], rel=1e-5)


def run_on_a_small_card(environ: dict[str, str], share: float) -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(share, 0)
    run_trainer(environ)


def test_a_full_card_means_smaller_pieces(tmp_path):
    spec = gpu_spec(
        batch_sequences=64, sequence_tokens=512, data=DataSpec(train="t", format="text")
    )
    run = Run(tmp_path / "run", DEMO / "model", spec)
    row = json.dumps({"text": "The river Venna runs through Tolmar. " * 128})
    run.train.write_text(f"{row}\n" * 64)
    run.intend(ranks=GPU)
    environ = {"RACKLESS_ATTEMPT_DIR": str(run.attempt_folder)}
    share = (300 << 20) / torch.cuda.get_device_properties(0).total_memory
    assert finish([start(run_on_a_small_card, environ, share)]) == [0], run.read_log(0)[-2000:]
    chosen = [line for line in run.journal() if line["kind"] == "setting"]
    assert chosen
    assert all(line["micro_tokens"] < 64 * 512 for line in chosen), chosen
    warnings = [line["message"] for line in run.journal() if line["kind"] == "warning"]
    of_memory = [message for message in warnings if "are cut" not in message]
    assert all("Memory ran out" in message for message in of_memory), warnings
    assert run.steps()[8]["loss"] < run.steps()[1]["loss"]
