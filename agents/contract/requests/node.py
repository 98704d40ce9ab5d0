"""Requests for the facts and logs of a node."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.node import NodeFacts, NodeLogs
from agents.contract.requests import NodeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadFacts(NodeRequest[NodeFacts]):
    """Read the node's hardware, its training environment, and the work on each device."""

    kind = "facts"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLogs(NodeRequest[NodeLogs]):
    """Read the ends of the newest logs of all runs."""

    kind = "logs.tail"
    is_verbatim = True
