"""Choose the GPU of a node that makes an export. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.node import GpuFacts, NodeFacts
from app.text import show_list


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportDevice:
    """Device that makes an export."""

    gpu: GpuFacts | None
    """GPU that makes it; None: the CPU."""
    note: str = ""
    """Reason for using the CPU of a PC with GPUs, if so."""

    @property
    def device(self) -> str:
        """Device name in torch on the node."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu.index}"

    @property
    def device_id(self) -> str:
        """Id by which the node leases the device."""
        return "cpu" if self.gpu is None else self.gpu.uuid


def choose_export_device(facts: NodeFacts) -> ExportDevice:
    """Return the GPU with the most memory that no run uses, else the CPU."""
    # Other uses, such as a chat, end soon, and the node lets the export wait for them.
    runs = {use.uuid: use.name for use in facts.gpu_uses if use.run_id is not None}
    free = [gpu for gpu in facts.gpus if gpu.uuid not in runs]
    if free:
        return ExportDevice(gpu=max(free, key=lambda gpu: (gpu.memory_bytes or 0, -gpu.index)))
    if not facts.gpus:
        return ExportDevice(gpu=None)
    names = sorted(set(runs.values()))
    who = f"{show_list(names)} {'uses' if len(names) == 1 else 'use'}"
    what = "its GPU" if len(facts.gpus) == 1 else "its GPUs"
    return ExportDevice(gpu=None, note=f"{who} {what}, so its CPU does the work")
