"""Device of this rank: choosing it, its memory, and errors when memory runs out."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agents.contract.parallel import find_mode
from agents.errors import ExpectedError
from agents.shared.cards import choose_precision

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def choose_backend(device: torch.device, parallel: str) -> str:
    """Return the backend of the collectives; the master names one if ranks share a GPU.

    Args:
        device: device of this rank.
        parallel: mode of the attempt.
    """
    if named := os.environ.get("RACKLESS_BACKEND", ""):
        return named
    # A pipeline uses Gloo. NCCL waits for a message in a kernel, and a stage starts to receive
    # before it computes the data that the sender needs for it. Anything that waits for the GPU in
    # between, such as the driver when it loads a kernel or frees memory, would wait forever.
    # Without a direct link between GPUs, messages pass through host memory with either backend.
    return "nccl" if device.type == "cuda" and find_mode(parallel).sends_over_nccl else "gloo"


def read_memory_bytes(device: torch.device, held_bytes: int = 0) -> int | None:
    """Return the peak of GPU memory, or the resident memory on a CPU; None if not known.

    Args:
        device: device of this rank.
        held_bytes: memory of CUDA graphs, which torch counts as allocated only during recording.
    """
    if device.type == "cuda":
        at_rest_bytes = torch.cuda.memory_allocated(device)
        return max(torch.cuda.max_memory_allocated(device), at_rest_bytes + held_bytes)
    try:
        with open("/proc/self/statm", "rb") as file:
            # The second field is the number of resident pages.
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def read_most_bytes(device: torch.device) -> float:
    """Return the bytes of its GPU that this process may hold, including those that it has."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    allowed_bytes = torch.cuda.get_per_process_memory_fraction(device) * total_bytes
    return min(allowed_bytes, free_bytes + torch.cuda.memory_reserved(device))


def read_reserved_bytes(device: torch.device) -> int | None:
    """Return the peak that torch took from the driver, including its cache; None on a CPU."""
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
            f"Memory ran out on {name_kind(device)}: the model with its trained parameters does "
            "not fit.",
            SAVE_MEMORY_HINT[0].upper() + SAVE_MEMORY_HINT[1:],
        ) from error


def name_kind(device: torch.device) -> str:
    """Return `the GPU` or `the CPU`; torch's own number means another card than the node's."""
    return "the GPU" if device.type == "cuda" else "the CPU"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Failed allocations of the CPU and of CUDA libraries other than torch have no class.
    text = str(error)
    return "can't allocate memory" in text or "CUDA out of memory" in text


def choose_device(name: str) -> torch.device:
    """Return the device of this name, and make it the current one.

    Raises:
        ExpectedError: torch does not see it.
    """
    if not name.startswith("cuda"):
        return torch.device("cpu")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        # The supervisor shows a rank its own card only, by UUID.
        card = os.environ.get("CUDA_VISIBLE_DEVICES") or name
        raise ExpectedError(
            f"torch {torch.__version__} does not see {card} (it sees {count} GPUs).",
            "Check nvidia-smi on that PC and that torch was built for its CUDA version",
        )
    # Triton and bitsandbytes launch kernels on the current device, not on that of a tensor.
    torch.cuda.set_device(device)
    return device


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the type in which the base model computes on this device; also that of calibrations.

    Args:
        precision: value of the run file.
        device: device of the rank.
    """
    is_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if is_gpu else None
    return _DTYPES[choose_precision(capability) if precision == "auto" else precision]


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Compute on a separate stream inside the block: CUDA cannot record the default stream."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)  # loading used the default stream
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    torch.cuda.synchronize(device)


def limit_memory(device: torch.device, most_gib: float | None) -> None:
    """Limit the GPU memory of this process to `most_gib` GiB; None for no limit."""
    if device.type != "cuda":
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    # Under WSL2 the limit is the free memory in any case: the Windows driver hands out more than
    # there is and pages it to host memory, which silently makes training many times slower.
    spills = "microsoft" in platform.release().lower()
    most_bytes = float(free_bytes if spills else total_bytes)
    if most_gib is not None:
        most_bytes = min(most_bytes, most_gib * 2**30)
    if most_bytes < total_bytes:
        torch.cuda.set_per_process_memory_fraction(most_bytes / total_bytes, device)
