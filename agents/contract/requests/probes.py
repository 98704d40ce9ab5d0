"""Requests that probe the network: a free port, the link to a node, an all-reduce over all."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.contract.names import MAX_WAIT_S, check_number
from agents.contract.node import AllReduceResult, LinkProbe
from agents.contract.requests import NodeRequest

TORCH_START_S = 90.0
"""Time to import torch on a busy node, on top of a probe's own deadline, in seconds."""
MAX_PROBE_BYTES = 1 << 30
"""Number of bytes that a probe may send over a link."""
MIN_SEGMENT_BYTES = 88
"""Smallest payload of a packet that Linux lets a program ask for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPort:
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoosePort(NodeRequest[ChosenPort]):
    """Choose a free port of one of the node's addresses."""

    kind = "port.choose"
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeDoor:
    """Port at which a node waits for one probe."""

    port: int
    greeting: str
    """What the other node has to send first, in hex; known only to whom the master gives it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenForProbe(NodeRequest[ProbeDoor]):
    """Wait for one probe on a port of the node's choice, after the answer."""

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
    """Limit of the payload of its packets, in bytes; None: that of the system."""

    def check_foreign(self) -> None:
        check_number("port", self.port, 1, 65535)
        check_number(
            "segment_bytes", self.segment_bytes or MIN_SEGMENT_BYTES, MIN_SEGMENT_BYTES, 65535
        )
        check_number("num_bytes", self.num_bytes, 0, MAX_PROBE_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceProbe(NodeRequest[AllReduceResult]):
    """Take part in one all-reduce, in the training environment's own process."""

    kind = "probe.allreduce"
    python: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    interface: str | None = None
    """Network interface of this node to listen on; None: the one on the way to rank 0."""
    credential: str = field(default="", repr=False)
    """Private key and certificate of this check, in PEM, as an attempt has."""
    num_values: int = 262144
    """Number of fp32 values that are summed over all ranks."""
    with_nccl: bool = False
    """Whether the first GPUs of all ranks sum them with NCCL, too."""
    timeout_s: float = 60.0

    def check_foreign(self) -> None:
        check_number("num_values", self.num_values, 1, 1 << 28)
        check_number("timeout_s", self.timeout_s, 0, MAX_WAIT_S)

    def deadline_s(self) -> float | None:
        return self.timeout_s + TORCH_START_S
