"""The build of torch follows a node's GPUs and driver."""

from __future__ import annotations

import pytest

from agents.contract.environments import EnvironmentTrial
from agents.contract.node import GpuFacts, NodeFacts
from app.provisioning.torch_build import (
    TorchBuild,
    advise_one_build,
    choose_torch,
    is_of_other_build,
)


def node(*drivers: str | None, capability: str = "8.9", problem: str | None = None) -> NodeFacts:
    gpus = tuple(
        GpuFacts(uuid=f"u{i}", index=i, name="RTX 4070", driver=driver, capability=capability)
        for i, driver in enumerate(drivers)
    )
    return NodeFacts(
        hostname="pc",
        os="Ubuntu 24.04",
        kernel="6.8",
        python="3.12.3",
        architecture="x86_64",
        gpus=gpus,
        gpu_problem=problem,
    )


@pytest.mark.parametrize(
    ("facts", "build"),
    [
        (node(), TorchBuild.CPU),
        (node("580.95.05"), TorchBuild.CUDA_13),
        (node("610.1", "580.95.05"), TorchBuild.CUDA_13),
        (node(None), TorchBuild.CUDA_13),
        (node(problem="the driver does not answer"), TorchBuild.CUDA_13),
        (node("560.35.03"), TorchBuild.CUDA_12),
        (node("610.1", "560.35.03"), TorchBuild.CUDA_12),
        (node("610.1", capability="6.1"), TorchBuild.CUDA_12),
        (node("560.35.03", capability="12.0"), TorchBuild.CUDA_13),  # 12.6 has no kernels for it
        (node("610.1", capability="3.5"), TorchBuild.CUDA_13),
        (node("470.1"), TorchBuild.CUDA_13),  # the driver has to be updated
    ],
)
def test_the_oldest_gpu_of_a_node_decides(facts: NodeFacts, build: TorchBuild) -> None:
    assert choose_torch(facts) is build


def test_an_environment_is_of_another_build_only_where_gpus_mind() -> None:
    trial = EnvironmentTrial(import_s=1.0, torch="2.13.0+cu130", devices=())
    assert is_of_other_build(trial, TorchBuild.CUDA_12)
    assert not is_of_other_build(trial, TorchBuild.CUDA_13)
    assert not is_of_other_build(trial, TorchBuild.CPU)
    assert not is_of_other_build(None, TorchBuild.CUDA_12)


NEW, OLD = node("580.95.05"), node("580.95.05", capability="6.1")
BLACKWELL = node("580.95.05", capability="12.0")


@pytest.mark.parametrize(
    ("facts", "others", "build"),
    [
        (NEW, [OLD], TorchBuild.CUDA_12),
        (NEW, [NEW, BLACKWELL, node()], TorchBuild.CUDA_13),
        (NEW, [OLD, BLACKWELL], TorchBuild.CUDA_13),  # no build serves both
        (BLACKWELL, [OLD], TorchBuild.CUDA_13),
        (OLD, [BLACKWELL], TorchBuild.CUDA_12),
        (NEW, [node("470.1")], TorchBuild.CUDA_13),  # which no build serves
        (node(), [OLD], TorchBuild.CPU),
    ],
)
def test_nodes_get_one_build_where_one_serves_all_cards(
    facts: NodeFacts, others: list[NodeFacts], build: TorchBuild
) -> None:
    assert choose_torch(facts, others) is build


def test_it_is_said_how_several_builds_become_one() -> None:
    nodes = {"a": NEW, "b": OLD, "c": NEW}
    builds = {"a": "cu130", "b": "cu126", "c": "cu130"}
    commands = "rackless nodes setup a; rackless nodes setup c"
    assert advise_one_build(nodes, builds) == commands
    said = advise_one_build({**nodes, "c": BLACKWELL}, builds)
    assert said == "No build serves all cards: to use NCCL, leave b out of the run"
    two = {"a": BLACKWELL, "b": OLD}
    assert "leave b out" in advise_one_build(two, {"a": "cu130", "b": "cu126"}), "the older one"
    assert advise_one_build(nodes, dict.fromkeys("abc", "cu126")) == ""
