"""One small all-reduce with a deadline: `agents.program agents.trainer.allreduce`, JSON on stdin.

Before the collective each rank signs in at the store, so that after a timeout the answer names the
missing ranks instead of only reporting a hang. Prints one line, `RACKLESS JSON`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from agents.contract.node import TorchFacts
from agents.contract.requests.probes import AllReduceProbe
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.rendezvous.client import StoreError
from agents.rendezvous.doors import close_doors
from agents.rendezvous.interfaces import choose_variables, listen_on
from agents.trainer.rank import process_group
from agents.trainer.rank.store import open_rank_store


def main(argv: list[str]) -> NoReturn:
    """Take part in the all-reduce and print the result."""
    del argv
    probe = from_wire(AllReduceProbe, json.load(sys.stdin), "probe")
    try:
        answer = reduce_once(probe)
    except ExpectedError as error:
        answer = {"message": error.message, "hint": error.hint}
    except (RuntimeError, ValueError, OSError) as error:
        answer = {"message": describe_failure(probe, str(error).split("\n")[0])}
    print("RACKLESS " + json.dumps(answer), flush=True)
    # Without a teardown: threads of Gloo may still wait for a rank that never joins.
    sys.stdout.flush()
    os._exit(1 if "message" in answer else 0)


def reduce_once(probe: AllReduceProbe) -> dict[str, Any]:
    """Sum `num_values` values over all ranks and check the sum.

    Raises:
        RuntimeError: a rank lost its connection during the sum.
    """
    deadline = time.monotonic() + probe.timeout_s
    os.environ.update(
        listen_on(probe.interface)
        if probe.interface
        else choose_variables(probe.master_address, probe.rank == 0)
    )
    try:
        store = open_rank_store(
            address=probe.master_address,
            port=probe.master_port,
            credential=probe.credential,
            is_first=probe.rank == 0,
            timeout_s=probe.timeout_s,
        )
    except StoreError as error:
        if probe.rank == 0:
            raise
        # Rank 0 hosts the store: if it cannot be reached, that rank is silent or cut off.
        message = f"{name_missing(probe, [0])} Its store: {error}"
        return {"message": message, "hint": "Check it: rackless check"}
    missing = gather(store, probe, deadline)
    if missing:
        return {"message": name_missing(probe, missing), "hint": "Check it: rackless check"}
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    group = dist.ProcessGroupGloo(store, probe.rank, probe.world_size, left)
    close_doors()
    values = torch.full((probe.num_values,), float(probe.rank + 1))
    group.allreduce([torch.zeros(1)]).wait()  # connects all pairs before the timing
    began_s = time.monotonic()
    group.allreduce([values]).wait()
    seconds = time.monotonic() - began_s
    answer = {
        "seconds": seconds,
        "num_values": probe.num_values,
        "sum_ok": is_sum(values, probe.world_size),
        "torch": to_wire(describe_torch()),
    }
    if probe.with_nccl:
        answer |= reduce_with_nccl(store, probe, answer, deadline)
    leave(store, probe)
    return answer


def is_sum(values: torch.Tensor, world_size: int) -> bool:
    """Return whether each value is the sum over the ranks, where rank r sent r + 1.

    Different values per rank reveal a rank that was counted twice or not counted.
    """
    return bool((values == world_size * (world_size + 1) / 2).all())


def describe_torch() -> TorchFacts:
    """Return the versions of torch, CUDA and NCCL, and the cards that this build supports."""
    has_nccl = dist.is_nccl_available()
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        architectures=tuple(torch.cuda.get_arch_list()),
        num_gpus=torch.cuda.device_count(),
    )


def reduce_with_nccl(
    store: dist.Store, probe: AllReduceProbe, answer: dict[str, Any], deadline: float
) -> dict[str, Any]:
    """Sum the values on the first GPU of each rank; return the duration, or why it failed.

    NCCL may wait forever, so a timer prints `answer` at the deadline and ends the process.
    """

    def give_up() -> None:
        problem = f"NCCL did not finish its all-reduce within {probe.timeout_s:g} s"
        print("RACKLESS " + json.dumps({**answer, "nccl_problem": problem}), flush=True)
        os._exit(0)

    timer = threading.Timer(max(1.0, deadline - time.monotonic()), give_up)
    timer.daemon = True
    timer.start()
    device = torch.device("cuda", 0)
    try:
        ranks = dist.PrefixStore("nccl", store)
        process_group.connect("nccl", device, ranks, probe.rank, probe.world_size)
        dist.all_reduce(torch.zeros(1, device=device))  # connects before the timing
        values = torch.full((probe.num_values,), float(probe.rank + 1), device=device)
        torch.cuda.synchronize(device)
        began_s = time.monotonic()
        dist.all_reduce(values)
        torch.cuda.synchronize(device)
        seconds = time.monotonic() - began_s
    except (RuntimeError, ValueError) as error:
        return {"nccl_problem": str(error).split("\n")[0][:1000]}
    finally:
        timer.cancel()
    if not is_sum(values, probe.world_size):
        return {"nccl_problem": "the sum from NCCL is wrong"}
    return {"nccl_seconds": seconds}


def gather(store: dist.Store, probe: AllReduceProbe, deadline: float) -> list[int]:
    """Sign in and wait for the others; return the ranks that are missing at the deadline."""
    store.set(f"here/{probe.rank}", b"1")
    missing = list(range(probe.world_size))
    while True:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(0.02)


def leave(store: dist.Store, probe: AllReduceProbe) -> None:
    """Sign out; rank 0, which hosts the store, waits for all others."""
    store.set(f"gone/{probe.rank}", b"1")
    if probe.rank == 0:
        store.wait([f"gone/{rank}" for rank in range(probe.world_size)], timedelta(seconds=10))


def name_missing(probe: AllReduceProbe, missing: list[int]) -> str:
    """Return the message about missing ranks."""
    ranks = ", ".join(map(str, missing))
    # The master parses the ranks in this message; see app/provisioning/checks/reduce.py.
    return (
        f"Rank {ranks} did not come to the all-reduce at {probe.master_address} port "
        f"{probe.master_port} within {probe.timeout_s:g} s."
    )


def describe_failure(probe: AllReduceProbe, reason: str) -> str:
    """Return the message about a failed collective."""
    return (
        f"Rank {probe.rank} could not finish the all-reduce at {probe.master_address} port "
        f"{probe.master_port}: {reason}"
    )
