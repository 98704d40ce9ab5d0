"""Input of the memory forecast: properties of the GPU and the trainer's setting there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agents.contract.spec import RunSpec
from agents.shared.cards import choose_precision

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
COMPILED_CAPABILITY = (7, 0)
"""Minimum compute capability for compiled layers: Triton's."""
# Memory that torch does not count: kernels and libraries, and the driver's part for each
# multiprocessor. Their sum was 0.75 to 0.85 GiB on an H200 (132 multiprocessors). The division into
# the two parts, and so the figure for smaller cards, is assumed until a node measures its own.
_LOADED_BYTES, _PROCESSOR_BYTES = 330 << 20, 3750 << 10
# Compiled kernels and attention, loaded by a run but not by a calibration; assumed, not measured.
_COMPILED_BYTES = 128 << 20
# Memory that the driver reserves, in bytes and as a share of the card's: total capacities in
# torch's messages are 5.79 of 6 GiB, 9.78 of 10 (RTX 3080), 11.75 of 12 (3060), 23.70 of 24 (3090)
# and 23.64 of 23.99 (4090). An H200 keeps 0.60 GiB, the upper bound here.
_RESERVED_BYTES, _RESERVED_SHARE, _MOST_RESERVED_BYTES = 174 << 20, 0.0065, 630 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySetting:
    """Setting that the trainer's search chooses for a GPU and reports."""

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
    """Memory that programs can use, without the driver's reserve, in bytes."""
    desktop_bytes: int = 0
    """Memory that other programs, such as the desktop, hold before a run starts, in bytes."""
    cap_bytes: int | None = None
    """Maximum memory of the run, in bytes; None: all free memory."""
    capability: tuple[int, int] = (8, 6)
    """CUDA compute capability, which decides the data type and the attention kernels."""
    num_multiprocessors: int = 60
    """Number of multiprocessors; scratch of attention's exact backward pass grows with it."""
    context_bytes: int = _LOADED_BYTES + 60 * _PROCESSOR_BYTES
    """CUDA context and kernels of one process, which torch does not count, in bytes."""
    has_compiler: bool = True
    """True if its node has the C compiler that Triton needs."""
    pieces_grow: bool = True
    """True if torch can use expandable segments; False under WSL2 and Windows, where more memory
    is lost to fragmentation."""

    @property
    def room_bytes(self) -> int:
        """Memory of the card that may be in use, other programs included, in bytes."""
        if self.cap_bytes is None:
            return self.total_bytes
        # The cap limits what torch allocates; context and other programs come on top.
        return min(self.total_bytes, self.cap_bytes + self.context_bytes + self.desktop_bytes)


def guess_context(num_multiprocessors: int, measured_bytes: int | None = None) -> int:
    """Return the GPU memory of a training process beyond torch's, in bytes.

    Args:
        num_multiprocessors: number on the card, used if nothing was measured.
        measured_bytes: bytes that a calibration of this card measured.

    >>> round(guess_context(132) / 2**30, 2), round(guess_context(46) / 2**30, 2)
    (0.79, 0.49)
    """
    if measured_bytes is not None:
        return measured_bytes + _COMPILED_BYTES
    return _LOADED_BYTES + num_multiprocessors * _PROCESSOR_BYTES


def guess_reserved(memory_bytes: int) -> int:
    """Return the bytes that the driver of a GPU with this memory reserves.

    >>> [round(guess_reserved(gib * 2**30) / 2**30, 2) for gib in (12, 24, 141)]
    [0.25, 0.33, 0.62]
    """
    return min(int(_RESERVED_BYTES + _RESERVED_SHARE * memory_bytes), _MOST_RESERVED_BYTES)


def choose_dtype(spec: RunSpec, gpu: GpuMemory) -> Dtype:
    """Return the data type of the base model on this GPU, as the trainer chooses it."""
    if spec.precision != "auto":
        return spec.precision
    return choose_precision(gpu.capability)


def has_kernels(gpu: GpuMemory) -> bool:
    """Return whether Triton can compile kernels for this GPU."""
    # The same rule as agents/trainer/kernels/compiling.py applies on the node.
    return gpu.has_compiler and gpu.capability >= COMPILED_CAPABILITY


def is_compiled(spec: RunSpec, gpu: GpuMemory) -> bool:
    """Return whether the trainer compiles the layers on this GPU."""
    return spec.compile == "auto" and has_kernels(gpu)


def choose_width(spec: RunSpec, gpu: GpuMemory) -> int:
    """Return the bytes of one value of the base model on this GPU."""
    return DTYPE_BYTES[choose_dtype(spec, gpu)]
