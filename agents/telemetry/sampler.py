"""Combine the readings of host and GPUs into one Sample."""

from __future__ import annotations

import time
from collections.abc import Mapping

from agents.contract.node import GpuUse, Sample
from agents.supervisor.leases import Holder
from agents.telemetry.gpu import GpuReader
from agents.telemetry.host import Host

_MAX_NAME = 80


def take_sample(
    host: Host, gpus: GpuReader, seq: int, uses: Mapping[str, Holder] | None = None
) -> Sample:
    """Read all sensors once; `uses` is the work of Rackless by device."""
    reading = host.sample()
    memory = reading.memory or (None, None)
    disk = reading.disk or (None, None)
    disk_rates = reading.disk_rates or (None, None)
    network_rates = reading.network_rates or (None, None)
    return Sample(
        time_s=time.time(),
        seq=seq,
        gpus=gpus.sample(),
        cpu_utilisation=reading.cpu_utilisation,
        cpu_temperature_celsius=reading.cpu_temperature_celsius,
        cpu_power_w=reading.cpu_power_w,
        memory_used_bytes=memory[0],
        memory_total_bytes=memory[1],
        disk_used_bytes=disk[0],
        disk_total_bytes=disk[1],
        disk_read_bytes_per_s=disk_rates[0],
        disk_write_bytes_per_s=disk_rates[1],
        network_in_bytes_per_s=network_rates[0],
        network_out_bytes_per_s=network_rates[1],
        load=reading.load,
        uses=tuple(
            GpuUse(uuid=uuid, name=one.name[:_MAX_NAME], run_id=one.run_id)
            for uuid, one in (uses or {}).items()
        ),
    )
