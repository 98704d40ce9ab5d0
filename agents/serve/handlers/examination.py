"""Handle requests of the check, and wake other PCs."""

from __future__ import annotations

from agents.contract.requests.examination import (
    Examination,
    Examine,
    FindRoutes,
    Routes,
    SentPackets,
    WakeOther,
)
from agents.contract.wake import send_magic_packet
from agents.node.examination.examine import examine as examine_node
from agents.node.examination.network import find_routes as find_ways
from agents.serve.channel import Call
from agents.serve.handlers import handles


@handles(Examine)
def examine(call: Call, request: Examine) -> Examination:
    """Return what the check asks of this node beyond its facts."""
    return examine_node(call.home.path)


@handles(FindRoutes)
def find_routes(call: Call, request: FindRoutes) -> Routes:
    """Return the way by which packets leave this node to each address."""
    return find_ways(request.addresses)


@handles(WakeOther)
def wake_other(call: Call, request: WakeOther) -> SentPackets:
    """Send the packet that wakes another PC of this node's network."""
    return SentPackets(value=send_magic_packet(request.target))
