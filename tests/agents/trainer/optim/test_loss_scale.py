"""fp16: the loss scale follows the overflows, on all ranks alike, and goes on after a resume."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest

from agents.contract.spec import AdapterSpec
from agents.node.manifest import read_manifest, write_manifest
from agents.trainer.optim.loss_scale import LossScale
from tests.agents.trainer.ranks import Run, finish, make_spec, start_rank


def run_without_bf16(environ: dict[str, str]) -> None:
    """Be a rank whose card has no bf16, so that `precision: auto` takes fp16 there."""
    os.environ.update(environ)
    import torch

    from agents.trainer.__main__ import main
    from agents.trainer.model import model

    model.choose_dtype = lambda name, device: torch.float16
    os._exit(main())


def train_unlike(run: Run, old_cards: set[int], **changes) -> None:
    """Train with ranks of which some have no bf16; the others take fp32, as CPUs do."""
    intent = run.intend(**changes)
    ranks = [
        start_rank(
            intent, rank, run.attempt_folder, {}, run_without_bf16 if rank in old_cards else None
        )
        for rank in range(run.num_ranks)
    ]
    assert finish(ranks) == [0] * run.num_ranks, run.read_log(0)


def test_the_factor_falls_at_once_and_rises_slowly():
    state = LossScale(factor=1024.0).after(float("inf")).after(float("nan"))
    assert state == LossScale(factor=256.0, num_skipped=2)
    for _ in range(1999):
        state = state.after(1.0)
    assert state.factor == 256
    assert state.after(1.0) == LossScale(factor=512.0, num_skipped=2)
    for _ in range(40):
        state = state.after(float("inf"))
    assert state.is_hopeless


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_fp16_trains_as_fp32_does_and_resumes_exactly(tmp_path, tiny_model, kind):
    adapter = AdapterSpec(kind=kind, rank=4, dropout=0.1)
    runs = {}
    for name in ("fp16", "fp32"):
        spec = make_spec(precision=name, adapter=adapter, shares=(2.0, 1.0), learning_rate=2e-3)
        runs[name] = Run(tmp_path / name, tiny_model, spec, 2)
        runs[name].train_to_end()
    found, expected = runs["fp16"].steps(), runs["fp32"].steps()
    for step, line in expected.items():
        assert found[step]["loss"] == pytest.approx(line["loss"], abs=0.02)
        assert found[step]["gradient_norm"] == pytest.approx(line["gradient_norm"], rel=0.02)
    shutil.rmtree(runs["fp16"].checkpoint(4))
    runs["fp16"].train_to_end(resume_step=2)
    for step, line in runs["fp16"].steps().items():
        assert line["loss_hex"] == found[step]["loss_hex"]


def test_an_overflow_skips_the_step_on_every_rank_and_is_told(tmp_path, tiny_model):
    spec = make_spec(precision="fp16", shares=(2.0, 1.0))
    run = Run(tmp_path / "run", tiny_model, spec, 2)
    run.train_to_end()
    shutil.rmtree(run.checkpoint(4))
    # A factor that overflows is put into the checkpoint: its manifest is made anew.
    path = run.checkpoint(2) / "state.json"
    state = json.loads(path.read_text())
    assert state["loss_scale"] == {"factor": 65536.0, "good_steps": 2, "num_skipped": 0}
    state["loss_scale"]["factor"] = 2.0**34
    path.write_text(json.dumps(state))
    manifest = read_manifest(run.checkpoint(2))
    for entry in manifest["files"]:
        if entry["path"] == "state.json":
            data = path.read_bytes()
            entry.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    write_manifest(run.checkpoint(2), manifest)
    run.train_to_end(resume_step=2)
    for rank in (0, 1):
        told = [line["message"] for line in run.journal(rank) if line["kind"] == "warning"]
        assert told[-1].startswith("A step was skipped, as its gradients overflowed fp16")
        assert run.steps(rank)[3]["gradient_norm"] is None
    after = json.loads((run.checkpoint(4) / "state.json").read_text())["loss_scale"]
    assert after == {"factor": 2.0**32, "good_steps": 0, "num_skipped": 2}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_card_without_bf16_beside_others_moves_nothing_but_digits(tmp_path, tiny_model, kind):
    adapter = AdapterSpec(kind=kind, rank=4, dropout=0.1)
    spec = make_spec(adapter=adapter, shares=(2.0, 1.0), learning_rate=2e-3, max_steps=6)
    alike = Run(tmp_path / "alike", tiny_model, spec, 2)
    alike.train_to_end()
    expected = alike.steps()
    for old_card in (0, 1):
        run = Run(tmp_path / f"unlike-{old_card}", tiny_model, spec, 2)
        train_unlike(run, {old_card})
        for step, line in expected.items():
            for rank in (0, 1):
                found = run.steps(rank)[step]
                assert found["loss"] == pytest.approx(line["loss"], abs=0.005)
                assert found["gradient_norm"] == pytest.approx(line["gradient_norm"], rel=0.02)


def test_a_run_that_goes_on_in_fp16_begins_to_scale(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec())
    run.train_to_end()
    expected = run.steps()
    shutil.rmtree(run.checkpoint(4))
    train_unlike(run, {0}, resume_step=2)
    state = json.loads((run.checkpoint(4) / "state.json").read_text())
    assert state["loss_scale"] == {"factor": 65536.0, "good_steps": 2, "num_skipped": 0}
    for step, line in run.steps().items():
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=0.005)
