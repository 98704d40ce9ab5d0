"""A pynvml of the test's own: cards whose sensors are there, missing, or gone with the card."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """Like pynvml's: `value` is the code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeCard:
    name: str = "NVIDIA GeForce RTX 4070"
    uuid: str = "GPU-0000"
    lost: bool = False
    missing: frozenset[str] = frozenset()
    """Functions that this card does not support."""
    throttle: int = 0
    reserved_bytes: int | None = None
    """Memory that the driver keeps; None: it is too old to tell it apart from what is used."""
    slices: tuple[str | None, ...] | None = None
    """Names of its MIG slices by place, None for an empty one; None: it is not in MIG mode."""
    takes_limits: bool = True
    """Whether its power limit may be set."""
    values: dict[str, Any] = field(
        default_factory=lambda: {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=12 << 30, used=3 << 30, free=9 << 30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=40),
            "nvmlDeviceGetTemperature": 66,
            "nvmlDeviceGetPowerUsage": 181_500,
            "nvmlDeviceGetEnforcedPowerLimit": 200_000,
            "nvmlDeviceGetClockInfo": 2475,
            "nvmlDeviceGetFanSpeed": 45,
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=41, usedGpuMemory=2 << 30),
                SimpleNamespace(pid=7, usedGpuMemory=512 << 20),
            ],
            "nvmlDeviceGetCudaComputeCapability": (8, 9),
        }
    )


class FakeNvml:
    """Stands in for the module pynvml."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18

    def __init__(self, *cards: FakeCard, init_error: int | None = None) -> None:
        self.cards = list(cards)
        self.num_inits = 0
        self._init_error = init_error

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        self.num_inits += 1
        if self._init_error is not None:
            raise NVMLError(self._init_error)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 13000

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:  # noqa: N802
        if self.cards[index].lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> bytes:  # noqa: N802
        return card.name.encode()

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: FakeCard) -> int:  # noqa: N802
        name = "nvmlDeviceGetCurrentClocksEventReasons"
        return int(self._read(name, card, card.throttle))

    def nvmlDeviceSetPowerManagementLimit(self, card: FakeCard, milliwatts: int) -> None:  # noqa: N802
        if not card.takes_limits:
            raise NVMLError(self.NVML_ERROR_NO_PERMISSION)
        card.values["nvmlDeviceGetEnforcedPowerLimit"] = milliwatts

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:  # noqa: N802
        if card.slices is None and card.values["nvmlDeviceGetCudaComputeCapability"] < (8, 0):
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [int(card.slices is not None), 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:  # noqa: N802
        return len(card.slices or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, place: int) -> FakeCard:  # noqa: N802
        name = (card.slices or ())[place]
        if name is None:
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return FakeCard(name=name, uuid=f"MIG-{place}")

    nvmlMemory_v2 = 0x02000028  # noqa: N815

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:  # noqa: N802
        name = "nvmlDeviceGetMemoryInfo"
        found = self._read(name, card, card.values[name])
        if version is None:
            return found
        if card.reserved_bytes is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        used = found.used - card.reserved_bytes
        return SimpleNamespace(
            total=found.total, used=used, free=found.free, reserved=card.reserved_bytes
        )

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvmlDeviceGet"):
            raise AttributeError(function)

        def read(card: FakeCard, *args: Any) -> Any:
            if function not in card.values:
                raise AttributeError(function)
            return self._read(function, card, card.values[function])

        return read

    def _read(self, function: str, card: FakeCard, value: Any) -> Any:
        if card.lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        if function in card.missing:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return value
