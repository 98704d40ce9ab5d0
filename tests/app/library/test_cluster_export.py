"""Nodes written as a cluster file: reading it gives PCs that are planned alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.contract.node import Calibration
from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.errors import UsageError, UserError
from app.library.cluster_export import format_cluster, write_cluster
from app.library.cluster_file import parse_cluster, read_cluster_file
from app.library.configs import read_known
from app.planning.candidate import DataSize, PlanRequest
from app.planning.hardware.cluster import Cluster, LinkSpeed, PlannedGpu, PlannedNode
from app.planning.plan import make_plan
from app.planning.shape.model_shape import read_shape

GIB = 2**30
SHAPE = read_shape(read_known()[0]["config"])
MEASURED = Calibration(
    card="NVIDIA GeForce RTX 4070",
    matrix_flops_per_s=4.4e13,
    memory_bytes_per_s=4.3e11,
    to_host_bytes_per_s=1.3e10,
    from_host_bytes_per_s=1.2e10,
    unpack_values_per_s=1.6e11,
    context_bytes=400 << 20,
)
NODES = Cluster(
    nodes=(
        PlannedNode(
            name="alpha",
            gpus=(
                PlannedGpu(
                    name="NVIDIA GeForce RTX 4070",
                    memory_bytes=12282 << 20,
                    reserved_bytes=420 << 20,
                    desktop_bytes=913 << 20,
                    power_limit_w=160,
                    calibration=MEASURED,
                ),
            ),
            ram_bytes=33 * GIB,
            system="wsl",
            has_compiler=False,
            disk_bytes_per_s=2.71e9,
        ),
        PlannedNode(
            name="beta",
            gpus=(PlannedGpu(name="NVIDIA GeForce RTX 3060", memory_bytes=12 * GIB),),
            ram_bytes=15 * GIB,
            system="linux",
        ),
        PlannedNode(name="gamma", gpus=(PlannedGpu(name="CPU", device="cpu"),), system="linux"),
    ),
    links={
        frozenset(("alpha", "beta")): LinkSpeed(
            bytes_per_s=1.03e8, latency_s=0.00041, source="measured"
        )
    },
)


def plan_speed(cluster: Cluster, kind: str) -> float:
    spec = RunSpec(
        model="m",
        data=DataSpec(train="t"),
        adapter=AdapterSpec(kind="qlora"),
        parallel="data" if kind == "data" else "auto",
        nodes=("alpha", "beta"),
    )
    request = PlanRequest(
        spec=spec, shape=SHAPE, data=DataSize(num_rows=1000, mean_tokens=300.0), cluster=cluster
    )
    chosen = make_plan(request).chosen
    assert chosen is not None
    return chosen.tokens_per_s


@pytest.mark.parametrize("kind", ["auto", "data"])
def test_exported_nodes_are_planned_like_the_nodes(kind: str) -> None:
    read = parse_cluster(format_cluster(NODES))

    assert plan_speed(read, kind) == pytest.approx(plan_speed(NODES, kind), rel=1e-3)
    alpha, beta, gamma = read.nodes
    read_gpu, real_gpu = alpha.gpus[0], NODES.nodes[0].gpus[0]
    for name in ("memory_bytes", "reserved_bytes", "desktop_bytes", "power_limit_w"):
        assert getattr(read_gpu, name) == pytest.approx(getattr(real_gpu, name), rel=1e-4), name
    assert (alpha.has_compiler, alpha.system, beta.has_compiler) == (False, "wsl", True)
    assert gamma.gpus == ()


def test_a_power_limit_that_was_edited_counts(tmp_path: Path) -> None:
    file = write_cluster(NODES, tmp_path / "pcs.yaml")
    file.write_text(file.read_text().replace("power_limit_w: 160", "power_limit_w: 120"))

    assert read_cluster_file(file).nodes[0].gpus[0].power_limit_w == 120


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "pcs.yaml").write_text("mine")

    with pytest.raises(UserError, match="exists"):
        write_cluster(NODES, tmp_path / "pcs.yaml")
    assert (tmp_path / "pcs.yaml").read_text() == "mine"
    with pytest.raises(UserError, match="cannot be written"):
        write_cluster(NODES, tmp_path / "no" / "pcs.yaml")


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        ("{card: RTX 4070, measured: {tflops: fast}}", "tflops is 'fast'"),
        ("{card: RTX 4070, measured: 3}", "must be a list of `key: value` lines"),
        ("{card: RTX 4070, measured: {tflop: 3}}", "did you mean tflops?"),
        ("{card: RTX 4070, used_gib: -1}", "used_gib is -1"),
    ],
)
def test_what_was_edited_wrongly_is_named(gpu: str, problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_cluster(f"nodes: [{{name: a, gpus: [{gpu}]}}]")
    assert problem in refused.value.message
