"""The recorder: one detached process per agent home that takes a sample each second.

It is separate from the server, so that ten minutes of history survive a disconnect and the GPU
library is loaded only once. It writes its pid and the facts about the GPUs to recorder.json, where
servers read them. Because it runs even if no master is connected, it also restarts supervisors that
were killed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.contract.node import GpuUse, Sample
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.shared.files.python_child import SAFE_FOLDER
from agents.state import Home, archive_path, identify, take_lock, write_json
from agents.supervisor.leases import Holder, find_uses, is_any_held
from agents.supervisor.ownership import OwnershipWatch
from agents.telemetry.gpu import GpuReader, open_gpus
from agents.telemetry.host import Host
from agents.telemetry.lease import LEASE_S, read_renewal
from agents.telemetry.ring import RingWriter

PERIOD_S = 1.0
"""Time between two samples, in seconds."""
LOCK_TIMEOUT_S = 3.0
"""Maximum wait for a recorder of another version to end, in seconds."""
_MAX_NAME = 80
"""Maximum length of a work's name in a sample, whose size is limited by the ring."""


def record(home: Home) -> int:
    """Sample until the lease expires; return at once if another recorder is running."""
    if os.fork():
        os._exit(0)
    # The recorder must outlive the server and its SSH session.
    os.setsid()
    lock = os.open(home.telemetry / "recorder.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # Held until this process ends; the kernel frees the lock even after a kill.
    if not take_lock(lock, LOCK_TIMEOUT_S):
        return 0
    # Removed: until it is written, the lock would seem to be that of the recorder in the old file.
    (home.telemetry / "recorder.json").unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gpus = open_gpus(lambda: load_nvml(home.path / "agents"))
    _introduce(home, gpus)
    ring = RingWriter(home.telemetry / "samples", len(gpus.read_facts()))
    _sample_on(home, gpus, ring)
    return 0


def _introduce(home: Home, gpus: GpuReader) -> None:
    identity = identify(os.getpid())
    facts = {
        "archive": archive_path(),
        "gpus": to_wire(gpus.read_facts()),
        "gpu_problem": gpus.problem,
        "mig_gpus": to_wire(tuple(gpus.mig)),
    }
    if identity is not None:
        write_json(home.telemetry / "recorder.json", {**identity.to_json(), **facts})


def _sample_on(home: Home, gpus: GpuReader, ring: RingWriter) -> None:
    host = Host(home.path)
    devices = ["cpu", *(gpu.uuid for gpu in gpus.read_facts())]
    ownership = OwnershipWatch(home)
    renewal, renewed_s = read_renewal(home), time.monotonic()
    due_s = time.monotonic()
    while True:
        # An error of the disk must not end the recorder.
        with contextlib.suppress(OSError):
            ring.append(take_sample(host, gpus, ring.next_seq, find_uses(home, devices)))
        ownership.look()
        now_s = time.monotonic()
        newest = read_renewal(home)
        # Compared, not subtracted: the file's time is of the wall clock, which may be set.
        if newest != renewal:
            renewal, renewed_s = newest, now_s
        elif now_s - renewed_s > LEASE_S:
            # Training without a master still needs a recorder, which restarts supervisors.
            if not is_any_held(home):
                return
            renewed_s = now_s
        if newest == 0.0 and not home.telemetry.exists():
            return  # the agent's home was deleted
        # No catching up after a pause: all samples would be of the same moment.
        due_s = max(due_s + PERIOD_S, now_s)
        time.sleep(max(0.0, due_s - now_s))


def load_nvml(cache: Path) -> Any:
    """Import pynvml.

    Compiling it from the archive would cost this process 17 MiB permanently. So its source is
    unpacked next to the archive once, compiled by another process, and imported from there.
    """
    archive = archive_path()
    if zipfile.is_zipfile(archive):
        folder = cache / f"{Path(archive).stem[:16]}.modules"
        with contextlib.suppress(OSError, KeyError, ExpectedError):
            _unpack_nvml(archive, folder)
            sys.path.insert(0, str(folder))
    return importlib.import_module("pynvml")


def _unpack_nvml(archive: str, folder: Path) -> None:
    source = folder / "pynvml.py"
    with zipfile.ZipFile(archive) as opened:
        data = opened.read("pynvml.py")
    # The comparison also replaces a file that a full disk cut.
    if source.exists() and source.read_bytes() == data:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    source.write_bytes(data)
    subprocess.run(
        [sys.executable, "-I", "-m", "py_compile", str(source)], cwd=SAFE_FOLDER, check=False
    )


def take_sample(
    host: Host, gpus: GpuReader, seq: int, uses: Mapping[str, Holder] | None = None
) -> Sample:
    """Read all sensors once; `uses` is the work of Rackless by device."""
    reading = host.sample()
    memory = reading.memory
    disk = reading.disk or (None, None)
    disk_rates = reading.disk_rates or (None, None)
    network_rates = reading.network_rates or (None, None)
    return Sample(
        time_s=time.time(),  # the wall clock, so that samples of all nodes share an axis
        seq=seq,
        gpus=gpus.sample(),
        cpu_utilisation=reading.cpu_utilisation,
        cpu_temperature_celsius=reading.cpu_temperature_celsius,
        cpu_power_w=reading.cpu_power_w,
        memory_used_bytes=memory.used_bytes if memory else None,
        memory_total_bytes=memory.total_bytes if memory else None,
        disk_used_bytes=disk[0],
        disk_total_bytes=disk[1],
        disk_read_bytes_per_s=disk_rates[0],
        disk_write_bytes_per_s=disk_rates[1],
        network_in_bytes_per_s=network_rates[0],
        network_out_bytes_per_s=network_rates[1],
        load=reading.load,
        uses=tuple(
            GpuUse(uuid=uuid, name=holder.name[:_MAX_NAME], run_id=holder.run_id)
            for uuid, holder in (uses or {}).items()
        ),
    )
