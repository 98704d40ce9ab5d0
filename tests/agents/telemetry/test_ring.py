"""Ten minutes of samples survive readers, writers, restarts and a full disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agents.contract.node import GpuSample, Sample
from agents.telemetry.ring import NUM_SLOTS, RingReader, RingWriter
from tests.agents.small_disk import fill, small_disk
from tests.draws import seed

GPU = GpuSample(uuid="GPU-" + "0" * 36, index=0, name="NVIDIA GeForce RTX 4070 Laptop GPU")


def write(writer: RingWriter, count: int) -> None:
    for _ in range(count):
        seq = writer.next_seq
        writer.append(Sample(time_s=1000.0 + seq, seq=seq, load=seq / 7, gpus=(GPU,)))


def test_samples_come_back_in_order(tmp_path: Path) -> None:
    write(RingWriter(tmp_path / "ring", 1), 5)
    samples = list(RingReader(tmp_path / "ring").read_since(1002.0))
    assert RingReader(tmp_path / "ring").read_newest_seq() == 5
    assert [sample["seq"] for sample in samples] == [3, 4, 5]
    assert samples[0]["load"] == 3 / 7
    assert samples[0]["gpus"][0]["name"] == GPU.name


def test_only_the_last_ten_minutes_stay(tmp_path: Path) -> None:
    write(RingWriter(tmp_path / "ring", 1), NUM_SLOTS + 50)
    seqs = [sample["seq"] for sample in RingReader(tmp_path / "ring").read_since(0.0)]
    assert seqs == list(range(51, NUM_SLOTS + 51))


def test_writer_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    write(RingWriter(tmp_path / "ring", 1), 3)
    write(RingWriter(tmp_path / "ring", 1), 2)
    assert [s["seq"] for s in RingReader(tmp_path / "ring").read_since(0.0)] == [1, 2, 3, 4, 5]


def test_another_number_of_gpus_begins_a_new_ring_with_rising_numbers(tmp_path: Path) -> None:
    write(RingWriter(tmp_path / "ring", 1), 3)
    write(RingWriter(tmp_path / "ring", 2), 2)
    assert [s["seq"] for s in RingReader(tmp_path / "ring").read_since(0.0)] == [4, 5]


def test_no_ring_yet(tmp_path: Path) -> None:
    reader = RingReader(tmp_path / "ring")
    assert reader.read_newest_seq() == 0
    assert reader.read(1) is None
    assert list(reader.read_since(0.0)) == []


def test_damage_costs_samples_and_never_more(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    write(RingWriter(path, 1), 40)
    whole = path.read_bytes()
    generator = random.Random(seed(5))
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(20):
            data[generator.randrange(50 * 2048)] = generator.randrange(256)
        path.write_bytes(bytes(data[: generator.choice([len(data), len(data) // 100])]))
        reader = RingReader(path)
        for sample in reader.read_since(0.0):
            assert sample["load"] == sample["seq"] / 7
        reader.close()
    write(RingWriter(path, 1), 1)
    assert RingReader(path).read_newest_seq() >= 1


def test_full_disk_does_not_silence_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 4 << 20) as disk:
        writer = RingWriter(disk / "ring", 1)
        fill(disk)
        write(writer, NUM_SLOTS + 3)
        assert RingReader(disk / "ring").read_newest_seq() == NUM_SLOTS + 3


@pytest.mark.parametrize("num_gpus", [0, 1, 8])
def test_busiest_sample_fits(tmp_path: Path, num_gpus: int) -> None:
    card = GpuSample(
        uuid="GPU-" + "0" * 36,
        index=7,
        name="NVIDIA RTX 6000 Ada Generation Workstation Edition",
        memory_used_bytes=1 << 40,
        memory_total_bytes=1 << 40,
        utilisation=1 / 3,
        temperature_celsius=200 / 3,
        power_w=1000 / 3,
        power_limit_w=1000 / 3,
        clock_mhz=10000 / 3,
        fan=1 / 3,
        throttle=("power limit", "hardware slowdown", "too hot", "too hot (hardware)"),
        process_ids=tuple(range(4_000_000, 4_000_010)),
    )
    numbers = {
        name: 1e15 / 3 for name in Sample.__dataclass_fields__ if name not in ("seq", "gpus")
    }
    writer = RingWriter(tmp_path / "ring", num_gpus)
    writer.append(Sample(**{**numbers, "seq": 1, "gpus": (card,) * num_gpus}))
    reader = RingReader(tmp_path / "ring")
    assert reader.read_newest_seq() == 1
    assert reader.read(1) is not None
