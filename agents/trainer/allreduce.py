"""One small all-reduce with a deadline: `agents.program agents.trainer.allreduce`, JSON on stdin.

Before the collective each rank signs in at the store, so that on a timeout the answer names the
ranks that are missing instead of only reporting a hang. Prints one line, `RACKLESS JSON`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from agents.contract.node import AllReduceProbe
from agents.contract.wire import from_wire
from agents.errors import ExpectedError
from agents.rendezvous.doors import close_doors
from agents.rendezvous.interfaces import choose_variables, listen_on
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
    # Without a teardown: threads of Gloo may still wait for a rank that never comes.
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
    store = open_rank_store(
        address=probe.master_address,
        port=probe.master_port,
        credential=probe.credential,
        is_first=probe.rank == 0,
        timeout_s=probe.timeout_s,
    )
    missing = gather(store, probe, deadline)
    if missing:
        return {"message": name_missing(probe, missing), "hint": "Check it: rackless check"}
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    group = dist.ProcessGroupGloo(store, probe.rank, probe.world_size, left)
    close_doors()
    values = torch.full((probe.num_values,), float(probe.rank + 1))
    group.allreduce([torch.zeros(1)]).wait()  # connects all pairs, which is not to be timed
    began_s = time.monotonic()
    group.allreduce([values]).wait()
    seconds = time.monotonic() - began_s
    # Rank r sends r + 1: a rank that was counted twice or not at all shows.
    expected = probe.world_size * (probe.world_size + 1) / 2
    sum_ok = bool((values == expected).all())
    leave(store, probe)
    return {"seconds": seconds, "num_values": probe.num_values, "sum_ok": sum_ok}


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
    """Return the message about ranks that are missing."""
    ranks = ", ".join(map(str, missing))
    # The master finds the ranks in these words; see app/provisioning/check_network.py.
    return (
        f"Rank {ranks} did not come to the all-reduce at {probe.master_address} port "
        f"{probe.master_port} within {probe.timeout_s:g} s."
    )


def describe_failure(probe: AllReduceProbe, reason: str) -> str:
    """Return the message about a collective that failed."""
    return (
        f"Rank {probe.rank} could not finish the all-reduce at {probe.master_address} port "
        f"{probe.master_port}: {reason}"
    )
