"""Place ranks on nodes and devices. Pure.

A node with GPUs runs one rank per GPU; a node without GPUs runs one rank on its CPU. Ranks are
numbered node by node in the order of the run file, which therefore decides the node of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agents.contract.node import GpuFacts, NodeFacts
from agents.contract.run import RankPlacement


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


def keep_single(ranks: Sequence[RankPlacement]) -> tuple[RankPlacement, ...]:
    """Return only rank 0, for `parallel: single`."""
    return tuple(ranks[:1])
