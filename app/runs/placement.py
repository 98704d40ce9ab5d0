"""Which rank runs where, and over which address the ranks talk. Pure.

A node with GPUs runs one rank per GPU; one without trains on its CPU with one rank. Ranks count
through the nodes in the order in which they were named, so that the order of a run file decides
which node is rank 0.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.protocol import GpuFacts, NodeFacts, RankPlacement
from app.errors import UserError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a node's ranks are reached by the others."""

    address: str
    interface: str | None
    """The network device with that address; None: not known, left to torch."""


def place_ranks(facts: Mapping[str, NodeFacts]) -> tuple[RankPlacement, ...]:
    """Return all ranks, in order; `facts` are in the order of the nodes.

    Nodes that list the same GPU are the same PC under several names, as in the demo: they divide
    its GPUs among them, and share one only when there are fewer GPUs than names.
    """
    ranks: list[RankPlacement] = []
    for node, known in facts.items():
        devices = [
            (f"cuda:{gpu.index}", gpu.uuid) for gpu in known.gpus if _may_use(node, gpu, facts)
        ]
        for local_rank, (device, device_id) in enumerate(devices or [("cpu", "cpu")]):
            ranks.append(
                RankPlacement(
                    rank=len(ranks),
                    local_rank=local_rank,
                    node=node,
                    device=device,
                    device_id=device_id,
                )
            )
    return tuple(ranks)


def _may_use(node: str, gpu: GpuFacts, facts: Mapping[str, NodeFacts]) -> bool:
    """Deal the GPUs of one PC to its names in turn; with too few, a GPU is dealt again."""
    names = [name for name, known in facts.items() if gpu.uuid in _uuids(known)]
    cards = _uuids(facts[node])
    place, card = names.index(node), cards.index(gpu.uuid)
    if len(cards) >= len(names):
        return card % len(names) == place
    return card == place % len(cards)


def _uuids(facts: NodeFacts) -> list[str]:
    return [gpu.uuid for gpu in facts.gpus]


def shares_a_gpu(ranks: Sequence[RankPlacement]) -> bool:
    """Tell whether two ranks run on one GPU, which NCCL refuses and Gloo does not."""
    gpus = [place.device_id for place in ranks if place.device != "cpu"]
    return len(set(gpus)) < len(gpus)


def keep_single(ranks: Sequence[RankPlacement]) -> tuple[RankPlacement, ...]:
    """Return rank 0 alone, for `parallel: single`."""
    return tuple(ranks[:1])


def choose_checkpoint_ranks(ranks: Sequence[RankPlacement], copies: int) -> tuple[int, ...]:
    """Return the first rank of each of the first `copies` nodes: they write the checkpoints."""
    first: dict[str, int] = {}
    for place in ranks:
        first.setdefault(place.node, place.rank)
    return tuple(list(first.values())[:copies])


def choose_endpoints(facts: Mapping[str, NodeFacts]) -> dict[str, Endpoint]:
    """Return each node's address for training.

    A node reached over SSH has the address that the master came by. The PC of the master itself has
    none: it takes the one of its own that lies in a network with the others; alone, loopback.

    Raises:
        UserError: nodes on loopback and nodes elsewhere cannot reach each other.
    """
    known = {name: known.address for name, known in facts.items() if known.address}
    remote = [address for address in known.values() if not _is_loopback(address)]
    addresses = {
        name: known.get(name) or _own_address(fact, remote) for name, fact in facts.items()
    }
    if remote:
        addresses = {
            name: _own_address(facts[name], remote) if _is_loopback(address) else address
            for name, address in addresses.items()
        }
    _expect_reachable(addresses, bool(remote))
    return {
        name: Endpoint(address=address, interface=_interface(facts[name], address))
        for name, address in addresses.items()
    }


def _own_address(facts: NodeFacts, peers: Sequence[str]) -> str:
    """Return the node's address in a network that it shares with a peer.

    Interfaces tell no netmask, so the longest common beginning of two addresses stands for one.
    """
    own = [i.address for i in facts.interfaces if i.up is not False and not _is_loopback(i.address)]
    best = max(
        ((_common_bits(mine, peer), mine) for mine in own for peer in peers),
        default=(0, LOOPBACK),
    )
    return best[1]


def _common_bits(first: str, second: str) -> int:
    try:
        one = ipaddress.ip_address(first.partition("%")[0])
        two = ipaddress.ip_address(second.partition("%")[0])
    except ValueError:
        return -1
    if one.version != two.version:
        return -1
    return one.max_prefixlen - (int(one) ^ int(two)).bit_length()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _expect_reachable(addresses: Mapping[str, str], has_remote: bool) -> None:
    stuck = [name for name, address in addresses.items() if _is_loopback(address)]
    if has_remote and stuck:
        raise UserError(
            f"node {stuck[0]} has no address that the other nodes can reach",
            "Connect it to the network of the others, or run on the others alone: set nodes in the "
            "run file.",
        )


def _interface(facts: NodeFacts, address: str) -> str | None:
    for interface in facts.interfaces:
        if interface.address == address:
            return interface.name
    return "lo" if _is_loopback(address) else None
