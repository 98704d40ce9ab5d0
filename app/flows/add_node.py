"""Add a PC: the questions, the problems of an answer, the address, and the hardware found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from agents.contract.node import NodeFacts
from app.errors import UsageError
from app.events import NodeSnapshot
from app.nodes.discovery.candidate import name_overlay, warn_of_overlay
from app.nodes.node import (
    LocalAddress,
    NodeAddress,
    SshTarget,
    WslAddress,
    check_node_name,
    parse_ssh_target,
)
from app.planning.hardware.mig import describe_mig
from app.presentation.limit_text import show_cores, show_memory
from app.text import DASH, capitalize, show_bytes

Way = Literal["ssh", "local", "wsl"]
LITTLE_DISK_BYTES = 30 * 1024**3
"""Minimum free disk without a warning: CUDA's environment (about 10 GiB) and a model fit."""
SLOW_MBIT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAnswers:
    way: Way = "ssh"
    target: str = ""
    """`user@host`, or `user@host:port` if the port is not 22."""
    key: str = ""
    """Private key file; empty: the SSH agent's keys, then the default files."""
    distro: str = ""
    """Name of the WSL distro, for transport `wsl`."""
    name: str = ""
    """Node name; empty: the suggested one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReview:
    name: str
    """Name that the node would get."""
    address: NodeAddress | SshTarget | None
    """Address, over SSH what ~/.ssh/config has still to explain; None while there is a problem."""
    problems: dict[str, str]
    """Field -> its problem."""


def review(answers: NodeAnswers, taken: Sequence[str]) -> NodeReview:
    """Check the answers; `taken` are the names in use."""
    problems: dict[str, str] = {}
    address: NodeAddress | SshTarget | None = LocalAddress()
    host = "this-pc"
    if answers.way == "wsl":
        try:
            address = WslAddress(distro=answers.distro)
        except UsageError as error:
            address = None
            problems["distro"] = (
                "This PC has no WSL distro yet. In a terminal, run: wsl --install -d Ubuntu-24.04"
                if not answers.distro
                else _sentence(error)
            )
    elif answers.way == "ssh":
        try:
            ssh = parse_ssh_target(answers.target)
            address, host = ssh, ssh.host
        except UsageError as error:
            address, host = None, "node"
            problems["target"] = _sentence(error)
    name = answers.name.strip() or suggest_name(host, taken)
    problem = _name_problem(name, taken)
    if problem:
        problems["name"] = problem
    return NodeReview(name=name, address=None if problems else address, problems=problems)


def suggest_name(host: str, taken: Sequence[str]) -> str:
    """Return a free name: the first part of a host name, `node-1` for a bare address."""
    # IPv4 or IPv6: the first part of an address is no name.
    is_literal = re.fullmatch(r"[0-9.]+|.*:.*", host) is not None
    first = "" if is_literal else re.sub(r"[^a-z0-9-]", "", host.split(".")[0].lower()).strip("-")
    if first and first != "node" and first not in taken:
        return first
    first, number = first or "node", 1
    while f"{first}-{number}" in taken:
        number += 1
    return f"{first}-{number}"


def _name_problem(name: str, taken: Sequence[str]) -> str:
    if name in taken:
        return f"A node named {name} already exists."
    try:
        check_node_name(name)
    except UsageError as error:
        return _sentence(error)
    return ""


def _sentence(error: UsageError) -> str:
    return f"{capitalize(error.message)}. {error.hint}."


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundNode:
    """Hardware of a PC, shown after it was added."""

    rows: tuple[tuple[str, str], ...]
    """(name, value)."""
    notes: tuple[str, ...]
    """Causes of slow or failing training, with remedies."""
    is_ready: bool
    """True if the training environment is in place."""


def describe_found(node: NodeSnapshot) -> FoundNode:
    """Describe the hardware of a node that answers.

    >>> describe_found(NodeSnapshot(name="a", transport="ssh", address="a", state="online")).notes
    ('Connected. Its hardware is not known yet.',)
    """
    facts = node.facts
    if facts is None:
        waiting = "Connected. Its hardware is not known yet."
        return FoundNode(rows=(), notes=(waiting,), is_ready=False)
    gpus = [f"{gpu.name}, {show_bytes(gpu.memory_bytes)}" for gpu in facts.gpus]
    drivers = sorted({gpu.driver for gpu in facts.gpus if gpu.driver})
    cores = f", {show_cores(facts)}" if facts.num_cores else ""
    rows = [
        ("GPU" if len(gpus) == 1 else "GPUs", "\n".join(gpus) or "none"),
        ("Driver", ", ".join(drivers) or DASH),
        ("CPU", f"{facts.cpu or DASH}{cores}"),
        ("Memory", show_memory(facts)),
        ("Disk", f"{show_bytes(facts.disk_free_bytes)} free of {show_bytes(facts.disk_bytes)}"),
        ("System", f"{facts.os}, Python {facts.python}"),
    ]
    report = facts.environment
    # An environment may exist and still not fit the lock file.
    is_ready = report is not None and report.fits
    return FoundNode(rows=tuple(rows), notes=tuple(_notes(facts)), is_ready=is_ready)


def find_overlay(facts: NodeFacts) -> str:
    """Return the virtual network, such as Tailscale, over which a node is reached; "": none."""
    devices = {one.address: one.name for one in facts.interfaces}
    return name_overlay(facts.address or "", devices.get(facts.address or "", ""))


def warn_of_lost_key(name: str) -> str:
    """Warn that removing the key that Rackless added may leave no way to reach a node.

    >>> warn_of_lost_key("big").splitlines()[1]
    'Without another key, big can no longer be reached.'
    """
    return (
        f"The line that Rackless added to ~/.ssh/authorized_keys on {name} is removed.\n"
        f"Without another key, {name} can no longer be reached."
    )


def _notes(facts: NodeFacts) -> Iterator[str]:
    if overlay := find_overlay(facts):
        yield warn_of_overlay(overlay)
    if facts.gpu_problem:
        yield facts.gpu_problem
    elif facts.mig_gpus:
        yield from (f"{describe_mig(gpu)}." for gpu in facts.mig_gpus)
    elif not facts.gpus:
        yield "No NVIDIA GPU found. It trains on its CPU, which is slow."
    if facts.disk_free_bytes is not None and facts.disk_free_bytes < LITTLE_DISK_BYTES:
        free = show_bytes(facts.disk_free_bytes)
        yield (
            f"Only {free} of disk left, which is little for a model, its checkpoints and the "
            "environment."
        )
    # `up` is None where the system does not say. The fastest interface counts: a slow one
    # may simply be unused.
    speeds = [one.speed_mbit for one in facts.interfaces if one.up is not False and one.speed_mbit]
    if speeds and max(speeds) < SLOW_MBIT:
        yield f"Its network runs at {max(speeds)} Mbit/s. Check for an old cable or switch."
    if facts.compiler is None and facts.gpus:
        yield "No C compiler found, so layers are not compiled. Run: sudo apt-get install -y gcc"
    if facts.wsl == "nat":
        yield (
            "WSL uses its own network (NAT). Set networkingMode=mirrored in .wslconfig so that "
            "other PCs can reach it."
        )
