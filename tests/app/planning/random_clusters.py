"""Random clusters and models for the properties of plans, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.planning.hardware.cluster import Cluster, LinkSpeed, PlannedGpu, PlannedNode, ethernet
from app.planning.plan import DataSize, PlanRequest
from app.planning.shape.model_shape import read_shape

GIB = 2**30
CARDS = (
    "RTX 3060", "RTX 3070", "RTX 3070 Ti", "RTX 3080", "RTX 3090", "RTX 4060 Ti", "RTX 4070",
    "RTX 4070 Ti", "RTX 4080", "RTX 4090", "RTX 5070", "RTX 5070 Ti", "RTX 4070 Laptop GPU",
)  # fmt: skip
SPEEDS = (0.3, 0.5, 1.0, 1.0, 1.0, 2.5, 2.5, 10.0)
"""Gigabits per second, from Wi-Fi to fast Ethernet; most homes have Gigabit Ethernet."""


def _llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32000 if hidden < 8192 else 128256,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


MODELS = {
    "1B": _llama(2048, 5632, 22, 32, 4),
    "7B": _llama(4096, 11008, 32, 32, 32),
    "13B": _llama(5120, 13824, 40, 40, 40),
    "70B": _llama(8192, 28672, 80, 64, 8),
}


def draw_request(seed: int, most_gpus: int = 6) -> PlanRequest:
    """Return the request of a seed: one to five PCs with one or two GPUs each, and a run."""
    rng = random.Random(seed)
    return PlanRequest(
        spec=_draw_spec(rng),
        shape=read_shape(MODELS[rng.choice(list(MODELS))]),
        data=DataSize(num_rows=5000, mean_tokens=345.0, longest_tokens=1024),
        cluster=_draw_cluster(rng, most_gpus),
    )


def _draw_cluster(rng: random.Random, most_gpus: int) -> Cluster:
    nodes: list[PlannedNode] = []
    left = rng.randint(1, most_gpus)
    while left > 0 and len(nodes) < 5:
        num = min(left, rng.choice((1, 1, 1, 2)))
        left -= num
        gpus = tuple(
            PlannedGpu(name=rng.choice(CARDS), device=f"cuda:{i}", desktop_bytes=350 << 20)
            for i in range(num)
        )
        ram = rng.choice((16, 32, 32, 64, 128)) * GIB
        system = rng.choice(("linux", "linux", "wsl"))
        name = f"pc{len(nodes)}"
        nodes.append(PlannedNode(name=name, gpus=gpus, ram_bytes=ram, system=system))
    links: dict[frozenset[str], LinkSpeed] = {}
    if rng.random() < 0.4:
        links = {
            frozenset((one.name, other.name)): ethernet(rng.choice(SPEEDS))
            for place, one in enumerate(nodes)
            for other in nodes[place + 1 :]
        }
    return Cluster(nodes=tuple(nodes), links=links, default_link=ethernet(rng.choice(SPEEDS)))


def _draw_spec(rng: random.Random) -> RunSpec:
    kind = rng.choice(("qlora", "qlora", "lora", "full"))
    adapter = AdapterSpec(kind="full") if kind == "full" else AdapterSpec(kind=kind, rank=16)
    spec = RunSpec(model="m", data=DataSpec(train="d"), adapter=adapter)
    return replace(
        spec,
        sequence_tokens=1024,
        batch_sequences=rng.choice((8, 16, 24, 32, 64)),
        optimizer=rng.choice(("adamw", "adamw", "adamw_8bit", "paged_adamw_8bit")),
        compression=rng.choice(("none", "none", "bf16", "powersgd")),
    )


def shuffle(request: PlanRequest, seed: int) -> PlanRequest:
    """Return the request with its PCs listed in another order."""
    nodes = list(request.cluster.nodes)
    random.Random(seed).shuffle(nodes)
    return replace(request, cluster=replace(request.cluster, nodes=tuple(nodes)))


def give_memory(request: PlanRequest, gib: int) -> PlanRequest:
    """Return the request with more memory on every GPU."""

    def grow(gpu: PlannedGpu) -> PlannedGpu:
        memory, card = gpu.memory, gpu.card
        assert memory is not None
        assert card is not None
        total = (gpu.memory_bytes or card.memory_bytes) + gib * GIB
        return replace(gpu, memory_bytes=total)

    nodes = tuple(
        replace(node, gpus=tuple(grow(gpu) for gpu in node.gpus)) for node in request.cluster.nodes
    )
    return replace(request, cluster=replace(request.cluster, nodes=nodes))


def speed_up_links(request: PlanRequest, factor: float) -> PlanRequest:
    """Return the request with faster links."""

    def speed_up(link: LinkSpeed) -> LinkSpeed:
        return replace(link, bytes_per_s=link.bytes_per_s * factor)

    cluster = request.cluster
    links = {pair: speed_up(link) for pair, link in cluster.links.items()}
    default = speed_up(cluster.default_link)
    return replace(request, cluster=replace(cluster, links=links, default_link=default))


def add_gpu(request: PlanRequest, seed: int) -> PlanRequest:
    """Return the request with another GPU in its first PC."""
    rng = random.Random(seed)
    first, *rest = request.cluster.nodes
    more = PlannedGpu(name=rng.choice(CARDS), device=f"cuda:{len(first.gpus)}")
    nodes = (replace(first, gpus=(*first.gpus, more)), *rest)
    return replace(request, cluster=replace(request.cluster, nodes=nodes))


def add_pc(request: PlanRequest, seed: int) -> PlanRequest:
    """Return the request with another PC."""
    rng = random.Random(seed)
    more = PlannedNode(
        name="another",
        gpus=(PlannedGpu(name=rng.choice(CARDS), device="cuda:0"),),
        ram_bytes=32 * GIB,
        system="linux",
    )
    nodes = (*request.cluster.nodes, more)
    return replace(request, cluster=replace(request.cluster, nodes=nodes))
