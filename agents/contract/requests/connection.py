"""Requests about the connection itself, answered immediately by the agent's main thread."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.names import check_time
from agents.contract.requests import NodeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    wall_s: float
    monotonic_s: float

    def check_foreign(self) -> None:
        check_time("wall_s", self.wall_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping(NodeRequest[Clock]):
    """Read the node's clocks."""

    kind = "ping"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel(NodeRequest[None]):
    """End the programs of another request, whose own response then reports the cancellation."""

    kind = "cancel"
    request: int
    """Id of the other request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown(NodeRequest[None]):
    """End the agent's process."""

    kind = "shutdown"
