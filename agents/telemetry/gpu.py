"""Read NVIDIA GPUs through NVML (nvidia-ml-py, vendored into the archive).

A missing sensor is None. A PC without a driver has no GPUs and no problem; if a driver is installed
but does not answer, `problem` explains it. A card that is lost meanwhile stays in the list with
unknown values. A GPU in MIG mode is listed apart, since no rank trains on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.node import GpuFacts, GpuSample, MigGpu

TOO_HOT = ("too hot", "too hot (hardware)")
"""Throttle reasons caused by heat."""
THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "clock limited to another card's",
    0x20: TOO_HOT[0],
    0x40: TOO_HOT[1],
    0x80: "power brake",
    0x100: "display clock setting",
}
"""Bits of nvmlClocksEventReasons that throttle a busy card, without idle and user-set clocks."""
PROBLEMS = {
    # The kernel module stays loaded until a restart, while the library is replaced at once.
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the NVIDIA driver was updated and the old one still "
    "runs; restart that PC",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is installed but not loaded; restart that "
    "PC, and if that does not help install the driver again (secure boot may refuse it)",
    "NVML_ERROR_NO_PERMISSION": "this user may not use the NVIDIA driver; check the rights of "
    "/dev/nvidia*",
    "NVML_ERROR_GPU_IS_LOST": "a GPU fell off the bus; shut that PC down fully and start it again",
}
# nvmlTemperatureThresholds_t
_SLOWDOWN_THRESHOLD = 1
SIGNS_OF_A_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl")


@dataclass(frozen=True)
class _Card:
    handle: Any
    uuid: str
    index: int
    name: str


class GpuReader:
    """All GPUs of this PC; `nvml` is the module pynvml or a fake, or None without a driver."""

    def __init__(self, nvml: Any | None, has_driver: bool = False) -> None:
        self._nvml = nvml
        self.problem: str | None = None
        self.mig: list[MigGpu] = []
        """GPUs in MIG mode, which cannot train."""
        self._cards: list[_Card] = []
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
            self._cards = self._find_cards()
        except nvml.NVMLError as error:
            self.problem = self._explain(error, has_driver)

    def read_facts(self) -> tuple[GpuFacts, ...]:
        """Return the constant facts about each card."""
        return tuple(self._read_facts(card) for card in self._cards)

    def sample(self) -> tuple[GpuSample, ...]:
        """Read all cards once."""
        return tuple(self._sample(card) for card in self._cards)

    def sample_one(self, uuid: str) -> GpuSample | None:
        """Read one card; None if the UUID is unknown."""
        card = self._card(uuid)
        return self._sample(card) if card else None

    def read_least_power_w(self, uuid: str) -> float | None:
        """Return the lowest power limit of a card, in watts, or None if unknown."""
        card = self._card(uuid)
        name = "nvmlDeviceGetPowerManagementLimitConstraints"
        limits = self._read(name, card.handle) if card else None
        return limits[0] / 1000 if limits else None

    def set_power_limit(self, uuid: str, limit_w: float) -> bool:
        """Set the power limit of a card, in watts; return whether the driver accepted it.

        The driver requires root, and always refuses under WSL.
        """
        card, nvml = self._card(uuid), self._nvml
        if card is None or nvml is None:
            return False
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(card.handle, round(limit_w * 1000))
        except (nvml.NVMLError, AttributeError):
            return False
        return True

    def _card(self, uuid: str) -> _Card | None:
        return next((card for card in self._cards if card.uuid == uuid), None)

    def _find_cards(self) -> list[_Card]:
        cards = []
        for index in range(self._nvml.nvmlDeviceGetCount()):  # type: ignore[union-attr]
            try:
                card = self._open_card(index)
                if self._is_mig(card):
                    self.mig.append(self._describe_mig(card))
                else:
                    cards.append(card)
            except self._nvml.NVMLError as error:  # type: ignore[union-attr]
                # One broken card must not hide the others.
                self.problem = f"GPU {index} does not answer: {self._explain(error, True)}"
        return cards

    def _open_card(self, index: int) -> _Card:
        nvml = self._nvml
        assert nvml is not None
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        return _Card(handle, uuid, index, _text(nvml.nvmlDeviceGetName(handle)))

    def _is_mig(self, card: _Card) -> bool:
        # The current mode and the one after a reset; older cards have no such mode.
        modes = self._read("nvmlDeviceGetMigMode", card.handle)
        return bool(modes and modes[0])

    def _describe_mig(self, card: _Card) -> MigGpu:
        count = self._read("nvmlDeviceGetMaxMigDeviceCount", card.handle) or 0
        name = "nvmlDeviceGetMigDeviceHandleByIndex"
        # A place without a slice is an error.
        slices = [self._read(name, card.handle, place) for place in range(count)]
        names = [self._read("nvmlDeviceGetName", one) for one in slices if one is not None]
        return MigGpu(
            index=card.index,
            name=card.name,
            slices=tuple(_text(one) if one else "MIG" for one in names),
        )

    def _explain(self, error: Exception, has_driver: bool) -> str | None:
        """Return an explanation, or None if there is no driver or no card."""
        # pynvml's errors carry a number and a text, but PROBLEMS is keyed by name.
        code = getattr(error, "value", None)
        names = [n for n in dir(self._nvml) if n.startswith("NVML_ERROR_")]
        name = next((n for n in names if getattr(self._nvml, n) == code), str(error))
        if not has_driver and name in (
            "NVML_ERROR_LIBRARY_NOT_FOUND",
            "NVML_ERROR_DRIVER_NOT_LOADED",
        ):
            return None
        return PROBLEMS.get(name, f"the NVIDIA driver does not answer ({error})")

    def _read(self, function: str, *args: Any) -> Any | None:
        """Call NVML; return None if the card or the driver lacks that function."""
        nvml = self._nvml
        assert nvml is not None
        try:
            return getattr(nvml, function)(*args)
        except (nvml.NVMLError, AttributeError):
            return None

    def _read_facts(self, card: _Card) -> GpuFacts:
        handle = card.handle
        memory = self._read_memory(handle)
        version = self._read("nvmlSystemGetCudaDriverVersion_v2")
        capability = self._read("nvmlDeviceGetCudaComputeCapability", handle)
        driver = self._read("nvmlSystemGetDriverVersion")
        return GpuFacts(
            uuid=card.uuid,
            index=card.index,
            name=card.name,
            memory_bytes=memory.total if memory else None,
            memory_reserved_bytes=getattr(memory, "reserved", None),
            driver=_text(driver) if driver else None,
            # NVML encodes 12.4 as 12040.
            cuda=f"{version // 1000}.{version % 1000 // 10}" if version else None,
            capability=f"{capability[0]}.{capability[1]}" if capability else None,
            power_limit_w=_scale(self._read("nvmlDeviceGetEnforcedPowerLimit", handle), 1000),
            slowdown_celsius=_scale(
                self._read("nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN_THRESHOLD), 1
            ),
        )

    def _sample(self, card: _Card) -> GpuSample:
        nvml, handle = self._nvml, card.handle
        assert nvml is not None
        memory = self._read_memory(handle)
        processes = self._read("nvmlDeviceGetComputeRunningProcesses", handle)
        rates = self._read("nvmlDeviceGetUtilizationRates", handle)
        return GpuSample(
            uuid=card.uuid,
            index=card.index,
            name=card.name,
            memory_used_bytes=memory.used if memory else None,
            memory_total_bytes=memory.total if memory else None,
            utilisation=rates.gpu / 100 if rates else None,
            # 0 is NVML_TEMPERATURE_GPU.
            temperature_celsius=_scale(self._read("nvmlDeviceGetTemperature", handle, 0), 1),
            # Milliwatts, like the limits.
            power_w=_scale(self._read("nvmlDeviceGetPowerUsage", handle), 1000),
            power_limit_w=_scale(self._read("nvmlDeviceGetEnforcedPowerLimit", handle), 1000),
            # 1 is NVML_CLOCK_SM.
            clock_mhz=_scale(self._read("nvmlDeviceGetClockInfo", handle, 1), 1),
            fan=_scale(self._read("nvmlDeviceGetFanSpeed", handle), 100),
            throttle=self._read_throttle(handle),
            process_ids=None if processes is None else tuple(p.pid for p in processes),
            memory_computing_bytes=_sum_memory(processes),
        )

    def _read_memory(self, handle: Any) -> Any | None:
        """Return total, used and, from newer drivers, reserved memory, in bytes."""
        # The first version of NVML's structure counts memory reserved by the driver as used, which
        # is hundreds of megabytes on an empty card.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        found = None
        if version is not None:
            found = self._read("nvmlDeviceGetMemoryInfo", handle, version)
        return found or self._read("nvmlDeviceGetMemoryInfo", handle)

    def _read_throttle(self, handle: Any) -> tuple[str, ...] | None:
        bits = self._read("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # the name before driver 535
            bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if bits is None:
            return None
        return tuple(text for bit, text in THROTTLE_REASONS.items() if bits & bit)


def open_gpus(load_nvml: Callable[[], Any]) -> GpuReader:
    """Return this PC's GPUs; `load_nvml` imports pynvml and is called only with a driver."""
    has_driver = any(os.path.exists(path) for path in SIGNS_OF_A_DRIVER) or _is_wsl_with_gpu()
    if not _has_library() and not has_driver:
        # Without a library or a driver, loading NVML could only fail.
        reader = GpuReader(None)
        reader.problem = find_undriven_card(Path("/sys/bus/pci/devices"))
        return reader
    return GpuReader(load_nvml(), has_driver)


def find_undriven_card(devices: Path) -> str | None:
    """Return an explanation if an NVIDIA card is plugged in but no driver is installed."""
    with contextlib.suppress(OSError):
        for device in sorted(devices.iterdir()):
            vendor = (device / "vendor").read_text().strip()
            # 0x10de: NVIDIA; class 0x03: a display controller, unlike the card's audio function.
            if vendor == "0x10de" and (device / "class").read_text().startswith("0x03"):
                return (
                    "an NVIDIA card is plugged in, but its driver is not installed; on Ubuntu: "
                    "sudo ubuntu-drivers install, then restart"
                )
    return None


def _has_library() -> bool:
    """Load NVIDIA's library; return False without one."""
    # pynvml searches by name only. On WSL, the library may be outside the search path; once it is
    # loaded here, pynvml finds it by its name.
    for name in ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def _is_wsl_with_gpu() -> bool:
    # WSL has neither /proc/driver/nvidia nor /dev/nvidiactl; GPUs are reached through /dev/dxg.
    return os.path.exists("/dev/dxg") and os.path.exists("/usr/lib/wsl/lib/libnvidia-ml.so.1")


def _sum_memory(processes: Any | None) -> int | None:
    """Return the memory of all processes, in bytes, or None if unknown, as under WSL."""
    if processes is None:
        return None
    held: list[int | None] = [getattr(process, "usedGpuMemory", None) for process in processes]
    known = [size for size in held if size is not None]
    return sum(known) if len(known) == len(held) else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _scale(value: Any | None, divisor: int) -> float | None:
    return None if value is None else value / divisor
