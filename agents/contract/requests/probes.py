"""Requests that probe the network: a free port, the link to a node, an all-reduce over all
nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.contract.names import MAX_WAIT_S, check_number
from agents.contract.node import AllReduceResult, LinkProbe
from agents.contract.requests import NodeRequest

TORCH_START_S = 90.0
"""Time to import torch on a busy node, in addition to a probe's own deadline, in seconds."""
MAX_PROBE_BYTES = 1 << 30
"""Maximum number of bytes that a probe may send over a link."""
MIN_SEGMENT_BYTES = 88
"""Minimum payload of a packet that Linux lets a program request, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPort:
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoosePort(NodeRequest[ChosenPort]):
    """Choose a free port at one of the node's addresses."""

    kind = "port.choose"
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeDoor:
    """Port at which a node waits for one probe."""

    port: int
    greeting: str
    """First message of the other node, in hex; a secret that the master gives only to that node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenForProbe(NodeRequest[ProbeDoor]):
    """Wait for one probe, after the answer, on a port that the node chooses."""

    kind = "probe.listen"
    address: str
    timeout_s: float = 30.0

    def check_foreign(self) -> None:
        check_number("timeout_s", self.timeout_s, 0, MAX_WAIT_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeLink(NodeRequest[LinkProbe]):
    """Measure the link to a node that waits for it."""

    kind = "probe.connect"
    address: str
    port: int
    greeting: str
    num_bytes: int = 0
    segment_bytes: int | None = None
    """Maximum payload of its packets, in bytes; None: that of the system."""

    def check_foreign(self) -> None:
        check_number("port", self.port, 1, 65535)
        check_number(
            "segment_bytes", self.segment_bytes or MIN_SEGMENT_BYTES, MIN_SEGMENT_BYTES, 65535
        )
        check_number("num_bytes", self.num_bytes, 0, MAX_PROBE_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceProbe(NodeRequest[AllReduceResult]):
    """Take part in one all-reduce, in a process of the training environment."""

    kind = "probe.allreduce"
    python: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    interface: str | None = None
    """Network interface of this node to listen on; None: the one on the route to rank 0."""
    credential: str = field(default="", repr=False)
    """Private key and certificate of this check, in PEM, as in an attempt."""
    num_values: int = 262144
    """Number of fp32 values that are summed over all ranks."""
    with_nccl: bool = False
    """True if the first GPUs of all ranks also sum them with NCCL."""
    timeout_s: float = 60.0

    def check_foreign(self) -> None:
        check_number("num_values", self.num_values, 1, 1 << 28)
        check_number("timeout_s", self.timeout_s, 0, MAX_WAIT_S)

    def deadline_s(self) -> float | None:
        return self.timeout_s + TORCH_START_S
