"""Describe what containers, slices and logins leave a node of its PC, and where to raise it."""

from __future__ import annotations

from agents.contract.node import LimitKind, NodeFacts, ResourceLimit
from app.text import DASH, count_of, show_bytes


def find_limit(facts: NodeFacts, kind: LimitKind) -> ResourceLimit | None:
    """Return the limit of a kind; None: the node has all that its PC has."""
    return next((limit for limit in facts.limits if limit.kind == kind), None)


def show_memory(facts: NodeFacts) -> str:
    """Return the memory of a node, with the limit that makes it smaller than the PC's.

    >>> limit = ResourceLimit(kind="memory", amount=2 << 30, place="/sys/fs/cgroup/memory.max")
    >>> facts = NodeFacts(hostname="a", os="", kernel="", python="", architecture="",
    ...     memory_bytes=2 << 30, pc_memory_bytes=8 << 30, limits=(limit,))
    >>> show_memory(facts)
    '2.0 GiB of the 8.0 GiB of its PC (limit: /sys/fs/cgroup/memory.max)'
    """
    shown, limit = show_bytes(facts.memory_bytes), find_limit(facts, "memory")
    if limit is None:
        return shown
    return f"{shown} of the {show_bytes(facts.pc_memory_bytes)} of its PC (limit: {limit.place})"


def show_cores(facts: NodeFacts) -> str:
    """Return the cores of a node, with the limit that makes them fewer than the PC's.

    >>> limit = ResourceLimit(kind="cpus", amount=1.5, place="/sys/fs/cgroup/cpu.max")
    >>> facts = NodeFacts(hostname="a", os="", kernel="", python="", architecture="",
    ...     num_cores=1, pc_num_cores=16, limits=(limit,))
    >>> show_cores(facts)
    '1 core of the 16 of its PC (limit: 1.5 by /sys/fs/cgroup/cpu.max)'
    """
    shown = count_of(facts.num_cores, "core") if facts.num_cores else f"{DASH} cores"
    limit = find_limit(facts, "cpus")
    if limit is None:
        return shown
    whole = facts.pc_num_cores or DASH
    return f"{shown} of the {whole} of its PC (limit: {limit.amount:g} by {limit.place})"


def say_raise(limit: ResourceLimit) -> str:
    """Return how to raise a limit, as an imperative without a full stop."""
    # Files of control groups are written by what made the group: a restart would reset them.
    if limit.place.startswith("/"):
        return (
            f"Raise the limit of that container or slice where it was set up (docker run, "
            f"pct set, systemctl set-property); Linux shows it in {limit.place}"
        )
    return f"Raise it in /etc/security/limits.conf, ~/.bashrc or ~/.profile there ({limit.place})"
