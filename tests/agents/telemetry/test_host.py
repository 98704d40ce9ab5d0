"""The host's sensors, on texts from real machines and on a /proc and /sys of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.limits import parse_memory
from agents.telemetry.host import (
    Host,
    Rate,
    parse_cpu_times,
    parse_disks,
    parse_load,
    parse_network,
    read_disk,
)

STAT = """cpu  10132153 290696 3084719 46828483 16683 0 25195 175628 0 0
cpu0 1393280 32966 572056 13343292 6130 0 17875 0 23933 0
intr 114930548 113199788 3 0 5 263 0 4 [...]
"""
MEMINFO = """MemTotal:       32658004 kB
MemFree:          654756 kB
MemAvailable:   21532568 kB
Buffers:         1203096 kB
"""
OLD_MEMINFO = "MemTotal: 1000 kB\nMemFree: 400 kB\n"
DISKSTATS = """   7       0 loop0 57 0 2154 26 0 0 0 0 0 48 26 0 0 0 0
 259       0 nvme0n1 1145530 261498 80571570 424571 2104871 1466208 143263026 3264567 0 8 9 0 0 0 0
 259       1 nvme0n1p1 312 1006 16084 107 2 0 2 0 0 136 107 0 0 0 0
   8       0 sda 100 0 200 10 50 0 400 20 0 30 30
"""
NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: 9000 10 0 0 0 0 0 0 9000 10 0 0 0 0 0 0
enp3s0: 123456 100 0 0 0 0 0 0 654321 90 0 0 0 0 0 0
docker0:777 7 0 0 0 0 0 0 888 8 0 0 0 0 0 0
"""


def test_cpu_times() -> None:
    busy = 10132153 + 290696 + 3084719 + 25195 + 175628
    assert parse_cpu_times(STAT) == (busy, busy + 46828483 + 16683)
    assert parse_cpu_times("") is None
    assert parse_cpu_times("cpu0 1 2 3 4\n") is None


def test_memory() -> None:
    assert parse_memory(MEMINFO) == ((32658004 - 21532568) * 1024, 32658004 * 1024)
    assert parse_memory(OLD_MEMINFO) == (600 * 1024, 1000 * 1024)
    assert parse_memory("") is None


def test_disks_count_whole_disks_once() -> None:
    disks = frozenset({"nvme0n1", "sda"})
    assert parse_disks(DISKSTATS, disks) == ((80571570 + 200) * 512, (143263026 + 400) * 512)
    assert parse_disks("", disks) == (0, 0)


def test_network() -> None:
    assert parse_network(NET_DEV, frozenset({"enp3s0"})) == (123456, 654321)
    assert parse_network(NET_DEV, frozenset({"enp3s0", "docker0"})) == (124233, 655209)


def test_load() -> None:
    assert parse_load("0.52 0.58 0.59 1/981 12345\n") == 0.52
    assert parse_load("") is None


def test_rate() -> None:
    rate = Rate()
    assert rate.advance(10.0, (100, 200)) is None
    assert rate.advance(12.0, (300, 200)) == (100.0, 0.0)
    assert rate.advance(12.0, (400, 300)) is None  # no time has passed
    assert rate.advance(13.0, (10, 300)) is None  # a counter began anew
    assert rate.advance(14.0, (20, 301)) == (10.0, 1.0)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1 << 64)), max_size=10))
def test_rate_is_never_negative(readings: list[tuple[float, int]]) -> None:
    rate = Rate()
    for now_s, counter in readings:
        rates = rate.advance(now_s, (counter,))
        assert rates is None or rates[0] >= 0


class Machine:
    """A /proc and /sys in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def host(self) -> Host:
        return Host(self.root, str(self.root))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_machine_without_sensors_knows_nothing(machine: Machine) -> None:
    host = machine.host()
    for _ in range(2):
        sample = host.sample()
        assert sample.cpu_utilisation is None
        assert sample.cpu_temperature_celsius is None
        assert sample.cpu_power_w is None
        assert sample.memory is None
        assert sample.disk_rates is None
        assert sample.network_rates is None
        assert sample.load is None


def test_rates_come_with_the_second_sample(machine: Machine) -> None:
    machine.write("/proc/stat", "cpu 100 0 0 100 0 0 0 0\n")
    machine.write("/proc/diskstats", DISKSTATS)
    machine.write("/sys/block/sda/size", "1")
    machine.write("/proc/net/dev", NET_DEV)
    (machine.root / "sys/class/net/enp3s0/device").mkdir(parents=True)
    host = machine.host()
    assert host.sample().cpu_utilisation is None
    machine.write("/proc/stat", "cpu 175 0 0 125 0 0 0 0\n")
    machine.write("/proc/diskstats", DISKSTATS.replace("sda 100 0 200", "sda 100 0 300"))
    machine.write("/proc/net/dev", NET_DEV.replace("654321", "754321").replace("888", "9999"))
    sample = host.sample()
    assert sample.cpu_utilisation == pytest.approx(0.75)
    assert sample.disk_rates is not None
    assert sample.disk_rates[0] > 0
    assert sample.disk_rates[1] == 0
    assert sample.network_rates is not None
    assert sample.network_rates[0] == 0
    assert sample.network_rates[1] > 0


def test_package_temperature_is_preferred(machine: Machine) -> None:
    machine.write("/sys/class/hwmon/hwmon0/name", "nvme\n")
    machine.write("/sys/class/hwmon/hwmon0/temp1_input", "99000\n")
    machine.write("/sys/class/hwmon/hwmon1/name", "coretemp\n")
    machine.write("/sys/class/hwmon/hwmon1/temp2_input", "50000\n")
    machine.write("/sys/class/hwmon/hwmon1/temp2_label", "Core 0\n")
    machine.write("/sys/class/hwmon/hwmon1/temp10_input", "61000\n")
    machine.write("/sys/class/hwmon/hwmon1/temp10_label", "Package id 0\n")
    assert machine.host().sample().cpu_temperature_celsius == 61.0


def test_thermal_zone_serves_where_there_is_no_hwmon(machine: Machine) -> None:
    machine.write("/sys/class/thermal/thermal_zone0/type", "acpitz\n")
    machine.write("/sys/class/thermal/thermal_zone0/temp", "20000\n")
    machine.write("/sys/class/thermal/thermal_zone1/type", "x86_pkg_temp\n")
    machine.write("/sys/class/thermal/thermal_zone1/temp", "47000\n")
    assert machine.host().sample().cpu_temperature_celsius == 47.0


@pytest.mark.parametrize("text", ["", "N/A\n", "-274000\n", "0\n", "999999\n"])
def test_temperature_that_cannot_be_is_none(machine: Machine, text: str) -> None:
    machine.write("/sys/class/hwmon/hwmon0/name", "k10temp\n")
    machine.write("/sys/class/hwmon/hwmon0/temp1_input", text)
    assert machine.host().sample().cpu_temperature_celsius is None


def test_power_is_the_sum_of_the_packages(machine: Machine) -> None:
    base = "/sys/class/powercap/intel-rapl:"
    for number in (0, 1):
        machine.write(f"{base}{number}/name", f"package-{number}\n")
        machine.write(f"{base}{number}/energy_uj", "1000000\n")
    machine.write(f"{base}0:0/name", "core\n")
    machine.write(f"{base}0:0/energy_uj", "5\n")
    host = machine.host()
    assert host.sample().cpu_power_w is None
    for number in (0, 1):
        machine.write(f"{base}{number}/energy_uj", "2000000\n")
    power_w = host.sample().cpu_power_w
    assert power_w is not None
    assert power_w > 0
    machine.write(f"{base}1/energy_uj", "10\n")  # the counter began anew
    assert host.sample().cpu_power_w is None


def test_disk(tmp_path: Path) -> None:
    disk = read_disk(tmp_path)
    assert disk is not None
    assert 0 < disk[0] < disk[1]
    assert read_disk(tmp_path / "none") is None
