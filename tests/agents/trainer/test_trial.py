"""The trial of an environment: one real tiny step, and devices that cannot train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agents.contract.environments import DeviceTrial, EnvironmentTrial, TrialJob
from agents.contract.wire import from_wire, to_wire
from agents.trainer import trial

CPU = DeviceTrial(device="cpu", name="CPU")


def test_each_device_takes_a_step_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = DeviceTrial(device="cuda:1", name="RTX", problem="not tried: run r-1 uses it")
    none = DeviceTrial(device="cuda:99", name="RTX")
    job, report = tmp_path / "job.json", tmp_path / "report.json"
    job.write_text(json.dumps(to_wire(TrialJob(devices=(CPU, busy, none)))))
    assert trial.main([str(job), str(report)]) == 0
    found = from_wire(EnvironmentTrial, json.loads(report.read_text()))
    assert found.torch == torch.__version__
    done, left, failed = found.devices
    assert done.seconds is not None
    assert not done.is_failed
    assert left == busy
    assert failed.is_failed
    assert failed.problem
    assert "one training step in" in capsys.readouterr().out


def test_the_step_changes_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft
    import transformers

    model = trial.make_model(transformers, peft)
    # Its A is random and its B is zero: the first step moves B.
    before = [weight.detach().clone() for name, weight in model.named_parameters() if "_B" in name]
    assert not trial.try_device(model, CPU).is_failed
    after = [weight for name, weight in model.named_parameters() if "_B" in name]
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    monkeypatch.setattr(trial.math, "isfinite", lambda value: False)
    assert trial.try_device(model, CPU).problem.startswith("the loss is ")


def test_a_library_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(job: TrialJob) -> EnvironmentTrial:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(trial, "run_trial", fail)
    job = tmp_path / "job.json"
    job.write_text(json.dumps(to_wire(TrialJob(devices=(CPU,)))))
    assert trial.main([str(job), str(tmp_path / "report.json")]) == 1
    assert "libcudart.so.13" in json.loads(capsys.readouterr().out)["message"]
