"""torch's process group: made, interrupted while a thread waits in it, and taken apart.

A rank that survives a loss has to get out of the sums that it waits for, and it has to let the
others out: those do not see the rank that was lost, but one that has seen it. Gloo has no call for
that, but its waits end when their connections do. NCCL aborts its communicator, which ends the
kernels that wait on the GPU.
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
"""Seconds until a collective gives up, the last resort: the supervisor acts on a silent rank long
before."""


def connect(
    backend: str, device: torch.device, store: dist.Store, rank: int, world_size: int
) -> None:
    """Make the process group; returns when all ranks are connected.

    Raises:
        RuntimeError: they could not connect.
        ValueError: the backend is not available.
    """
    # Its monitor asks the store every second, from a thread that would need the interpreter for
    # it, to find ranks that hang; here the supervisor does that.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # After an error the communicator is aborted, and this process stays to save what it holds;
    # see `Group.require_whole`.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    # Its record of collectives is not read by anyone, but its watch waits four times this long for
    # it after an error, and the abort waits for the watch: a minute unless it is set.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "50")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        # Connects NCCL now, so that a failure is not one of the first sum.
        device_id=device if backend == "nccl" else None,
    )
    if backend == "gloo":
        close_doors()  # all of its connections exist now


def find_failure() -> str:
    """Return what NCCL reports of a sum that it gave up; empty: nothing."""
    if not _uses_nccl():
        return ""
    error = _nccl().get_error()
    return "" if error == ErrorType.SUCCESS else f"NCCL reports {error.name}"


def interrupt() -> None:
    """End all sums with an error, also those that another thread waits for."""
    if _uses_nccl():
        _nccl().abort()
    else:
        _end_connections()


def disconnect(*, is_interrupted: bool) -> None:
    """Destroy the process group, if there is one."""
    if not dist.is_initialized():
        return
    if is_interrupted and _uses_nccl():
        # Destroying it would wait for sums that never end.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _end_connections() -> None:
    for connection in copy_sockets(listening=False):
        with connection, contextlib.suppress(OSError):  # the other end was faster
            connection.shutdown(socket.SHUT_RDWR)


def _uses_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"


def _nccl() -> dist.Backend:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
