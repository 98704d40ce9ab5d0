"""What a phase takes is seen even where it is over when the phase ends."""

from __future__ import annotations

import subprocess
import sys
import time

from agents.quantizers.job.meter import Meter, read_start_s, weigh_folder

MIB = 1 << 20
TAKE = "import time; block = bytearray(64 << 20); block[::4096] = bytes(1 << 14); time.sleep(0.6)"


def test_each_phase_has_its_own_peaks(tmp_path):
    meter = Meter(tmp_path / "made", "memory")
    block = bytearray(64 * MIB)
    block[::4096] = b"1" * len(block[::4096])
    meter.look()
    time.sleep(0.3)
    del block
    meter.begin("disk")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "gone").write_bytes(b"1" * MIB)
    time.sleep(0.8)
    (tmp_path / "made" / "gone").unlink()
    memory, disk = meter.end()
    assert (memory.name, disk.name) == ("memory", "disk")
    assert memory.seconds >= 0.3
    assert memory.ram_bytes - disk.ram_bytes > 32 * MIB
    assert (memory.disk_bytes, disk.disk_bytes >= MIB) == (0, True)
    assert memory.vram_bytes is None
    assert weigh_folder(tmp_path / "made") == 0


def test_what_is_there_for_a_blink_is_seen_by_who_looks(tmp_path):
    meter = Meter(tmp_path, "blink")
    (tmp_path / "gone").write_bytes(b"1" * MIB)
    meter.look()
    (tmp_path / "gone").unlink()
    (phase,) = meter.end()
    assert phase.disk_bytes >= MIB


def test_memory_of_processes_that_were_started_counts(tmp_path):
    meter = Meter(tmp_path, "alone")
    time.sleep(0.25)
    meter.begin("with a child")
    subprocess.run([sys.executable, "-c", TAKE], check=True)
    alone, both = meter.end()
    assert both.ram_bytes - alone.ram_bytes > 48 * MIB


def test_the_first_phase_begins_with_the_process(tmp_path):
    began_s = read_start_s()
    said = subprocess.run(
        [sys.executable, "-c", "import time; from agents.quantizers.job.meter import read_start_s; "
         "print(read_start_s(), time.monotonic())"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    start_s, now_s = map(float, said.split())
    assert began_s < start_s < now_s < start_s + 60
    (phase,) = Meter(tmp_path, "texts", time.monotonic() - 5).end()
    assert 5 <= phase.seconds < 10
