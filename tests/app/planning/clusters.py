"""Clusters, models and questions that the tests of plans share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.contract.spec import AdapterKind, AdapterSpec, DataSpec, RunSpec
from app.library.cluster_file import read_cluster_file
from app.planning.hardware.cluster import Cluster, PlannedGpu, PlannedNode, ethernet
from app.planning.plan import DataSize, PlanRequest
from app.planning.shape.model_shape import ModelShape, read_shape

GIB = 2**30
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_FOLDER = Path(__file__).parents[3] / "resources" / "clusters"


def example(name: str) -> Cluster:
    """Return a cluster that ships with Rackless."""
    return read_cluster_file(_FOLDER / f"{name}.yaml")


def llama(size: str) -> ModelShape:
    """Return the shape of Llama 2: 7B, 13B or 70B."""
    hidden, ffn, layers, heads, kv_heads = {
        "7B": (4096, 11008, 32, 32, 32),
        "13B": (5120, 13824, 40, 40, 40),
        "70B": (8192, 28672, 80, 64, 8),
    }[size]
    return read_shape(
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        }
    )


def ask(
    cluster: Cluster, size: str = "7B", kind: AdapterKind = "qlora", **changes: Any
) -> PlanRequest:
    """Return a question: r=16 on q, k, v and o, 1,000 full rows of 2,048 tokens."""
    spec = RunSpec(
        model="m", data=DataSpec(train="d"), adapter=AdapterSpec(kind=kind, targets=QKVO), **changes
    )
    data = DataSize(
        num_rows=1000, mean_tokens=spec.sequence_tokens, longest_tokens=spec.sequence_tokens
    )
    return PlanRequest(spec=spec, shape=llama(size), data=data, cluster=cluster)


def make_node(name: str, *cards: str, memory_gib: float | None = None) -> PlannedNode:
    memory_bytes = None if memory_gib is None else int(memory_gib * GIB)
    gpus = tuple(
        PlannedGpu(name=card, device=f"cuda:{i}", memory_bytes=memory_bytes)
        for i, card in enumerate(cards)
    )
    return PlannedNode(name=name, gpus=gpus, ram_bytes=64 * GIB, system="linux")


def make_pcs(*cards: str, gbit_per_s: float = 1.0) -> Cluster:
    nodes = tuple(make_node(f"pc{i}", card) for i, card in enumerate(cards, 1))
    return Cluster(nodes=nodes, default_link=ethernet(gbit_per_s))
