"""Place ranks on nodes and devices. Pure.

A node with GPUs runs at most one rank per GPU; a node without GPUs runs one rank on its CPU. The
plan chooses among these ranks and numbers them; without a plan all take part, node by node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from agents.contract.node import GpuFacts, NodeFacts
from agents.contract.run import RankPlacement
from agents.contract.spec import split_place


def place_ranks(facts: Mapping[str, NodeFacts]) -> tuple[RankPlacement, ...]:
    """Return all ranks, in the order of the nodes in `facts`.

    Nodes that list the same GPU are one PC under several names, as in the demo. They divide its
    GPUs among them, and share a GPU only if there are fewer GPUs than names.
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
    """Return True if this node gets a GPU: those of one PC are dealt to its names in turn."""
    names = [name for name, known in facts.items() if gpu.uuid in _uuids(known)]
    cards = _uuids(facts[node])
    place, card = names.index(node), cards.index(gpu.uuid)
    if len(cards) >= len(names):
        return card % len(names) == place
    return card == place % len(cards)


def _uuids(facts: NodeFacts) -> list[str]:
    return [gpu.uuid for gpu in facts.gpus]


def shares_a_gpu(ranks: Sequence[RankPlacement]) -> bool:
    """Return True if two ranks run on one GPU, which NCCL refuses and Gloo accepts."""
    gpus = [place.device_id for place in ranks if place.device != "cpu"]
    return len(set(gpus)) < len(gpus)


def keep_places(
    ranks: Sequence[RankPlacement], places: Sequence[tuple[str, str]]
) -> tuple[RankPlacement, ...]:
    """Return the ranks on these nodes and devices, numbered in their order.

    >>> every = [RankPlacement(rank=i, local_rank=i, node="a", device=f"cuda:{i}",
    ...     device_id=f"u{i}") for i in range(2)]
    >>> [(one.rank, one.local_rank, one.device) for one in keep_places(every, [("a", "cuda:1")])]
    [(0, 0, 'cuda:1')]
    """
    known = {(one.node, one.device): one for one in ranks}
    counts: Counter[str] = Counter()
    found = []
    for rank, place in enumerate(places):
        found.append(replace(known[place], rank=rank, local_rank=counts[place[0]]))
        counts[place[0]] += 1
    return tuple(found)


def keep_listed(
    ranks: Sequence[RankPlacement], entries: Literal["all"] | Sequence[str]
) -> tuple[RankPlacement, ...]:
    """Return the ranks that a list of nodes allows: `tower:0` allows one GPU of a node."""
    if entries == "all":
        return tuple(ranks)
    wanted = [split_place(entry) for entry in entries]
    able = [
        (one.node, one.device)
        for one in ranks
        if (one.node, None) in wanted or (one.node, one.device) in wanted
    ]
    return keep_places(ranks, able)
