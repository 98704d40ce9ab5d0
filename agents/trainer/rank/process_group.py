"""torch's process group: created, interrupted while a thread waits in it, and destroyed.

A rank that survives a loss has to leave the sums that it waits for, and to release the other ranks,
which see this rank but may not see the lost one. Gloo has no call for that, but its waits end with
their connections. NCCL aborts its communicator, which ends the kernels that wait on the GPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ErrorType

from agents.rendezvous.doors import close_doors
from agents.rendezvous.own_sockets import copy_sockets

COLLECTIVE_TIMEOUT_S = 1800.0
"""Time until a collective gives up, in seconds; a last resort, since the supervisor acts on a
silent rank long before.
"""


def connect(
    backend: str, device: torch.device, store: dist.Store, rank: int, world_size: int
) -> None:
    """Create the process group; return when all ranks are connected.

    Raises:
        RuntimeError: they could not connect.
        ValueError: the backend is not available.
    """
    # NCCL's monitor polls the store every second to find hanging ranks, from a thread that needs
    # the interpreter for it. Here the supervisor does that.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # After an error the communicator is aborted, but this process stays to save its state; see
    # `Group.require_whole`.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    # No process reads its record of collectives, but its watchdog waits for the record four times
    # this long after an error, and the abort waits for the watchdog: a minute by default.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "50")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        # Connects NCCL now, so that a failure is not reported by the first sum.
        device_id=device if backend == "nccl" else None,
    )
    if backend == "gloo":
        close_doors()  # all of its connections exist by now


def find_failure() -> str:
    """Return NCCL's error of an aborted sum; empty if none."""
    if not _uses_nccl():
        return ""
    error = _nccl().get_error()
    return "" if error == ErrorType.SUCCESS else f"NCCL reports {error.name}"


def interrupt() -> None:
    """End all sums with an error, including those that another thread waits for."""
    if _uses_nccl():
        _nccl().abort()
        return
    for connection in copy_sockets(listening=False):
        with connection, contextlib.suppress(OSError):  # the peer closed it first
            connection.shutdown(socket.SHUT_RDWR)


def disconnect(*, is_interrupted: bool) -> None:
    """Destroy the process group, if it exists."""
    if not dist.is_initialized():
        return
    if is_interrupted and _uses_nccl():
        # Destroying it would wait for sums that never end.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _uses_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"


def _nccl() -> dist.Backend:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
