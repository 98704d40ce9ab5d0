"""Measure the speed of this GPU: `agents.program agents.trainer.calibration JOB.json REPORT.json`.

No card reaches the peak of its data sheet: one in a small case throttles, laptops have many
different power limits, and a slot may have 4 lanes instead of 16. So each operation is repeated for
seconds, and only the second half counts, when the card is warm. Prints JSON lines of kind
`progress`, and one of kind `failed` on an error.

Shape letters: M tokens, O outputs, I inputs of a layer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import nn

from agents.contract.node import Calibration
from agents.contract.requests.jobs import CalibrationJob
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.disk_speed import measure_disk
from agents.telemetry.gpu import open_gpus
from agents.telemetry.host import parse_cpu_times
from agents.telemetry.recorder import load_nvml
from agents.trainer.kernels import nf4
from agents.trainer.rank.device import choose_device, choose_dtype

# M, O, I: the widest layer of a 7B model (Llama 2) with 4,096 tokens at once.
_SIZES = (4096, 11008, 4096)
# The same scaled down for a CPU, which would need minutes otherwise.
_CPU_SIZES = (256, 688, 256)
# Far larger than the cache of any GPU (H100: 50 MB).
_COPY_BYTES = 256 << 20
# Fraction of the job's time for each measurement.
_SHARES = {"matrix": 0.5, "memory": 0.15, "host": 0.15, "unpack": 0.2}
# Work between two waits for the device, in seconds, so that the waits themselves do not count.
_BURST_S = 0.05
# Number of readings of a GPU's load, and the time between two, in seconds.
_LOOKS, _LOOK_S = 5, 0.2
# Plausible sizes of a process's CUDA context with kernels and libraries, in bytes.
_CONTEXT_LIMITS = 64 << 20, 3 << 30


def calibrate(job: CalibrationJob, report: Callable[[str], None]) -> Calibration:
    """Return the rates that the job's device reaches.

    Args:
        job: device and time to measure.
        report: called with the name of the next measurement.
    """
    # Before torch uses the GPU: afterwards its load could not be distinguished from that of others.
    before, before_bytes = read_gpu(job.device_id)
    device = choose_device(job.device)
    report("matrix products")
    load = OtherLoad()
    matrix, spread = measure_matrix(device, job.seconds * _SHARES["matrix"])
    report("memory")
    memory = measure_copy(device, job.seconds * _SHARES["memory"])
    to_host = from_host = unpack = disk = None
    if device.type == "cuda":
        report("copies to host memory")
        seconds = job.seconds * _SHARES["host"] / 2
        to_host = measure_host(device, seconds, to_host=True)
        from_host = measure_host(device, seconds, to_host=False)
        report("4-bit weights")
        unpack = measure_unpack(device, job.seconds * _SHARES["unpack"])
        report("the disk")
        disk = measure_disk(Path(os.environ.get("RACKLESS_AGENT_HOME", ".")))
    _wait(device)
    after, after_bytes = read_gpu(job.device_id)
    gpu_load = max((share for share in (before, after) if share is not None), default=None)
    return Calibration(
        card=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        matrix_flops_per_s=matrix,
        memory_bytes_per_s=memory,
        to_host_bytes_per_s=to_host,
        from_host_bytes_per_s=from_host,
        unpack_values_per_s=unpack,
        measured_s=time.time(),
        precision=str(choose_dtype("auto", device)).removeprefix("torch."),
        spread=spread,
        other_load=load.read() if device.type == "cpu" else gpu_load,
        context_bytes=_find_context(device, before_bytes, after_bytes),
        disk_bytes_per_s=disk,
    )


def _find_context(device: torch.device, before: int | None, after: int | None) -> int | None:
    """Return the GPU memory of this process beyond torch's own, in bytes; None if not known."""
    if device.type != "cuda" or before is None or after is None:
        return None
    taken = after - before - torch.cuda.memory_reserved(device)
    # Another program that started or ended in between changes the difference.
    low, high = _CONTEXT_LIMITS
    return taken if low <= taken <= high else None


def read_gpu(device_id: str) -> tuple[float | None, int | None]:
    """Return the fraction of a GPU that other programs use now, and the bytes in use.

    None if not known.
    """
    if device_id == "cpu":
        return None, None
    home = os.environ.get("RACKLESS_AGENT_HOME", "")
    try:
        gpus = open_gpus(lambda: load_nvml(Path(home, "agents")))
        shares, used = [], None
        for _ in range(_LOOKS):
            time.sleep(_LOOK_S)  # first, since work that has just ended still counts
            for gpu in gpus.sample():
                if gpu.uuid == device_id:
                    used = gpu.memory_used_bytes
                    shares += [] if gpu.utilisation is None else [gpu.utilisation]
    except (OSError, ImportError, RuntimeError):  # no driver, or not from an agent's archive
        return None, None
    return (median(shares) if shares else None), used


class OtherLoad:
    """Fraction of the CPU that other programs use, from the creation of this object."""

    def __init__(self) -> None:
        self._began = self._read()

    def read(self) -> float | None:
        """Return the fraction so far, 0 to 1; None if the system does not report it."""
        now = self._read()
        if self._began is None or now is None or now[1] <= self._began[1]:
            return None
        busy, whole, own = (b - a for a, b in zip(self._began, now, strict=True))
        return min(1.0, max(0.0, (busy - own) / whole))

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Return seconds of all cores together: busy, total, and of this process."""
        try:
            ticks = parse_cpu_times(Path("/proc/stat").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        if ticks is None:
            return None
        per_second = os.sysconf("SC_CLK_TCK")
        return ticks[0] / per_second, ticks[1] / per_second, time.process_time()


def measure_pace(device: torch.device, seconds: float, work: Callable[[], object]) -> float:
    """Return the median seconds of one call of `work` on a warm device."""
    return median(repeat_work(device, seconds, work))


def repeat_work(device: torch.device, seconds: float, work: Callable[[], object]) -> list[float]:
    """Return the seconds of one call of `work` in each of many repetitions on a warm device."""
    work()
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    at_once = max(1, int(_BURST_S / max(time.perf_counter() - started, 1e-6)))
    paces: list[float] = []
    began = time.perf_counter()
    while not paces or time.perf_counter() - began < seconds:
        started = time.perf_counter()
        for _ in range(at_once):
            work()
        _wait(device)
        paces.append((time.perf_counter() - started) / at_once)
    # The first half heats the card up, while its clocks fall.
    return paces[len(paces) // 2 :]


def find_spread(paces: Sequence[float]) -> float:
    """Return the difference between slow and fast repetitions, as a fraction of their median.

    One in ten may be slower or faster by any amount, since the system also wakes up for other work.

    >>> find_spread([1.0] * 9 + [5.0]), find_spread([1.0, 2.0, 1.0, 2.0])
    (0.0, 1.0)
    """
    ordered = sorted(paces)
    tenth = len(ordered) // 10
    slow, fast = ordered[-1 - tenth], ordered[tenth]
    middle = ordered[len(ordered) // 2 - (len(ordered) % 2 == 0)]
    return (slow - fast) / middle


def measure_matrix(device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the FLOP/s of products (M, I) x (I, O), 2 M O I operations each, and their spread."""
    m, o, i = _SIZES if device.type == "cuda" else _CPU_SIZES
    dtype = choose_dtype("auto", device)
    x_MI = torch.randn(m, i, device=device, dtype=dtype)
    weight_OI = torch.randn(o, i, device=device, dtype=dtype)
    # Into preallocated memory, so that no allocation is timed.
    y_MO = torch.empty(m, o, device=device, dtype=dtype)
    paces = repeat_work(device, seconds, lambda: torch.mm(x_MI, weight_OI.T, out=y_MO))
    return 2.0 * m * o * i / median(paces), find_spread(paces)


def measure_copy(device: torch.device, seconds: float) -> float:
    """Return the bytes per second of a copy within the device, reads and writes together."""
    size = _COPY_BYTES if device.type == "cuda" else _COPY_BYTES // 16
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size / measure_pace(device, seconds, lambda: target.copy_(source))


def measure_host(device: torch.device, seconds: float, *, to_host: bool) -> float:
    """Return the bytes per second between the GPU and pinned host memory."""
    size = _COPY_BYTES // 4
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    source, target = (there, host) if to_host else (host, there)
    return size / measure_pace(device, seconds, lambda: target.copy_(source, non_blocking=True))


def measure_unpack(device: torch.device, seconds: float) -> float | None:
    """Return the NF4 weights unpacked per second; None if packages are missing."""
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError:
        return None
    _, o, i = _SIZES
    dtype = choose_dtype("auto", device)
    layer: nn.Module = Linear4bit(
        i, o, bias=False, compute_dtype=dtype, compress_statistics=True, quant_type="nf4"
    )
    layer = layer.to(dtype).to(device)  # the move quantizes; unpacked weights have this type again
    if not nf4.register(layer):
        return None
    return o * i / measure_pace(device, seconds, lambda: nf4.dequantize(layer))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: list[str]) -> int:
    """Measure, and write the report; return the exit code."""
    job_path, report_path = argv
    job = from_wire(CalibrationJob, json.loads(Path(job_path).read_bytes()), "job")
    try:
        found = calibrate(job, lambda text: _report("progress", f"measuring {text}"))
    except torch.OutOfMemoryError:
        message = f"{job.device} has no memory left for a measurement."
        _report("failed", message, "Close other programs that use that GPU, then measure again")
        return 1
    except ExpectedError as error:
        _report("failed", error.message, error.hint)
        return 1
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        _report("failed", f"{job.device} could not be measured: {reason}", "Check nvidia-smi there")
        return 1
    Path(report_path).write_text(json.dumps(to_wire(found)), encoding="ascii")
    return 0


def _report(kind: str, message: str, hint: str = "") -> None:
    print(json.dumps({"kind": kind, "message": message, "hint": hint}), flush=True)
