"""Inputs and rows of a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agents.contract.node import EnvironmentReport, NodeFacts
from agents.contract.requests.examination import Examination
from app.nodes.client import NodeClient
from app.nodes.endpoints import Endpoint
from app.provisioning.repairs import Repair
from app.troubleshooting import topic_of

Status = Literal["pass", "warn", "fail", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRow:
    """One result of a check."""

    check: str
    """Name of the check, such as `clock`."""
    node: str
    peer: str | None = None
    """Node at the other end of the link; None if the result concerns one node."""
    status: Status
    message: str
    fix: str = ""
    """Remedy; empty if the check passed."""
    repair: Repair | None = None
    """Steps that apply the remedy; None if the user has to do it by hand, or nothing is wrong."""
    evidence: str = ""
    """Readings in the terms of the system; empty if the message has them."""
    round_trip_s: float | None = None
    """Round trip between node and peer, in seconds; None if not measured."""
    bytes_per_s: float | None = None
    """Throughput from node to peer, in bytes per second; None if not measured."""

    @property
    def topic(self) -> str:
        """Section of the troubleshooting page about this check; empty if it passed or has no
        section.
        """
        return "" if self.status == "pass" else topic_of(self.check)


OnRow = Callable[[CheckRow], None]
"""Callback with each row as soon as it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedNode:
    """A node that answered, with its facts and readings."""

    name: str
    facts: NodeFacts
    environment: EnvironmentReport
    examination: Examination = field(default_factory=Examination)
    round_trip_s: float
    """Round trip of one request over the agent's connection, in seconds."""
    skew_s: float
    """Clock of the node minus the clock of this PC, in seconds."""
    num_nodes: int
    """Number of nodes that are checked together, including this one and silent ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedGroup:
    """All nodes that answered, for checks that compare them or measure between them."""

    clients: Mapping[str, NodeClient]
    """Clients by name of the node, in the order of the check."""
    nodes: Mapping[str, CheckedNode]
    endpoints: Mapping[str, Endpoint]
    """Addresses that a run would use; empty if the nodes share no network."""
    reduce_timeout_s: float
    """Deadline of the all-reduce, in seconds."""
    shared_homes: Sequence[Sequence[str]] = ()
    """Groups of nodes whose agents have one folder."""
    host_keys: Mapping[str, str] = field(default_factory=dict)
    """Fingerprint of the confirmed SSH host key of each node, by its name; without local nodes."""


def make_row(
    check: str,
    node: str,
    status: Status,
    message: str,
    fix: str = "",
    repair: Repair | None = None,
    *,
    evidence: str = "",
) -> CheckRow:
    """Return a row about one node."""
    return CheckRow(
        check=check,
        node=node,
        status=status,
        message=message,
        fix=fix,
        repair=repair,
        evidence=evidence,
    )
