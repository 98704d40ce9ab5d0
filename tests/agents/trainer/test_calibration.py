"""The measurement of a device, here of the CPU; `gpu` marks the one of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agents.contract.node import Calibration
from agents.contract.requests.jobs import CalibrationJob
from agents.contract.spec import DataSpec, RunSpec
from agents.contract.wire import from_wire, to_wire
from agents.trainer import calibration
from agents.trainer.calibration import calibrate, main
from agents.trainer.rank.device import choose_dtype
from app.planning.hardware.cluster import PlannedGpu
from app.planning.hardware.measurement_limits import find_fault
from app.planning.memory.gpu import choose_dtype as plan_dtype


def run_job(folder: Path, device: str, seconds: float) -> int:
    job = CalibrationJob(python="", device=device, device_id=device, seconds=seconds)
    (folder / "job.json").write_text(json.dumps(to_wire(job)))
    return main([str(folder / "job.json"), str(folder / "report.json")])


def test_cpu_is_measured_and_the_report_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_job(tmp_path, "cpu", 0.4) == 0
    found = from_wire(Calibration, json.loads((tmp_path / "report.json").read_bytes()))
    assert found.matrix_flops_per_s is not None
    assert found.matrix_flops_per_s > 1e8
    assert found.memory_bytes_per_s is not None
    assert found.memory_bytes_per_s > 1e7
    assert (found.to_host_bytes_per_s, found.unpack_values_per_s) == (None, None)
    assert found.precision == "float32"
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["kind"] for line in said} == {"progress"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_job(tmp_path, "cuda:3", 0.1) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["kind"] == "failed"
    assert "does not see cuda:3 (it sees 0 GPUs)" in last["message"]


@pytest.mark.gpu
def test_gpu_is_measured_in_all_parts() -> None:
    job = CalibrationJob(python="", device="cuda:0", device_id="x", seconds=4.0)
    found = calibrate(job, lambda text: None)
    assert found.card == torch.cuda.get_device_name(0)
    assert found.matrix_flops_per_s is not None
    assert found.matrix_flops_per_s > 1e12
    assert found.memory_bytes_per_s is not None
    assert found.memory_bytes_per_s > 1e11
    assert found.to_host_bytes_per_s is not None
    assert found.from_host_bytes_per_s is not None
    assert found.unpack_values_per_s is not None
    assert found.unpack_values_per_s > 1e10


def test_a_measurement_on_a_busy_pc_knows_what_others_used(tmp_path: Path) -> None:
    count = len(os.sched_getaffinity(0))
    code = "while True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2 * count)]
    try:
        time.sleep(0.3)
        assert run_job(tmp_path, "cpu", 1.5) == 0
    finally:
        for process in busy:
            process.kill()
            process.wait()
    found = from_wire(Calibration, json.loads((tmp_path / "report.json").read_bytes()))
    assert found.other_load is not None
    assert found.other_load > 0.15
    assert found.spread is not None


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ((6, 1), torch.float16), ((7, 0), torch.float16), ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16), ((8, 9), torch.bfloat16), ((12, 0), torch.bfloat16),
    ],
)  # fmt: skip
def test_card_is_measured_in_the_type_of_training(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # Emulation counts as support.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    made: list[torch.dtype] = []
    monkeypatch.setattr(calibration, "repeat_work", lambda *_: [1.0])

    def make(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        made.append(dtype)
        return torch.zeros(1, 1, dtype=dtype)

    for name in ("randn", "empty"):
        monkeypatch.setattr(torch, name, make)
    calibration.measure_matrix(gpu, 0.1)
    assert made == [dtype] * 3
    assert choose_dtype("auto", gpu) == dtype
    spec = RunSpec(model="m", data=DataSpec(train="d"))
    memory = PlannedGpu(name="x", memory_bytes=8 << 30, capability=capability).memory
    assert memory is not None
    assert plan_dtype(spec, memory) == {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def test_measurement_of_an_emulated_type_is_not_used() -> None:
    old = Calibration(card="NVIDIA GeForce RTX 2080 Ti", matrix_flops_per_s=4e13)
    assert "only emulates" in find_fault(old, capability=(7, 5))
    assert find_fault(replace(old, precision="float16"), capability=(7, 5)) == ""
    assert find_fault(old, capability=(8, 6)) == ""
    assert find_fault(old) == ""
