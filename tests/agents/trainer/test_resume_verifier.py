"""A resume is held against what was logged: kept promises are certified, broken ones are told."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agents.contract.run import LoggedStep, RankPlacement, Replay
from agents.contract.spec import CheckpointSpec
from agents.contract.wire import to_wire
from agents.node.files import describe_file
from agents.node.manifest import read_manifest, write_manifest
from agents.trainer.resume_verifier import ResumeVerifier, choose_promise
from tests.agents.trainer.ranks import Run, make_spec

NUM_STEPS = 12
START = 4


def make_replay(run: Run, attempt: int = 1) -> Replay:
    """Return what the attempt logged after `START`."""
    saved = [line["step"] for line in run.journal(0, attempt) if line["kind"] == "checkpoint"]
    return Replay(
        steps=tuple(
            LoggedStep(
                step=step,
                loss_hex=line["loss_hex"],
                samples=line["samples"],
                shares=tuple(line["shares"]),
                saved=step in saved,
            )
            for step, line in run.steps(0, attempt).items()
            if step > START
        ),
        devices=(("here", "cpu"),) * 2,
    )


def resume(run: Run, replay: Replay, num_ranks: int = 2) -> list[dict[str, Any]]:
    """Go on from `START` and return the certificate of each rank."""
    for step in range(START + 1, NUM_STEPS + 1):
        shutil.rmtree(run.checkpoint(step), ignore_errors=True)
    run.num_ranks = num_ranks
    run.train_to_end(resume_step=START, replay=replay)
    return [
        line
        for rank in range(num_ranks)
        for line in run.journal(rank)
        if line["kind"] == "certificate"
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model) -> Run:
    spec = make_spec(
        precision="fp32",
        max_steps=NUM_STEPS,
        rebalance=True,
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=START, keep=9),
    )
    run = Run(tmp_path_factory.mktemp("trained") / "run", tiny_model, spec, 2)
    run.train_to_end()
    return run


@pytest.fixture
def run(trained, tmp_path) -> Run:
    """A copy of the trained run, to be resumed."""
    shutil.copytree(trained.home, tmp_path / "run")
    copy = Run(tmp_path / "run", trained.model, trained.spec, 2)
    copy.attempt = 1
    return copy


def test_the_same_ranks_are_certified_to_the_bit(run):
    replay = make_replay(run)
    found = resume(run, replay)
    assert len(found) == 2
    for line in found:
        assert (line["promise"], line["kept"], line["equal_to_the_bit"]) == ("A", True, True)
        assert (line["first_step"], line["last_step"], line["steps"]) == (5, 12, 8)
        assert (line["largest_difference"], line["other_samples"]) == (0.0, 0)
    logged = {one.step: list(one.shares) for one in replay.steps}
    assert {step: line["shares"] for step, line in run.steps().items()} == logged


def test_more_ranks_are_certified_at_rounding_level(run):
    (line, *others) = resume(run, make_replay(run), num_ranks=3)
    assert len(others) == 2
    assert (line["promise"], line["kept"], line["other_samples"]) == ("B", True, 0)
    print(f"\n2 to 3 ranks, {line['steps']} steps in fp32: {line['largest_difference']:.1e}")
    assert line["largest_difference"] < 1e-5


def test_another_state_is_told_though_its_hashes_are_right(run):
    folder = run.checkpoint(START)
    path = folder / "optimizer.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.numel() > 1)
    tensors[name] = torch.zeros_like(tensors[name])  # an optimizer that was silently begun anew
    save_file(tensors, path, metadata={"format": "pt"})
    manifest = read_manifest(folder)
    entry = to_wire(describe_file(folder, path))
    manifest["files"] = [f if f["path"] != entry["path"] else entry for f in manifest["files"]]
    write_manifest(folder, manifest)
    line = resume(run, make_replay(run))[0]
    assert (line["promise"], line["kept"], line["equal_to_the_bit"]) == ("A", False, False)
    assert line["largest_difference"] > 1e-6
    assert line["other_samples"] == 0


class Told:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, kind: str, **fields: Any) -> None:
        assert kind == "certificate"
        self.lines.append(fields)


def logged(step: int, loss: float) -> LoggedStep:
    return LoggedStep(step=step, loss_hex=loss.hex(), samples=f"rows {step}", shares=(1.0,))


def compare(promise: Any, steps: list[tuple[int, float, str]], ends: bool = False) -> list[dict]:
    told: Any = Told()
    replay = Replay(steps=(logged(5, 2.0), logged(6, 1.5)), devices=())
    certifier = ResumeVerifier(replay, promise, torch.float32, told)
    for step, loss, samples in steps:
        certifier.compare(step, loss, samples, ends=ends)
    return told.lines


def test_other_samples_break_either_promise():
    for promise in ("A", "B"):
        (line,) = compare(promise, [(5, 2.0, "rows 5"), (6, 1.5, "rows 7"), (7, 1.0, "rows 7")])
        assert (line["other_samples"], line["equal_to_the_bit"], line["kept"]) == (1, True, False)


def test_the_last_bit_breaks_promise_a_only():
    steps = [(5, 2.0, "rows 5"), (6, 1.5 + 2**-50, "rows 6")]
    assert compare("A", steps)[0]["kept"] is False
    assert compare("B", steps)[0]["kept"] is True
    assert compare("B", [steps[0], (6, 1.501, "rows 6")])[0]["kept"] is False


def test_a_run_that_ends_early_certifies_what_it_did():
    assert compare("A", [(5, 2.0, "rows 5")]) == []
    (line,) = compare("A", [(5, 2.0, "rows 5")], ends=True)
    assert (line["steps"], line["kept"]) == (1, True)


def test_the_promise_follows_devices_and_versions():
    ranks = [RankPlacement(rank=0, local_rank=0, node="a", device="cuda:0", device_id="GPU-1")]
    same = (("a", "GPU-1"),)
    replay = Replay(steps=(), devices=same)
    assert choose_promise(replay, ranks, same, same_versions=True) == "A"
    assert choose_promise(replay, ranks, same, same_versions=False) == "B"
    assert choose_promise(replay, ranks, same, same_versions=True, at_loss=True) == "B"
    assert choose_promise(replay, ranks, same, same_versions=True, same_layers=False) == "B"
    assert choose_promise(replay, ranks, (("b", "GPU-1"),), same_versions=True) == "B"
    other = Replay(steps=(), devices=())
    assert choose_promise(other, ranks, same, same_versions=True) == "B"
