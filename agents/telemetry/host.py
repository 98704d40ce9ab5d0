"""Read the PC's own sensors from /proc and /sys; a missing sensor is None.

Parsers take text and return numbers, so that tests can use texts from real machines. `Host` reads
the files and converts counters to rates with the monotonic clock.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from agents.limits import Memory, read_memory

SECTOR_BYTES = 512
"""Unit of /proc/diskstats, in bytes, regardless of the disk's own sector size."""
# Virtual and stacked devices would count the bytes of real disks again; fd and sr are no disks.
NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
# In order of preference: sensors of the CPU's package, then those of the board.
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
CPU_LABELS = ("package id 0", "tdie", "tctl")
CPU_ZONES = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal")


def parse_cpu_times(text: str) -> tuple[int, int] | None:
    """Return (busy, total) clock ticks of all cores since boot, from /proc/stat."""
    fields = text.partition("\n")[0].split()
    if len(fields) < 5 or fields[0] != "cpu":
        return None
    ticks = [int(value) for value in fields[1:9]]  # user time includes guest time already
    # Waiting for a disk (iowait) is idle time, too.
    idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
    return sum(ticks) - idle, sum(ticks)


def parse_disks(text: str, disks: frozenset[str]) -> tuple[int, int]:
    """Return bytes (read, written) since boot over the named disks, from /proc/diskstats."""
    read = written = 0
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 10 and fields[2] in disks:
            read += int(fields[5]) * SECTOR_BYTES
            written += int(fields[9]) * SECTOR_BYTES
    return read, written


def parse_network(text: str, devices: frozenset[str]) -> tuple[int, int]:
    """Return bytes (in, out) since boot over the named devices, from /proc/net/dev."""
    into = out = 0
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name.strip() in devices and len(fields) >= 9:
            into += int(fields[0])
            out += int(fields[8])
    return into, out


def parse_load(text: str) -> float | None:
    """Return the load over the last minute, from /proc/loadavg."""
    fields = text.split()
    return float(fields[0]) if fields else None


@dataclass(frozen=True)
class HostSample:
    cpu_utilisation: float | None = None
    cpu_temperature_celsius: float | None = None
    cpu_power_w: float | None = None
    memory: Memory | None = None
    """Memory that programs of this login may use."""
    disk: tuple[int, int] | None = None
    """Bytes used and total bytes."""
    disk_rates: tuple[float, float] | None = None
    """Bytes per second read and written."""
    network_rates: tuple[float, float] | None = None
    """Bytes per second in and out."""
    load: float | None = None


class Rate:
    """Converter of rising counters to rates; None at first and after a counter decreased."""

    def __init__(self) -> None:
        self._last: tuple[float, tuple[int, ...]] | None = None

    def advance(self, now_s: float, counters: tuple[int, ...]) -> tuple[float, ...] | None:
        last, self._last = self._last, (now_s, counters)
        if last is None or now_s <= last[0]:
            return None
        rises = [new - old for new, old in zip(counters, last[1], strict=True)]
        # A counter decreases when it wraps or its device is replaced.
        return None if min(rises) < 0 else tuple(rise / (now_s - last[0]) for rise in rises)


class Host:
    """The PC's sensors; tests set `root` as the parent of /proc and /sys."""

    def __init__(self, disk_path: Path, root: str = "") -> None:
        self._disk_path = disk_path
        self._root = root
        self._disks = frozenset(
            name for name in self._list("/sys/block") if not name.startswith(NOT_DISKS)
        )
        self._temperature_file = self._find_temperature()
        self._energy_files = self._find_energy()
        self._cpu, self._disk, self._network, self._energy = Rate(), Rate(), Rate(), Rate()

    def sample(self) -> HostSample:
        """Read all sensors once; rates are averages since the last call."""
        now_s = time.monotonic()
        return HostSample(
            cpu_utilisation=self._read_cpu(now_s),
            cpu_temperature_celsius=self._read_temperature(),
            cpu_power_w=self._read_power(now_s),
            memory=read_memory(self._root),
            disk=read_disk(self._disk_path),
            disk_rates=self._read_disk_rates(now_s),
            network_rates=self._read_network_rates(now_s),
            load=parse_load(self._read("/proc/loadavg")),
        )

    def _read(self, path: str) -> str:
        try:
            with open(self._root + path, "rb") as file:
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root + path))
        except OSError:
            return []

    def _read_cpu(self, now_s: float) -> float | None:
        times = parse_cpu_times(self._read("/proc/stat"))
        rates = self._cpu.advance(now_s, times) if times else None
        # Both rates are in ticks per second, so the unit cancels out.
        return min(1.0, rates[0] / rates[1]) if rates and rates[1] > 0 else None

    def _read_temperature(self) -> float | None:
        value = self._read(self._temperature_file) if self._temperature_file else ""
        try:
            celsius = int(value) / 1000
        except ValueError:
            return None
        return celsius if 0 < celsius < 150 else None  # broken sensors report absurd values

    def _find_temperature(self) -> str | None:
        """Return the file of the CPU's package temperature from the best sensor, or None."""
        found: list[tuple[int, int, str]] = []
        for folder in self._list("/sys/class/hwmon"):
            base = f"/sys/class/hwmon/{folder}"
            name = self._read(f"{base}/name").strip()
            if name not in CPU_SENSORS:
                continue
            for file in self._list(base):
                if file.startswith("temp") and file.endswith("_input"):
                    label = self._read(f"{base}/{file[: -len('input')]}label").strip().lower()
                    place = CPU_LABELS.index(label) if label in CPU_LABELS else len(CPU_LABELS)
                    found.append((CPU_SENSORS.index(name), place, f"{base}/{file}"))
        if found:
            return min(found)[2]
        for folder in self._list("/sys/class/thermal"):
            base = f"/sys/class/thermal/{folder}"
            if self._read(f"{base}/type").strip() in CPU_ZONES:
                return f"{base}/temp"
        return None

    def _find_energy(self) -> list[str]:
        """Return the readable energy counters of the CPU packages (often only root may read)."""
        base = "/sys/class/powercap"
        # A second colon marks a part of a package, whose energy the package includes.
        folders = [f for f in self._list(base) if f.startswith("intel-rapl:") and f.count(":") == 1]
        packages = [f for f in folders if self._read(f"{base}/{f}/name").startswith("package")]
        files = [f"{base}/{folder}/energy_uj" for folder in packages]
        return [file for file in files if self._read(file)]

    def _read_power(self, now_s: float) -> float | None:
        if not self._energy_files:
            return None
        try:
            energy_uj = tuple(int(self._read(file)) for file in self._energy_files)
        except ValueError:
            return None
        rates = self._energy.advance(now_s, energy_uj)
        # Microjoules per second.
        return sum(rates) / 1e6 if rates else None

    def _read_disk_rates(self, now_s: float) -> tuple[float, float] | None:
        if not self._disks:
            return None
        counters = parse_disks(self._read("/proc/diskstats"), self._disks)
        rates = self._disk.advance(now_s, counters)
        return (rates[0], rates[1]) if rates else None

    def _read_network_rates(self, now_s: float) -> tuple[float, float] | None:
        text = self._read("/proc/net/dev")
        devices = self._choose_devices(text)
        rates = self._network.advance(now_s, parse_network(text, devices)) if devices else None
        return (rates[0], rates[1]) if rates else None

    def _choose_devices(self, text: str) -> frozenset[str]:
        """Return the physical network devices; bridges and tunnels would count bytes twice."""
        names = {line.partition(":")[0].strip() for line in text.splitlines()[2:]} - {"lo", ""}
        real = {n for n in names if os.path.exists(f"{self._root}/sys/class/net/{n}/device")}
        # Containers have only virtual devices.
        return frozenset(real or names)


def read_disk(path: Path) -> tuple[int, int] | None:
    """Return (used, total) bytes of the file system; space reserved for root counts as used."""
    try:
        state = os.statvfs(path)
    except OSError:
        return None
    total = state.f_blocks * state.f_frsize
    # f_bavail, not f_bfree: the agent does not run as root.
    return total - state.f_bavail * state.f_frsize, total
