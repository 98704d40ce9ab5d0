"""Handlers of requests of the check, and of waking other PCs."""

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
    """Return the facts of this node that only the check needs."""
    return examine_node(call.home.path)


@handles(FindRoutes)
def find_routes(call: Call, request: FindRoutes) -> Routes:
    """Return the route of packets from this node to each address."""
    return find_ways(request.addresses)


@handles(WakeOther)
def wake_other(call: Call, request: WakeOther) -> SentPackets:
    """Send the magic packet for another PC in this node's network."""
    return SentPackets(value=send_magic_packet(request.target))
