"""What a forecast of memory starts from: the GPU, and how the trainer divides its work there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.contract.spec import RunSpec

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_CONTEXT_BYTES = 520 << 20
"""Of the driver, the kernels and the libraries for one process; not measured yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySetting:
    """What the trainer chooses for a GPU, and reports."""

    micro_tokens: int
    """At most so many tokens at once, but one sequence at least."""
    num_recomputed: int = 0
    """Layers that compute their activations a second time."""
    num_moved: int = 0
    """Layers whose activations wait in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """What the forecast knows of a GPU."""

    total_bytes: int
    desktop_bytes: int = 0
    """Taken by others before a run starts, as measured: the desktop, browsers."""
    cap_bytes: int | None = None
    """Most that a run may take; None: all that is free."""
    capability: tuple[int, int] = (8, 6)
    """CUDA compute capability; it decides the arithmetic and the kernels of attention."""
    num_multiprocessors: int = 60
    """Attention's exact backward pass keeps more parts apart on cards that have more of them."""
    context_bytes: int = _CONTEXT_BYTES
    """Of the driver and the kernels for one process, outside of torch's own count."""
    pieces_grow: bool = True
    """Whether torch can take memory in pieces that grow; not under WSL2 and Windows, where more of
    it lies between tensors."""

    @property
    def room_bytes(self) -> int:
        """What may be in use of the card, with what others hold."""
        if self.cap_bytes is None:
            return self.total_bytes
        return min(self.total_bytes, self.cap_bytes + self.context_bytes + self.desktop_bytes)


def choose_dtype(spec: RunSpec, gpu: GpuMemory) -> Dtype:
    """Return the arithmetic of the base model on this GPU, as the trainer chooses it."""
    if spec.precision != "auto":
        return spec.precision
    return "bf16" if gpu.capability >= (8, 0) else "fp16"


def choose_width(spec: RunSpec, gpu: GpuMemory) -> int:
    """Return the bytes of one number in that arithmetic."""
    return DTYPE_BYTES[choose_dtype(spec, gpu)]
