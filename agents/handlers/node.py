"""The request about what the node is."""

from __future__ import annotations

from dataclasses import replace

from agents.channel import Call
from agents.environment import read_adopted
from agents.facts import read_facts as read_node_facts
from agents.protocol import NodeFacts


def read_facts(call: Call) -> NodeFacts:
    """Return the node's facts, with the environment adopted or built before."""
    return replace(read_node_facts(call.home), environment=read_adopted(call.home))
