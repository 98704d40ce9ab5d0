"""What a check asks about, and the rows that it answers with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """Node at the other end of the link; None: the result concerns one node."""
    status: Status
    message: str
    fix: str = ""
    """What to do next; empty when the check passed."""
    repair: Repair | None = None
    """Steps that do it; None: a person has to, as `fix` says, or nothing is wrong."""
    evidence: str = ""
    """What was read, in the terms of the system; empty: the message says it all."""
    round_trip_s: float | None = None
    """Round trip between node and peer, in seconds; None: not measured."""
    bytes_per_s: float | None = None
    """Throughput from node to peer, in bytes per second; None: not measured."""

    @property
    def topic(self) -> str:
        """Section of the troubleshooting page about this check; empty: it passed, or none."""
        return "" if self.status == "pass" else topic_of(self.check)


OnRow = Callable[[CheckRow], None]
"""Callback with each row as soon as it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedNode:
    """A node that answered, and what it said of itself."""

    name: str
    facts: NodeFacts
    environment: EnvironmentReport
    examination: Examination = field(default_factory=Examination)
    round_trip_s: float
    """Round trip of one request over the agent's connection, in seconds."""
    skew_s: float
    """Clock of the node minus the clock of this PC, in seconds."""
    num_nodes: int
    """Nodes that are checked together, this one and silent ones included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedGroup:
    """All nodes that answered; each check of the network measures between them."""

    clients: Mapping[str, NodeClient]
    """Clients by name of the node, in the order of the check."""
    nodes: Mapping[str, CheckedNode]
    endpoints: Mapping[str, Endpoint]
    """Addresses that a run would use; empty when the nodes share no network."""
    reduce_timeout_s: float
    """Deadline of the all-reduce, in seconds."""


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
