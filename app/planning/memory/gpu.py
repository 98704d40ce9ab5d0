"""Input of the memory forecast: the GPU, and how the trainer divides its work there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.contract.spec import RunSpec

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
# CUDA context of one process with kernels and libraries, in bytes; an estimate, not measured yet.
_CONTEXT_BYTES = 520 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySetting:
    """What the trainer's search chooses for a GPU, and reports."""

    micro_tokens: int
    """Maximum number of tokens in a micro-batch, which holds at least one sequence."""
    num_recomputed: int = 0
    """Number of layers that recompute their activations."""
    num_moved: int = 0
    """Number of layers whose activations are offloaded to host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Properties of a GPU that decide how much memory a rank needs."""

    total_bytes: int
    desktop_bytes: int = 0
    """Memory that other programs hold before a run starts: the desktop, browsers."""
    cap_bytes: int | None = None
    """Maximum memory of the run; None: all that is free."""
    capability: tuple[int, int] = (8, 6)
    """CUDA compute capability, which decides the data type and the attention kernels."""
    num_multiprocessors: int = 60
    """Number of multiprocessors: attention's exact backward pass needs more scratch with more."""
    context_bytes: int = _CONTEXT_BYTES
    """CUDA context and kernels of one process, which torch does not count."""
    pieces_grow: bool = True
    """Whether torch can use expandable segments; not under WSL2 and Windows, where more memory is
    lost to fragmentation."""

    @property
    def room_bytes(self) -> int:
        """Memory of the card that may be in use, other programs included, in bytes."""
        if self.cap_bytes is None:
            return self.total_bytes
        return min(self.total_bytes, self.cap_bytes + self.context_bytes + self.desktop_bytes)


def choose_dtype(spec: RunSpec, gpu: GpuMemory) -> Dtype:
    """Return the data type of the base model on this GPU, as the trainer chooses it."""
    if spec.precision != "auto":
        return spec.precision
    return "bf16" if gpu.capability >= (8, 0) else "fp16"


def choose_width(spec: RunSpec, gpu: GpuMemory) -> int:
    """Return the bytes of one value in that data type."""
    return DTYPE_BYTES[choose_dtype(spec, gpu)]
