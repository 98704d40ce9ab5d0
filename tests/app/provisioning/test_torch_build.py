"""The build of torch follows a node's GPUs and driver."""

from __future__ import annotations

import pytest

from agents.contract.environments import EnvironmentTrial
from agents.contract.node import GpuFacts, NodeFacts
from app.provisioning.torch_build import TorchBuild, choose_torch, is_of_other_build


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
def test_the_oldest_gpu_of_a_node_decides(
    facts: NodeFacts, build: TorchBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBuild, "is_shipped", True)
    assert choose_torch(facts) is build


def test_an_environment_is_of_another_build_only_where_gpus_mind() -> None:
    trial = EnvironmentTrial(import_s=1.0, torch="2.13.0+cu130", devices=())
    assert is_of_other_build(trial, TorchBuild.CUDA_12)
    assert not is_of_other_build(trial, TorchBuild.CUDA_13)
    assert not is_of_other_build(trial, TorchBuild.CPU)
    assert not is_of_other_build(None, TorchBuild.CUDA_12)


def test_a_build_whose_lock_does_not_ship_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBuild, "is_shipped", False)
    assert choose_torch(node("560.35.03")) is TorchBuild.CUDA_13
