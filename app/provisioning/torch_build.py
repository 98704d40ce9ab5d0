"""Which build of torch a node gets: one per family of CUDA, each with a lock of its own.

The build for current drivers is the one on PyPI. The others are on PyTorch's own index, under the
same version with a local part (`2.13.0+cpu`).
"""

from __future__ import annotations

import importlib.resources
from enum import Enum

from agents.contract.environments import EnvironmentTrial
from agents.contract.node import GpuFacts, NodeFacts

_PYTORCH_INDEX = "https://download.pytorch.org/whl/"


class TorchBuild(Enum):
    """A build of torch; its value is the family's name in PyTorch's index."""

    CUDA_13 = "cu130"
    CUDA_12 = "cu126"
    CPU = "cpu"

    @property
    def lock(self) -> str:
        """Name of its lock."""
        return f"torch-{self.value}"

    @property
    def index_url(self) -> str | None:
        """Index that has it; None: PyPI."""
        return None if self is TorchBuild.CUDA_13 else _PYTORCH_INDEX + self.value

    @property
    def is_shipped(self) -> bool:
        """Whether this version of Rackless comes with its lock."""
        folder = importlib.resources.files("resources").joinpath("environments")
        return folder.joinpath(f"{self.lock}.lock").is_file()


DRIVERS = {TorchBuild.CUDA_13: 580, TorchBuild.CUDA_12: 525}
"""Oldest driver of each build of CUDA."""
_CARDS = {TorchBuild.CUDA_13: ((7, 5), (99, 0)), TorchBuild.CUDA_12: ((5, 0), (10, 0))}
"""Compute capabilities that each build has kernels for: from, and below. CUDA 13 begins with
Turing; the build with 12.6 has Maxwell to Hopper, and nothing for Blackwell (PyTorch's
RELEASE.md)."""


def choose_torch(facts: NodeFacts) -> TorchBuild:
    """Return the newest shipped build that serves the most of a node's GPUs.

    A node whose GPUs no build serves gets the newest one: the check of the node says what is
    wrong with the driver or the card, and an update of the driver mends it without a new build.
    """
    if not facts.gpus and facts.gpu_problem is None:
        return TorchBuild.CPU
    builds = [build for build in (TorchBuild.CUDA_13, TorchBuild.CUDA_12) if build.is_shipped]
    # The first of equals.
    return max(
        builds,
        key=lambda build: sum(serves(build, gpu) for gpu in facts.gpus),
        default=TorchBuild.CUDA_13,
    )


def serves(build: TorchBuild, gpu: GpuFacts) -> bool:
    """Return whether a build of CUDA runs on a GPU with its driver; what is not known is no
    reason against it.
    """
    driver, capability = numbers_of(gpu.driver), numbers_of(gpu.capability)
    oldest, newest = _CARDS[build]
    return not (
        (driver and driver[0] < DRIVERS[build])
        or (capability and not oldest <= capability < newest)
    )


def is_of_other_build(trial: EnvironmentTrial | None, wanted: TorchBuild) -> bool:
    """Return whether a tried environment has another build of torch than GPUs need.

    Not for a node without GPUs, where every build runs.
    """
    local = trial.torch.partition("+")[2] if trial else ""
    return wanted is not TorchBuild.CPU and local not in ("", wanted.value)


def numbers_of(version: str | None) -> tuple[int, ...]:
    """Return the parts of a version that are numbers; none where it is not known."""
    parts = (version or "").split(".")
    return tuple(int(part) for part in parts if part.isdigit())
