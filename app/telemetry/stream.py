"""Turn the stream of samples into the newest reading and the history of each device.

A device is one that trains: each GPU of a node, or its CPU if it has no NVIDIA GPU. Not
thread-safe: use it on one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from agents.contract.node import GpuFacts, GpuSample, Sample
from app.events import ACTIVE_STATES, NodeSnapshot, RankProgress, RunSnapshot
from app.telemetry.alerts import (
    SPEED_HOLDS_S,
    SPEED_STEPS,
    Alert,
    AlertKind,
    check_disk,
    check_heat,
    check_memory,
    check_throttle,
)
from app.telemetry.history import Ring

HISTORY_SAMPLES = 600
"""Length of a device's history, in samples: ten minutes, the same as nodes replay."""

CLOCK_SAMPLES = 20
"""Number of samples from which a clock offset is estimated."""

TIME, UTILISATION, MEMORY, TEMPERATURE, POWER, TOKENS = range(6)
"""Rows of a device's history."""

GAP_S = 5.0
"""Interval between two samples that counts as a gap, in seconds; samples come every second."""
SPEED_SLACK_S = 5.0
"""Maximum age of a sample before the step whose speed it gets, in seconds: journals and samples
arrive separately."""

# Phases in which a rank's speed is shown; saving is a short pause between two steps.
_TRAINING_PHASES = (None, "training", "saving")


@dataclass(frozen=True, slots=True, order=True)
class DeviceKey:
    node: str
    device: str
    """Device: `cpu`, or `cuda:0` with the node's index of the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReading:
    """Newest reading of one device."""

    name: str
    is_gpu: bool
    time_s: float | None = None
    """Time by the node's clock, in seconds since the epoch; None before the first sample."""
    utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    fan: float | None = None
    throttle: tuple[str, ...] | None = None
    tokens_per_s: float | None = None
    """Speed of the rank that trains on it, in tokens per second; None: no rank, or unknown."""
    use: str | None = None
    """Work of Rackless on it, such as `the export of run r-1`, if any."""


@dataclass(slots=True)
class Device:
    key: DeviceKey
    reading: StreamReading
    history: Ring = field(default_factory=lambda: Ring(6, HISTORY_SAMPLES))
    alerts: tuple[Alert, ...] = ()
    arrived_s: float | None = None
    """Arrival of its newest live sample by this PC's clock, in seconds since the epoch; None before
    the first."""
    node_alerts: tuple[Alert, ...] = ()
    """Alerts of the whole node, such as a full disk; the same for all its devices."""
    rank: RankProgress | None = None
    run: RunSnapshot | None = None
    """Run that uses the device now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over the devices that report a figure; None: no device reports it."""

    num_gpus: int
    num_cpus: int
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    tokens_per_s: float | None


class Telemetry:
    """All devices of the cluster."""

    def __init__(self) -> None:
        self._devices: dict[DeviceKey, Device] = {}
        self._samples: dict[str, Sample] = {}
        self._node_alerts: dict[str, tuple[Alert, ...]] = {}
        self._offsets: dict[str, deque[float]] = {}
        self._arrivals: dict[str, float] = {}

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices.values())

    def __getitem__(self, key: DeviceKey) -> Device:
        return self._devices[key]

    def of_node(self, node: str) -> list[Device]:
        """Return the node's devices, GPUs by index."""
        return sorted((d for d in self if d.key.node == node), key=_device_order)

    def expect(self, node: NodeSnapshot) -> bool:
        """Add the devices in a node's facts; return whether the set of devices changed.

        A device keeps its history across reconnects; one that is no longer listed is removed.
        """
        if node.facts is None:
            return False
        wanted = [_reading_of_facts(gpu) for gpu in node.facts.gpus]
        names = [f"cuda:{gpu.index}" for gpu in node.facts.gpus]
        # Without an NVIDIA GPU the CPU trains, so it is the node's only device.
        if not wanted:
            cpu = StreamReading(
                name=node.facts.cpu or "CPU",
                is_gpu=False,
                memory_total_bytes=node.facts.memory_bytes,
            )
            wanted, names = [cpu], ["cpu"]
        keys = [DeviceKey(node.name, name) for name in names]
        gone = [d.key for d in self.of_node(node.name) if d.key not in keys]
        for key in gone:
            del self._devices[key]
        fresh = [key for key in keys if key not in self._devices]
        for key, reading in zip(keys, wanted, strict=True):
            if key in fresh:
                self._devices[key] = Device(key=key, reading=reading)
            else:
                device = self._devices[key]
                # Facts arrive at each reconnect without figures, so keep those of the newest
                # sample.
                device.reading = replace(device.reading, name=reading.name)
        return bool(gone or fresh)

    def forget(self, node: str) -> None:
        """Remove a node and its devices."""
        for device in self.of_node(node):
            del self._devices[device.key]
        self._samples.pop(node, None)
        self._node_alerts.pop(node, None)
        self._offsets.pop(node, None)
        self._arrivals.pop(node, None)

    def clock_offset(self, node: str) -> float | None:
        """Return the seconds by which a node's clock is ahead of this PC's; None: unknown."""
        # Samples always arrive late, so the largest of the last offsets is the most accurate.
        return max(self._offsets.get(node, ()), default=None)

    def take(
        self, node: str, sample: Sample, arrived_s: float | None = None, *, replayed: bool = False
    ) -> list[DeviceKey]:
        """Add a sample; return the devices whose readings changed.

        Args:
            node: name of the node.
            sample: its sample.
            arrived_s: arrival by this PC's clock, in seconds since the epoch; None for a replay.
            replayed: whether it was taken while this PC was not connected.
        """
        # A replayed sample arrives long after it was taken, so it gives no clock offset.
        if arrived_s is not None:
            self._arrivals[node] = arrived_s
            recent = self._offsets.setdefault(node, deque(maxlen=CLOCK_SAMPLES))
            recent.append(sample.time_s - arrived_s)
        newest = self._samples.get(node)
        if newest is not None and sample.time_s <= newest.time_s:
            return []  # a replay overlaps with live samples
        self._samples[node] = sample
        self._check_node(node, sample)
        if sample.gpus:
            return [
                self._add(node, f"cuda:{gpu.index}", _gpu(gpu, sample), sample, replayed=replayed)
                for gpu in sample.gpus
            ]
        known = self.of_node(node)
        # A sample without GPUs from a node with GPUs must not add a CPU as a device.
        if any(device.reading.is_gpu for device in known):
            return []
        name = known[0].reading.name if known else "CPU"
        return [self._add(node, "cpu", _cpu(sample, name), sample, replayed=replayed)]

    def follow_runs(self, runs: Iterable[RunSnapshot]) -> list[DeviceKey]:
        """Assign the ranks of active runs to devices; return the devices that changed."""
        carried: dict[DeviceKey, tuple[RankProgress, RunSnapshot]] = {}
        for run in runs:
            if run.state in ACTIVE_STATES:
                for rank in run.ranks:
                    carried[DeviceKey(rank.node, rank.device)] = (rank, run)
        changed = []
        for device in self:
            carrying = carried.get(device.key)
            now_rank = carrying[0] if carrying else None
            now_run = carrying[1] if carrying else None
            # Whole snapshots differ at each step of any rank, so compare only these two.
            if now_rank != device.rank or _name(now_run) != _name(device.run):
                changed.append(device.key)
            device.rank, device.run = now_rank, now_run
            tokens = _speed_now(now_rank, device.reading.time_s)
            device.reading = replace(device.reading, tokens_per_s=tokens)
        return changed

    def totals(self, nodes: frozenset[str]) -> Totals:
        """Return the sums over the devices of `nodes`."""
        readings = [d.reading for d in self if d.key.node in nodes]
        used = [r.memory_used_bytes for r in readings if r.memory_used_bytes is not None]
        total = [r.memory_total_bytes for r in readings if r.memory_total_bytes is not None]
        power = [r.power_w for r in readings if r.power_w is not None]
        tokens = [r.tokens_per_s for r in readings if r.tokens_per_s is not None]
        # A sum over no figures is unknown, not zero.
        return Totals(
            num_gpus=sum(r.is_gpu for r in readings),
            num_cpus=sum(not r.is_gpu for r in readings),
            memory_used_bytes=sum(used) if used else None,
            memory_total_bytes=sum(total) if total else None,
            power_w=sum(power) if power else None,
            tokens_per_s=sum(tokens) if tokens else None,
        )

    def _check_node(self, node: str, sample: Sample) -> None:
        """Raise or clear the alerts of the node itself."""
        # An active alert is cleared at a lower value than it is raised at.
        active = frozenset(alert.kind for alert in self._node_alerts.get(node, ()))
        disk = check_disk(sample.disk_used_bytes, sample.disk_total_bytes, active)
        self._node_alerts[node] = (disk,) if disk else ()

    def _add(
        self, node: str, name: str, reading: StreamReading, sample: Sample, *, replayed: bool
    ) -> DeviceKey:
        key = DeviceKey(node, name)
        device = self._devices.get(key)
        # A sample may arrive before the node's facts.
        if device is None:
            device = self._devices[key] = Device(key=key, reading=reading)
        _mark_gap(device, sample.time_s)
        # Speed comes from journals and holds around the time of its step. A replayed sample from
        # before the run, or from a time without its node, has no speed.
        speed = speed_at(device.rank, sample.time_s, is_live=not replayed)
        reading = replace(reading, time_s=sample.time_s, tokens_per_s=speed)
        device.reading = reading
        device.history.append(
            (
                sample.time_s,
                reading.utilisation,
                reading.memory_used_bytes,
                reading.temperature_celsius,
                reading.power_w,
                reading.tokens_per_s,
            )
        )
        active = frozenset(alert.kind for alert in device.alerts)
        device.alerts = tuple(alert for alert in _device_alerts(reading, active) if alert)
        device.node_alerts = self._node_alerts[node]
        device.arrived_s = self._arrivals.get(node)
        return key


def speed_at(rank: RankProgress | None, time_s: float, *, is_live: bool) -> float | None:
    """Return a rank's speed at a time by its node's clock; None: not known."""
    # Only the speed of the newest step is known. It holds from the step's beginning until the next
    # step is overdue; without the time of that step, for live samples only.
    if rank is None or rank.phase not in _TRAINING_PHASES:
        return None
    if rank.time_s is None:
        return rank.tokens_per_s if is_live else None
    step_s = rank.step_s or 0.0
    began_s = rank.time_s - step_s - SPEED_SLACK_S
    overdue_s = rank.time_s + max(SPEED_HOLDS_S, SPEED_STEPS * step_s)
    return rank.tokens_per_s if began_s <= time_s <= overdue_s else None


def _speed_now(rank: RankProgress | None, sampled_s: float | None) -> float | None:
    """Return a rank's speed at the newer of its last step and its node's newest sample."""
    known = (sampled_s, rank.time_s if rank is not None else None)
    return speed_at(rank, max((t for t in known if t is not None), default=0.0), is_live=True)


def _mark_gap(device: Device, time_s: float) -> None:
    """Add rows without values to a gap between samples, so that charts do not draw a line there."""
    last_s = device.reading.time_s
    if last_s is not None and time_s - last_s > GAP_S:
        # One row at each end, since the area below a line is filled up to the next row.
        for edge_s in (last_s + GAP_S / 10, time_s - GAP_S / 10):
            device.history.append((edge_s, *[None] * TOKENS))


def _name(run: RunSnapshot | None) -> str | None:
    return run.name if run is not None else None


def _device_alerts(reading: StreamReading, active: frozenset[AlertKind]) -> list[Alert | None]:
    return [
        check_heat(reading.temperature_celsius, is_gpu=reading.is_gpu, active=active),
        check_throttle(reading.throttle),
        check_memory(reading.memory_used_bytes, reading.memory_total_bytes, active),
    ]


def _device_order(device: Device) -> tuple[int, str]:
    kind, _, index = device.key.device.partition(":")
    # By number, since the text `cuda:10` sorts before `cuda:2`.
    return (int(index) if index.isdigit() else -1, kind)


def _reading_of_facts(gpu: GpuFacts) -> StreamReading:
    return StreamReading(
        name=gpu.name,
        is_gpu=True,
        memory_total_bytes=gpu.memory_bytes,
        power_limit_w=gpu.power_limit_w,
    )


def _gpu(gpu: GpuSample, sample: Sample) -> StreamReading:
    return StreamReading(
        name=gpu.name,
        is_gpu=True,
        utilisation=gpu.utilisation,
        memory_used_bytes=gpu.memory_used_bytes,
        memory_total_bytes=gpu.memory_total_bytes,
        temperature_celsius=gpu.temperature_celsius,
        power_w=gpu.power_w,
        power_limit_w=gpu.power_limit_w,
        clock_mhz=gpu.clock_mhz,
        fan=gpu.fan,
        throttle=gpu.throttle,
        use=_use_of(sample, gpu.uuid),
    )


def _cpu(sample: Sample, name: str) -> StreamReading:
    return StreamReading(
        name=name,
        is_gpu=False,
        utilisation=sample.cpu_utilisation,
        memory_used_bytes=sample.memory_used_bytes,
        memory_total_bytes=sample.memory_total_bytes,
        temperature_celsius=sample.cpu_temperature_celsius,
        power_w=sample.cpu_power_w,
        use=_use_of(sample, "cpu"),
    )


def _use_of(sample: Sample, device_id: str) -> str | None:
    return next((use.name for use in sample.uses if use.uuid == device_id), None)
