"""GPUs as NVML tells of them, with a fake NVML."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from agents.contract.node import MigGpu
from agents.telemetry.gpu import GpuReader, find_undriven_card
from tests.fakes.nvml import FakeCard, FakeNvml

SENSORS = {
    "memory_used_bytes": "nvmlDeviceGetMemoryInfo",
    "utilisation": "nvmlDeviceGetUtilizationRates",
    "temperature_celsius": "nvmlDeviceGetTemperature",
    "power_w": "nvmlDeviceGetPowerUsage",
    "power_limit_w": "nvmlDeviceGetEnforcedPowerLimit",
    "clock_mhz": "nvmlDeviceGetClockInfo",
    "fan": "nvmlDeviceGetFanSpeed",
    "throttle": "nvmlDeviceGetCurrentClocksEventReasons",
    "process_ids": "nvmlDeviceGetComputeRunningProcesses",
}


def test_facts() -> None:
    (facts,) = GpuReader(FakeNvml(FakeCard())).read_facts()
    assert dataclasses.asdict(facts) == {
        "uuid": "GPU-0000",
        "index": 0,
        "name": "NVIDIA GeForce RTX 4070",
        "memory_bytes": 12 << 30,
        "memory_reserved_bytes": None,
        "driver": "580.65.06",
        "cuda": "13.0",
        "capability": "8.9",
        "power_limit_w": 200.0,
        "slowdown_celsius": None,
    }


def test_what_the_driver_keeps_is_no_memory_that_programs_use() -> None:
    card = FakeCard(reserved_bytes=645 << 20)
    card.values["nvmlDeviceGetMemoryInfo"].used = 645 << 20  # an empty card
    reader = GpuReader(FakeNvml(card))
    assert reader.read_facts()[0].memory_reserved_bytes == 645 << 20
    assert reader.sample()[0].memory_used_bytes == 0


def test_programs_whose_memory_the_driver_does_not_tell() -> None:
    card = FakeCard()
    processes = card.values["nvmlDeviceGetComputeRunningProcesses"]
    assert GpuReader(FakeNvml(card)).sample()[0].memory_computing_bytes == (2 << 30) + (512 << 20)
    processes[1].usedGpuMemory = None  # as under WSL
    assert GpuReader(FakeNvml(card)).sample()[0].memory_computing_bytes is None


def test_sample() -> None:
    nvml = FakeNvml(FakeCard(throttle=0x4 | 0x1 | 0x20))
    reader = GpuReader(nvml)
    reader.sample()
    (sample,) = reader.sample()
    assert nvml.num_inits == 1
    assert sample.memory_used_bytes == 3 << 30
    assert sample.memory_total_bytes == 12 << 30
    assert sample.utilisation == 0.87
    assert sample.temperature_celsius == 66.0
    assert sample.power_w == 181.5
    assert sample.clock_mhz == 2475.0
    assert sample.fan == 0.45
    assert sample.throttle == ("power limit", "too hot")
    assert sample.process_ids == (41, 7)


@pytest.mark.parametrize(("field", "function"), SENSORS.items())
def test_sensor_that_a_card_lacks_is_none_and_the_others_stay(field: str, function: str) -> None:
    whole = dataclasses.asdict(GpuReader(FakeNvml(FakeCard())).sample()[0])
    lacking = FakeCard(missing=frozenset({function}))
    sample = dataclasses.asdict(GpuReader(FakeNvml(lacking)).sample()[0])
    assert sample[field] is None
    gone = {name for name in whole if sample[name] is None}
    assert gone <= {field, "memory_total_bytes", "memory_computing_bytes"}


def test_idle_card_is_not_throttled() -> None:
    assert GpuReader(FakeNvml(FakeCard(throttle=0x1))).sample()[0].throttle == ()


def test_lost_card_stays_listed_and_knows_nothing() -> None:
    first, second = FakeCard(uuid="GPU-a"), FakeCard(uuid="GPU-b")
    reader = GpuReader(FakeNvml(first, second))
    first.lost = True
    lost, well = reader.sample()
    assert (lost.uuid, lost.index) == ("GPU-a", 0)
    values = dataclasses.asdict(lost)
    assert {name for name, value in values.items() if value is not None} == {
        "uuid",
        "index",
        "name",
    }
    assert well.utilisation == 0.87


def test_card_lost_before_the_start_is_a_problem_and_hides_no_other() -> None:
    reader = GpuReader(FakeNvml(FakeCard(lost=True), FakeCard(uuid="GPU-b")))
    assert [card.uuid for card in reader.sample()] == ["GPU-b"]
    assert reader.problem is not None
    assert reader.problem.startswith("GPU 0 does not answer: a GPU fell off the bus")


def test_no_driver_is_no_gpus_and_no_problem() -> None:
    assert GpuReader(None).sample() == ()
    reader = GpuReader(FakeNvml(init_error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert (reader.sample(), reader.read_facts(), reader.problem) == ((), (), None)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "the old one still runs; restart that PC"),
        (FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED, "installed but not loaded"),
        (FakeNvml.NVML_ERROR_NO_PERMISSION, "check the rights of /dev/nvidia*"),
        (999, "the NVIDIA driver does not answer (NVML error 999)"),
    ],
)
def test_broken_driver_is_a_problem_in_words(code: int, text: str) -> None:
    reader = GpuReader(FakeNvml(init_error=code), has_driver=True)
    assert reader.sample() == ()
    assert reader.problem is not None
    assert text in reader.problem


@pytest.mark.parametrize(
    ("vendor", "kind", "found"),
    [("0x10de", "0x030000", True), ("0x10de", "0x040300", False), ("0x8086", "0x030000", False)],
)
def test_card_without_a_driver_is_told(tmp_path: Path, vendor: str, kind: str, found: bool) -> None:
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    assert bool(find_undriven_card(tmp_path)) is found
    assert find_undriven_card(tmp_path / "none") is None


A100 = "NVIDIA A100-SXM4-40GB"


def test_gpu_in_mig_mode_is_named_with_its_slices_and_hides_no_other() -> None:
    slices = (f"{A100} MIG 1g.5gb", None, f"{A100} MIG 3g.20gb", None)
    divided, whole = FakeCard(name=A100, slices=slices), FakeCard(uuid="GPU-b")
    reader = GpuReader(FakeNvml(divided, whole))
    assert [(card.uuid, card.index) for card in reader.read_facts()] == [("GPU-b", 1)]
    assert [card.uuid for card in reader.sample()] == ["GPU-b"]
    assert reader.problem is None
    names = tuple(name for name in slices if name)
    assert reader.mig == [MigGpu(index=0, name=A100, slices=names)]


def test_gpu_in_mig_mode_without_slices_is_named() -> None:
    reader = GpuReader(FakeNvml(FakeCard(name=A100, slices=(None,) * 7)))
    assert (reader.read_facts(), reader.mig) == ((), [MigGpu(index=0, name=A100)])


def test_mode_after_the_next_reset_and_cards_without_modes_change_nothing() -> None:
    old = FakeCard(uuid="GPU-b")
    old.values["nvmlDeviceGetCudaComputeCapability"] = (7, 5)
    reader = GpuReader(FakeNvml(FakeCard(), old))
    assert len(reader.read_facts()) == 2
    assert reader.mig == []
