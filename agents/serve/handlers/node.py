"""Handlers of requests for the facts of this node, and for the newest logs of all runs."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from agents.contract.names import is_safe_name
from agents.contract.node import GpuUse, LogTail, NodeFacts, NodeLogs
from agents.contract.requests.node import ReadFacts, ReadLogs
from agents.contract.run_layout import ATTEMPTS, LOG_SUFFIX, attempt_of_folder
from agents.node.environment import read_adopted
from agents.node.facts import read_facts as read_node_facts
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.supervisor.leases import find_holder

MOST_LOGS = 6
TAIL_BYTES = 16 << 10
"""Size of the tail of each log, in bytes; all tails together fit into one message."""


@handles(ReadFacts)
def read_facts(call: Call, request: ReadFacts) -> NodeFacts:
    """Return the node's facts, its training environment, and the work on each device."""
    facts = read_node_facts(call.home)
    # A node without a GPU trains on its CPU, which has a lease, too.
    devices = [gpu.uuid for gpu in facts.gpus] or ["cpu"]
    holders = {device: find_holder(call.home, device) for device in devices}
    return replace(
        facts,
        environment=read_adopted(call.home),
        gpu_uses=tuple(
            GpuUse(uuid=uuid, name=found.name, run_id=found.run_id)
            for uuid, found in holders.items()
            if found is not None
        ),
    )


@handles(ReadLogs)
def read_tails(call: Call, request: ReadLogs) -> NodeLogs:
    """Return the ends of the newest logs that are not empty."""
    found: list[tuple[float, Path]] = []
    for path in call.home.runs.glob(f"*/{ATTEMPTS}/*/*{LOG_SUFFIX}"):
        # A run that is being deleted has a hidden name.
        if not (is_safe_name(path.parents[2].name) and is_safe_name(path.name)):
            continue
        with contextlib.suppress(OSError):  # it may be deleted at the same time
            status = path.stat()
            if status.st_size:
                found.append((status.st_mtime, path))
    newest = sorted(found, reverse=True)[:MOST_LOGS]
    return NodeLogs(tails=tuple(_read_tail(path, written_s) for written_s, path in newest))


def _read_tail(path: Path, written_s: float) -> LogTail:
    data, size_bytes = b"", 0
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    if size_bytes > TAIL_BYTES:
        # The first line is cut off, so drop it, unless the whole tail is one line.
        data = data.partition(b"\n")[2] or data
    attempt = attempt_of_folder(path.parent.name)
    return LogTail(
        run_id=path.parents[2].name,
        attempt=attempt or 0,
        name=path.name,
        size_bytes=size_bytes,
        written_s=written_s,
        text=data.decode("utf-8", "replace"),
    )
