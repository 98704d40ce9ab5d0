"""Request for the samples of a node's sensors."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.requests import NodeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowSamples(NodeRequest[None]):
    """Send events `telemetry.sample`, each with a Sample, until the connection ends."""

    kind = "telemetry.follow"
    after_s: float | None = None
    """Time of the master's newest sample, by the node's clock; None: new samples only."""
