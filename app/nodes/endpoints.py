"""Choose the address at which each node's ranks are reached by the other nodes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.contract.node import NodeFacts
from app.errors import UserError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address of a node's ranks for the other nodes."""

    address: str
    interface: str | None
    """Network device with that address; None if unknown here, so the node finds it itself."""


def choose_endpoints(facts: Mapping[str, NodeFacts]) -> dict[str, Endpoint]:
    """Return each node's address for training.

    A node reached over SSH has the address that the master connected to. The master's own PC uses
    its address in a network that it shares with the others. The ranks of a single node connect over
    loopback.

    Raises:
        UserError: a node has only a loopback address, which the others cannot reach.
    """
    if len(facts) == 1:
        return {name: Endpoint(address=LOOPBACK, interface="lo") for name in facts}
    known = {name: known.address for name, known in facts.items() if known.address}
    remote = [address for address in known.values() if not is_loopback(address)]
    addresses = {
        name: known.get(name) or _own_address(fact, remote) for name, fact in facts.items()
    }
    # A node reached over loopback is on this PC, so the others reach it at this PC's own address.
    if remote:
        addresses = {
            name: _own_address(facts[name], remote) if is_loopback(address) else address
            for name, address in addresses.items()
        }
    _expect_reachable(addresses, bool(remote))
    return {
        name: Endpoint(address=address, interface=_interface(facts[name], address))
        for name, address in addresses.items()
    }


def _own_address(facts: NodeFacts, peers: Sequence[str]) -> str:
    """Return the node's address in a network that it shares with a peer."""
    own = [i.address for i in facts.interfaces if i.up is not False and not is_loopback(i.address)]
    # The facts have no netmask, so the longest common prefix of two addresses replaces it.
    best = max(
        ((_common_bits(mine, peer), mine) for mine in own for peer in peers),
        default=(0, LOOPBACK),
    )
    return best[1]


def _common_bits(first: str, second: str) -> int:
    try:
        # A link-local IPv6 address may carry its device after a percent sign.
        one = ipaddress.ip_address(first.partition("%")[0])
        two = ipaddress.ip_address(second.partition("%")[0])
    except ValueError:
        return -1
    if one.version != two.version:
        return -1
    return one.max_prefixlen - (int(one) ^ int(two)).bit_length()


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _expect_reachable(addresses: Mapping[str, str], has_remote: bool) -> None:
    stuck = [name for name, address in addresses.items() if is_loopback(address)]
    if has_remote and stuck:
        raise UserError(
            f"node {stuck[0]} has no address that the other nodes can reach",
            "Connect it to the network of the others, or run on the others alone: set nodes in the "
            "run file.",
            topic="network",
        )


def _interface(facts: NodeFacts, address: str) -> str | None:
    for interface in facts.interfaces:
        if interface.address == address:
            return interface.name
    return "lo" if is_loopback(address) else None
