"""Reports of a node about itself: hardware, samples, its environment and measurements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from agents.contract.environments import EnvironmentTrial
from agents.contract.names import (
    MAX_ATTEMPT,
    check_address,
    check_device,
    check_name,
    check_number,
    check_text,
    check_time,
    drop_odd_paths,
    drop_odd_words,
)

MAX_GPUS = 128
"""Maximum number of GPUs of a PC, beyond any mainboard."""
MAX_LISTED = 1024
"""Maximum number of other items that a PC lists, such as network interfaces."""
MAX_SPEED = 1e18
"""Maximum speed of a GPU in any unit per second: a thousand times the fastest one."""
VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,99}"
PLAIN_VALUE = r"[ -~]{0,200}"
PLAIN_PATH = r"|[~/][A-Za-z0-9._/-]{0,199}"
"""Forms of the parts of a `LoginVariable`, which sentences and other nodes' ranks contain."""
HOME_ID = r"[0-9a-f]{32}"
RecorderState = Literal["here", "missing", "elsewhere"]
"""`missing`: it did not start; `elsewhere`: that of another PC holds this node's folder."""
MAX_BYTES = 2**60
"""Maximum amount of memory or disk, in bytes."""
MTUS = (68, 65536)
"""Smallest and largest packet of a network device, in bytes: that of IPv4, and of loopback."""
SPEEDS_MBIT = (1, 10**7)
"""Slowest and fastest link of a network device, in Mb/s."""
MAX_CONTEXT_BYTES = 16 * 2**30
"""Maximum size of a CUDA context, in bytes; the largest one seen takes less than 1 GiB."""
# Limits of plausible readings. Drivers report all bits set, or worse, for unknown values.
_PLAUSIBLE = {
    "utilisation": 1.0,
    "temperature_celsius": 1000.0,
    "power_w": 1e6,
    "power_limit_w": 1e6,
    "slowdown_celsius": 1000.0,
    "clock_mhz": 1e6,
    "fan": 10.0,
    "memory_used_bytes": MAX_BYTES,
    "memory_total_bytes": MAX_BYTES,
    "memory_bytes": MAX_BYTES,
    "memory_reserved_bytes": MAX_BYTES,
    "memory_computing_bytes": MAX_BYTES,
    "memory_available_bytes": MAX_BYTES,
    "cpu_utilisation": 1.0,
    "cpu_temperature_celsius": 1000.0,
    "cpu_power_w": 1e6,
    "disk_used_bytes": MAX_BYTES,
    "disk_total_bytes": MAX_BYTES,
    "disk_bytes": MAX_BYTES,
    "disk_free_bytes": MAX_BYTES,
    "disk_read_bytes_per_s": 1e15,
    "disk_write_bytes_per_s": 1e15,
    "bytes_per_s": 1e15,
    "round_trip_s": 3600.0,
    "resent_share": 1.0,
    "network_in_bytes_per_s": 1e15,
    "network_out_bytes_per_s": 1e15,
    "load": 1e9,
    "num_cores": 1e6,
    "pc_memory_bytes": MAX_BYTES,
    "pc_num_cores": 1e6,
}
LimitKind = Literal["memory", "swap", "cpus", "processes"]
"""Resource of a limit; `processes` counts threads, too."""


def _drop_implausible(record: object) -> None:
    """Replace impossible readings by None, which means not known."""
    for name, most in _PLAUSIBLE.items():
        value = getattr(record, name, None)
        if value is not None and not 0 <= value <= most:
            # The dataclasses are frozen, and this runs while one is being read.
            object.__setattr__(record, name, None)


def drop_odd_numbers(record: object, **limits: tuple[int, int]) -> None:
    """Replace numbers outside their limits by None, which means not known."""
    for name, (least, most) in limits.items():
        value = getattr(record, name)
        if value is not None and not least <= value <= most:
            object.__setattr__(record, name, None)


def _check_count(field_name: str, items: tuple[object, ...], most: int) -> None:
    if len(items) > most:
        raise ValueError(f"{field_name} has {len(items)} items; at most {most} fit")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    uuid: str
    index: int
    name: str
    memory_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    """Part of the memory that the driver reserves for itself, in bytes; programs cannot use it."""
    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA version that the driver supports, such as `13.0`."""
    capability: str | None = None
    """CUDA compute capability, such as `8.9`."""
    power_limit_w: float | None = None
    slowdown_celsius: float | None = None
    """Temperature at which the hardware reduces the clock, in degrees Celsius."""

    def check_foreign(self) -> None:
        check_number("index", self.index, 0, MAX_LISTED)
        for name in ("uuid", "name"):
            check_text(name, getattr(self, name))
        drop_odd_words(self, "driver", "cuda", "capability")
        _drop_implausible(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class MigGpu:
    """GPU in MIG mode, on which no rank trains: NCCL joins no slices of one GPU."""

    index: int
    name: str
    slices: tuple[str, ...] = ()
    """Names of its slices, such as `NVIDIA A100-SXM4-40GB MIG 1g.5gb`."""

    def check_foreign(self) -> None:
        check_number("index", self.index, 0, MAX_LISTED)
        check_text("name", self.name)
        _check_count("slices", self.slices, MAX_LISTED)
        for name in self.slices:
            check_text("slices", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """Work that holds the lease of a GPU."""

    uuid: str
    name: str
    """Name of the work, such as `run r-1` or `the export of run r-1`."""
    run_id: str | None = None
    """Id of the run; None: the work is not a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceFacts:
    name: str
    address: str
    mtu: int | None = None
    speed_mbit: int | None = None
    up: bool | None = None
    mac: str | None = None
    """Hardware address, such as `aa:bb:cc:dd:ee:ff`; None: no such address."""
    broadcast: str | None = None
    """IPv4 broadcast address of its network; None: no such address."""
    wakes: bool | None = None
    """True if a magic packet wakes the PC; None: not known."""

    def check_foreign(self) -> None:
        check_device("name", self.name)
        check_address("address", self.address)
        check_address("broadcast", self.broadcast)
        drop_odd_words(self, "mac")
        drop_odd_numbers(self, mtu=MTUS, speed_mbit=SPEEDS_MBIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoginVariable:
    """Variable of the node's login that changes how training behaves."""

    name: str
    value: str = ""
    """Value, if nodes have to agree on it; empty: they need not, or it is not plain text."""
    file: str = ""
    """File that probably sets it, such as `~/.bashrc`; empty: not found."""

    def check_foreign(self) -> None:
        for name, form in (("name", VARIABLE_NAME), ("value", PLAIN_VALUE), ("file", PLAIN_PATH)):
            if not re.fullmatch(form, getattr(self, name)):
                raise ValueError(f"{name} of a variable is {getattr(self, name)[:80]!a}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceLimit:
    """Limit of a container, a slice or a login, which leaves a node less than its PC has."""

    kind: LimitKind
    amount: float
    """Bytes of memory or swap, or a number of CPUs, or of processes."""
    place: str
    """Where it is set: a file of a control group, or a setting such as `ulimit -v`."""

    def check_foreign(self) -> None:
        check_text("place", self.place)
        if not 0 <= self.amount <= MAX_BYTES:  # NaN, too
            raise ValueError(f"amount is {self.amount}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    hostname: str
    os: str
    kernel: str
    python: str
    architecture: str
    cpu: str | None = None
    num_cores: int | None = None
    """CPUs that training may keep busy."""
    memory_bytes: int | None = None
    """Memory that training may use, in bytes."""
    memory_available_bytes: int | None = None
    """Part of it that a program can take without swapping, in bytes."""
    pc_num_cores: int | None = None
    """CPUs of the whole PC; None: a node of an earlier version."""
    pc_memory_bytes: int | None = None
    """Memory of the whole PC, in bytes; None: a node of an earlier version."""
    limits: tuple[ResourceLimit, ...] = ()
    """Limits that leave it less than the PC has, at most one of each kind."""
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str | None = None
    """Reason why no GPU is listed although a driver seems to be installed; None: no problem."""
    mig_gpus: tuple[MigGpu, ...] = ()
    """GPUs in MIG mode, which are not among `gpus`."""
    gpu_uses: tuple[GpuUse, ...] = ()
    """Work that holds GPUs of this node."""
    interfaces: tuple[InterfaceFacts, ...] = ()
    address: str | None = None
    """Address of the node on the master's SSH connection; None: local or WSL."""
    wsl: str | None = None
    """Networking mode of WSL2 (`mirrored`, `nat`, ...); None: not WSL."""
    wall_s: float = 0.0
    """Time of the report, in seconds since 1970 by the node's clock."""
    environment: EnvironmentReport | None = None
    compiler: str | None = None
    """Path of the C compiler for training; None: not found."""
    machine_id: str | None = None
    """Hash of the operating system's installation id; None: no such id."""
    agent_home: str | None = None
    """Folder of the agent; None: a node of an earlier version."""
    started_s: float | None = None
    """Time at which the PC was started, in seconds since 1970."""
    boot_id: str | None = None
    """Random id of this start of the system, equal only for nodes on one PC; None: not known."""
    macs: tuple[str, ...] = ()
    """Hardware addresses of all its network cards, also of those without a network."""
    variables: tuple[LoginVariable, ...] = ()
    """Variables of the login that training leaves out, or that change it on this node only."""
    home_id: str | None = None
    """Random id in the agent's folder, equal for nodes that share it, and for clones of a disk."""
    recorder: RecorderState = "here"
    """Process that lists the GPUs and records the sensors."""

    def check_foreign(self) -> None:
        for name in ("hostname", "os", "kernel", "python", "architecture", "cpu", "gpu_problem"):
            check_text(name, getattr(self, name) or "")
        check_address("address", self.address)
        drop_odd_paths(self, "agent_home", "compiler")
        drop_odd_words(self, "machine_id", "wsl", "boot_id", "home_id")
        _check_count("macs", self.macs, MAX_LISTED)
        for mac in self.macs:
            check_text("macs", mac)
        _check_count("variables", self.variables, MAX_LISTED)
        _check_count("gpus", self.gpus, MAX_GPUS)
        _check_count("mig_gpus", self.mig_gpus, MAX_GPUS)
        _check_count("gpu_uses", self.gpu_uses, MAX_LISTED)
        _check_count("limits", self.limits, MAX_LISTED)
        _check_count("interfaces", self.interfaces, MAX_LISTED)
        check_time("wall_s", self.wall_s)
        check_time("started_s", self.started_s)
        _drop_implausible(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    uuid: str
    index: int
    name: str
    memory_used_bytes: int | None = None
    """Memory in use, in bytes; some drivers count their own reserve, too."""
    memory_total_bytes: int | None = None
    utilisation: float | None = None
    """Share of time with a running kernel, 0 to 1."""
    temperature_celsius: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    fan: float | None = None
    """Fan speed as a share of its maximum, 0 to 1."""
    throttle: tuple[str, ...] | None = None
    """Reasons for a reduced clock, in words; empty: no reason; None: not known."""
    process_ids: tuple[int, ...] | None = None
    """Processes that compute on the GPU, without those that only draw."""
    memory_computing_bytes: int | None = None
    """Part of the used memory that those processes hold, in bytes."""

    def check_foreign(self) -> None:
        check_number("index", self.index, 0, MAX_LISTED)
        check_text("uuid", self.uuid)
        check_text("name", self.name)
        _drop_implausible(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reading of all sensors of a node."""

    time_s: float
    """Time of the reading, in seconds since 1970 by the node's clock."""
    seq: int
    """Sequence number, which the recorder increments with each sample."""
    gpus: tuple[GpuSample, ...] = ()
    cpu_utilisation: float | None = None
    """Share of busy time over all cores, 0 to 1."""
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
    uses: tuple[GpuUse, ...] = ()
    """Work of Rackless on its devices, such as an export; `cpu` stands for the CPU."""

    def check_foreign(self) -> None:
        check_time("time_s", self.time_s)
        _check_count("gpus", self.gpus, MAX_GPUS)
        _check_count("uses", self.uses, MAX_GPUS + 1)
        _drop_implausible(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentReport:
    python: str | None = None
    """Path of the interpreter; None: no environment."""
    python_version: str | None = None
    lock_sha256: str | None = None
    fits: bool = False
    """True if every requirement is installed in its exact version."""
    missing: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    """Deviations, such as `torch 2.12.0 instead of 2.13.0`."""
    headers: bool | None = None
    """True if the interpreter's C headers (Python.h) are installed; None: not known."""
    built_with: str | None = None
    """Builder, such as `uv 0.13.9`; None: it was adopted, or built by an older version."""
    trial: EnvironmentTrial | None = None
    """Result of trying it after it was built or adopted; None: it was not tried."""

    def check_foreign(self) -> None:
        drop_odd_paths(self, "python")
        drop_odd_words(self, "python_version", "lock_sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogTail:
    """End of a log on a node."""

    run_id: str
    attempt: int
    name: str
    """`rank-R.log` or `supervisor.log`."""
    size_bytes: int
    written_s: float
    """Time of the last write, in seconds since 1970 by the node's clock."""
    text: str
    """Last lines; bytes that are not UTF-8 are replaced."""

    def check_foreign(self) -> None:
        check_name("run_id", self.run_id)
        # 0: its folder does not name an attempt.
        check_number("attempt", self.attempt, 0, MAX_ATTEMPT)
        check_name("name", self.name)
        check_time("written_s", self.written_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLogs:
    """Ends of the logs of ranks and supervisors on a node, newest first."""

    tails: tuple[LogTail, ...]


LinkFailure = Literal["dropped", "refused", "no_way", "broke", "stalled"]
"""Failure of a link: `dropped`: no answer; `refused`: port closed; `no_way`: no route; `broke`: the
connection ended; `stalled`: bytes stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkProbe:
    """Measured link from one node to another."""

    round_trip_s: float | None = None
    """Median round trip of the pings, in seconds; None: no connection."""
    bytes_per_s: float | None = None
    """Throughput; None: no bytes were sent, or too few arrived."""
    resent_share: float | None = None
    """Share of packets that were sent again, 0 to 1; None: no bytes were sent."""
    failure: LinkFailure | None = None
    """Kind of failure; None: the link works."""
    reason: str = ""
    """Error text of the system."""

    def check_foreign(self) -> None:
        check_text("reason", self.reason)
        _drop_implausible(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchFacts:
    """Properties of torch in a training environment."""

    version: str
    cuda: str | None = None
    """CUDA version that it was built for, such as `13.0`; None: a build for CPUs."""
    nccl: str | None = None
    """Version of NCCL; None: not included."""
    architectures: tuple[str, ...] = ()
    """Architectures that it has kernels for, such as `sm_86`; empty if it sees no GPU."""
    num_gpus: int = 0
    """Number of GPUs that it sees."""

    def check_foreign(self) -> None:
        check_text("version", self.version)
        drop_odd_words(self, "cuda", "nccl")
        _check_count("architectures", self.architectures, MAX_LISTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceResult:
    seconds: float
    num_values: int
    sum_ok: bool
    torch: TorchFacts | None = None
    nccl_seconds: float | None = None
    """Duration of the sum with NCCL; None: it was not tried, or it failed."""
    nccl_problem: str = ""
    """Why NCCL's sum failed; empty: it did not."""

    def check_foreign(self) -> None:
        check_text("nccl_problem", self.nccl_problem)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Sustained speeds of a GPU, not its peaks. None: not measured."""

    card: str
    """Name of the GPU in its driver."""
    matrix_flops_per_s: float | None = None
    """Speed of matrix products as wide as those of a 7B model, in the data type of training."""
    memory_bytes_per_s: float | None = None
    """Bytes read plus bytes written by a copy within the GPU, per second."""
    to_host_bytes_per_s: float | None = None
    """Speed of copies into pinned host memory."""
    from_host_bytes_per_s: float | None = None
    unpack_values_per_s: float | None = None
    """NF4 weights unpacked to that type per second."""
    precision: str = ""
    """torch's name of that type, such as `float16`; empty: measured by an earlier version."""
    measured_s: float = 0.0
    """Time of the measurement, in seconds since 1970 by the node's clock."""
    spread: float | None = None
    """Difference between slow and fast repetitions of matrix products, as a share of their
    median."""
    other_load: float | None = None
    """Share of the device that other programs used during the measurement, 0 to 1."""
    context_bytes: int | None = None
    """GPU memory of a process beyond what torch reserves: CUDA context, kernels and libraries."""
    disk_bytes_per_s: float | None = None
    """Speed of sequential reads of an uncached file in the agent's home."""

    def check_foreign(self) -> None:
        check_text("card", self.card)
        check_text("precision", self.precision)
        check_time("measured_s", self.measured_s)
        check_number("context_bytes", self.context_bytes or 0, 0, MAX_CONTEXT_BYTES)
        for name in (
            "matrix_flops_per_s",
            "memory_bytes_per_s",
            "to_host_bytes_per_s",
            "from_host_bytes_per_s",
            "unpack_values_per_s",
            "disk_bytes_per_s",
        ):
            if not 0 <= (getattr(self, name) or 0.0) <= MAX_SPEED:
                raise ValueError(f"{name} is {getattr(self, name)}, which no GPU reaches")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRefusal:
    """Reason why a run cannot start on a model."""

    message: str
    """Problem and its place, in lower case and without a full stop."""
    hint: str = ""
    """Advice on what to do, without a full stop."""
