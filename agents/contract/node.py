"""What a node reports of itself: hardware, samples, its environment, measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    uuid: str
    index: int
    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA version that the driver supports, such as `13.0`."""
    capability: str | None = None
    """Compute capability, such as `8.9`."""
    power_limit_w: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """What holds a GPU of ours now."""

    uuid: str
    name: str
    """Such as `run r-1` or `the export of run r-1`."""
    run_id: str | None = None
    """None: it is no run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceFacts:
    name: str
    address: str
    mtu: int | None = None
    speed_mbit: int | None = None
    up: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    hostname: str
    os: str
    kernel: str
    python: str
    architecture: str
    cpu: str | None = None
    num_cores: int | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    """What a program can have of it now without anything being swapped out."""
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str | None = None
    """Why no GPU is listed although a driver seems to be there; None: nothing wrong."""
    gpu_uses: tuple[GpuUse, ...] = ()
    """What they are used for now."""
    interfaces: tuple[InterfaceFacts, ...] = ()
    address: str | None = None
    """The node's own address on the connection the master came by; None: local or wsl."""
    wsl: str | None = None
    """Networking mode of WSL2 (`mirrored`, `nat`, ...); None: not WSL."""
    wall_s: float = 0.0
    """The node's clock, seconds since 1970, when this was written."""
    environment: EnvironmentReport | None = None
    compiler: str | None = None
    """Path of the C compiler that training would use; None: none was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    uuid: str
    index: int
    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation: float | None = None
    """Share of time with a kernel running, 0 to 1."""
    temperature_celsius: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    fan: float | None = None
    """Share of the fan's full speed, 0 to 1."""
    throttle: tuple[str, ...] | None = None
    """Reasons why the clock is held down, in words; empty: none; None: not known."""
    process_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reading of everything on a node."""

    time_s: float
    """Wall clock of the node."""
    seq: int
    """Rises by one with each sample of one recorder."""
    gpus: tuple[GpuSample, ...] = ()
    cpu_utilisation: float | None = None
    """0 to 1 over all cores."""
    cpu_temperature_celsius: float | None = None
    cpu_power_w: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_used_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    network_in_bytes_per_s: float | None = None
    network_out_bytes_per_s: float | None = None
    load: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentQuery:
    lock_sha256: str
    requirements: dict[str, str]
    """Distribution name -> exact version."""
    python: str | None = None
    """An interpreter to look at; None: the one adopted or built before."""
    adopt: bool = False
    """Remember `python` as this node's environment if it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentBuild:
    lock_sha256: str
    lock_text: str
    """A pip requirements file with exact versions."""
    requirements: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentReport:
    python: str | None = None
    """Path of the interpreter; None: there is no environment yet."""
    python_version: str | None = None
    lock_sha256: str | None = None
    fits: bool = False
    """Every requirement is there in its exact version."""
    missing: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    """Such as `torch 2.12.0 instead of 2.13.0`."""
    headers: bool | None = None
    """The interpreter's C headers (Python.h) are there; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogTail:
    """The end of a log on a node."""

    run_id: str
    attempt: int
    name: str
    """`rank-R.log` or `supervisor.log`."""
    size_bytes: int
    written_s: float
    """Wall clock of the node when it last grew."""
    text: str
    """Its last lines; bytes that are not UTF-8 are replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLogs:
    """What ranks and supervisors on a node wrote last, the newest log first."""

    tails: tuple[LogTail, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceProbe:
    python: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    interface: str | None = None
    num_values: int = 262144
    """fp32 values summed over all ranks."""
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationJob:
    """Measure how fast one GPU really is; takes about 20 seconds and the GPU to itself."""

    python: str
    device: str
    """Such as `cuda:0`."""
    device_id: str
    """What is leased meanwhile: the GPU's uuid."""
    seconds: float = 20.0
    """What all measurements together may take, beside the start of torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What a GPU reached in a measurement, sustained and not at its best. None: not measured."""

    card: str
    """Name of the GPU, as its driver gives it."""
    matrix_flops_per_s: float | None = None
    """Products of matrices as wide as a 7B model's, in the type that training takes (bf16, else
    fp16)."""
    memory_bytes_per_s: float | None = None
    """Read and written by a copy within the GPU."""
    to_host_bytes_per_s: float | None = None
    """Into pinned memory."""
    from_host_bytes_per_s: float | None = None
    unpack_values_per_s: float | None = None
    """NF4 weights that become bf16."""
    measured_s: float = 0.0
    """The node's wall clock."""


NodeTokenPlace = Literal["none", "same", "other"]
"""Whether a node has a token of the hub: the one that was asked about, or one of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWish:
    """What to do with the hub's token on a node."""

    deed: Literal["find", "keep", "forget"]
    token: str = field(default="", repr=False)
    """To be kept; empty otherwise."""
    digest: str = ""
    """SHA-256 of the one to find or to forget, in hex."""
