"""The device of this rank: choosing it, its memory, and what to do when that runs out."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agents.contract.parallel import find_mode
from agents.errors import ExpectedError


def choose_backend(device: torch.device, parallel: str) -> str:
    """Return the backend of the collectives; the master names one where ranks share a GPU.

    A pipeline uses Gloo. NCCL waits for a message in a kernel on the GPU, and a stage begins to
    receive before it computes what the sender needs for it: whatever waits for the GPU meanwhile,
    such as the driver when it loads a kernel or takes memory back, would wait for good. Its
    messages take the way through host memory in either case, unless GPUs are connected directly.

    Args:
        device: of this rank.
        parallel: way that the attempt trains.
    """
    if named := os.environ.get("RACKLESS_BACKEND", ""):
        return named
    return "nccl" if device.type == "cuda" and find_mode(parallel).sends_over_nccl else "gloo"


def read_memory_bytes(device: torch.device, held_bytes: int = 0) -> int | None:
    """Return the peak of GPU memory, or the resident memory on a CPU; None: not known.

    Args:
        device: of this rank.
        held_bytes: memory of a CUDA graph, which torch counts as allocated only during recording.
    """
    if device.type == "cuda":
        at_rest_bytes = torch.cuda.memory_allocated(device)
        return max(torch.cuda.max_memory_allocated(device), at_rest_bytes + held_bytes)
    try:
        with open("/proc/self/statm", "rb") as file:
            # The second field: resident pages.
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def read_most_bytes(device: torch.device) -> float:
    """Return how many bytes of its GPU this process may hold, those that it has included."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    allowed_bytes = torch.cuda.get_per_process_memory_fraction(device) * total_bytes
    return min(allowed_bytes, free_bytes + torch.cuda.memory_reserved(device))


def read_reserved_bytes(device: torch.device) -> int | None:
    """Return the peak that torch took from the driver, cached memory included; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


SAVE_MEMORY_HINT = (
    "use adapter: {kind: qlora} or a lower adapter.rank, close other programs on that PC, or leave "
    "that node out"
)


@contextmanager
def explain_out_of_memory(device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into one that a user can act on.

    For code that cannot repeat its work in smaller pieces.

    Raises:
        ExpectedError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ExpectedError(
            f"Memory ran out on {device}: the model with its trained parameters does not fit.",
            SAVE_MEMORY_HINT[0].upper() + SAVE_MEMORY_HINT[1:],
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Allocations of the CPU, and those of CUDA libraries beside torch, have no class of their own.
    text = str(error)
    return "can't allocate memory" in text or "CUDA out of memory" in text


def choose_device(name: str) -> torch.device:
    """Return the device with this name, and make it the current one.

    Raises:
        ExpectedError: torch does not see it.
    """
    if not name.startswith("cuda"):
        return torch.device("cpu")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        raise ExpectedError(
            f"torch {torch.__version__} does not see {name} (it sees {count} GPUs).",
            "Check nvidia-smi on that PC and that torch was built for its CUDA version",
        )
    # Triton and bitsandbytes launch kernels on the current device, not on that of a tensor.
    torch.cuda.set_device(device)
    return device


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Compute on a stream of one's own inside the block: CUDA records no default stream."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)  # loading used the default stream
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    torch.cuda.synchronize(device)


def limit_memory(device: torch.device, most_gib: float | None) -> None:
    """Limit the memory that this process takes of its GPU to this many GiB; None: no limit.

    Under WSL2 it is limited to what is free in any case: the driver of Windows hands out more than
    there is and pages it to host memory, which silently makes training many times slower.
    """
    if device.type != "cuda":
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    spills = "microsoft" in platform.release().lower()
    most_bytes = float(free_bytes if spills else total_bytes)
    if most_gib is not None:
        most_bytes = min(most_bytes, most_gib * 2**30)
    if most_bytes < total_bytes:
        torch.cuda.set_per_process_memory_fraction(most_bytes / total_bytes, device)
