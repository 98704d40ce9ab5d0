"""The table of docs/big-models.md: what plans say about large models on the PCs of people.

`python -m tests.app.planning.big_models` prints it anew.
"""

from __future__ import annotations

from dataclasses import replace

from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.planning.candidate import Candidate, DataSize, PlanRequest
from app.planning.hardware.cluster import Cluster, PlannedGpu, PlannedNode
from app.planning.plan import make_plan
from app.planning.shape.model_shape import ModelShape, read_shape
from tests.app.planning.clusters import GIB, example, llama

_NAMES = {"data": "data parallel", "single": "one GPU", "pipeline": "pipeline"}
_TIERS = {"ram": "RAM", "disk": "SSD"}


def qwen_32b() -> ModelShape:
    """Return the shape of Qwen2.5-32B."""
    return read_shape(
        {
            "model_type": "qwen2",
            "vocab_size": 152_064,
            "hidden_size": 5120,
            "intermediate_size": 27_648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        }
    )


MODELS = {"13B": llama("13B"), "32B": qwen_32b(), "70B": llama("70B")}


def one_pc(card: str, ram_gib: int) -> Cluster:
    """Return a Linux PC with an SSD that was not measured."""
    gpu = PlannedGpu(name=card, desktop_bytes=350 << 20)
    return Cluster(
        nodes=(PlannedNode(name="pc", gpus=(gpu,), ram_bytes=ram_gib * GIB, system="linux"),)
    )


CLUSTERS = {
    "one RTX 3070 Ti (8 GB), 32 GB RAM": one_pc("RTX 3070 Ti", 32),
    "one RTX 4070 (12 GB), 32 GB RAM": one_pc("RTX 4070", 32),
    "one RTX 4090 (24 GB), 64 GB RAM": one_pc("RTX 4090", 64),
    "three unlike PCs, 1 Gb/s": example("three-mismatched"),
    "seven RTX 4070 in WSL, 2.5 Gb/s": example("seven-4070"),
    "two RTX 3090 in one PC": example("two-3090"),
}


def plan_row(model: str, cluster: Cluster) -> Candidate | None:
    """Return the chosen plan of QLoRA r=16 on all linear layers, 64 rows of 2,048 tokens a step."""
    spec = RunSpec(
        model="m",
        data=DataSpec(train="d"),
        adapter=AdapterSpec(kind="qlora", targets="all-linear"),
        batch_sequences=64,
    )
    data = DataSize(num_rows=1000, mean_tokens=2048, longest_tokens=2048)
    request = PlanRequest(spec=spec, shape=MODELS[model], data=data, cluster=cluster)
    return make_plan(request).chosen


def describe_cell(plan: Candidate | None, cluster: Cluster) -> str:
    """Return mode, speed and hours for ten million tokens; a dash: it does not fit."""
    if plan is None:
        return "-"
    mode = _NAMES.get(plan.mode, plan.mode)
    if plan.mode == "streamed":
        tiers = dict.fromkeys(_TIERS[gpu.streams_from] for gpu in plan.gpus if gpu.streams_from)
        mode = f"streamed from {' and '.join(tiers)}"
    if plan.num_replicas > 1:
        mode = f"{plan.num_replicas} pipelines"
    if len(plan.nodes) < len(cluster.nodes):
        count = "one" if len(plan.nodes) == 1 else str(len(plan.nodes))
        mode = f"{mode} by {count} of them"
    return f"{mode}, {plan.tokens_per_s:,.0f} tok/s, {1e7 / plan.tokens_per_s / 3600:.1f} h"


def make_rows() -> list[str]:
    """Return the rows of the table, as Markdown."""
    rows = []
    for name, cluster in CLUSTERS.items():
        cells = [describe_cell(plan_row(model, cluster), cluster) for model in MODELS]
        rows.append(f"| {' | '.join((name, *cells))} |")
    return rows


def main() -> None:
    """Print the table."""
    from agents.contract.parallel import PARALLEL

    for mode in ("pipeline", "streamed"):
        PARALLEL[mode] = replace(PARALLEL[mode], refusal="")  # type: ignore[index]
    print("| PCs |", " | ".join(MODELS), "|")
    print("|---|" + "---|" * len(MODELS))
    print("\n".join(make_rows()))


if __name__ == "__main__":
    main()
