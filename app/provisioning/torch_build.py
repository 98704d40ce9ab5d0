"""Which build of torch a node gets: one per family of CUDA, each with a lock of its own.

The build for current drivers is the one on PyPI. The others are on PyTorch's own index, under the
same version with a local part (`2.13.0+cpu`).
"""

from __future__ import annotations

import importlib.resources
from enum import Enum

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


def choose_torch(facts: NodeFacts) -> TorchBuild:
    """Return the build for a node's GPUs, the oldest of which decides.

    A GPU that no shipped build serves gets the newest one: the check of the node says what is
    wrong with the driver or the card, and an update of the driver mends it without a new build.
    """
    if not facts.gpus and facts.gpu_problem is None:
        return TorchBuild.CPU
    old = any(_wants_cuda_12(gpu) for gpu in facts.gpus)
    return TorchBuild.CUDA_12 if old and TorchBuild.CUDA_12.is_shipped else TorchBuild.CUDA_13


def _wants_cuda_12(gpu: GpuFacts) -> bool:
    # Imported on use: lists of runs need no rules of the check, and start sooner.
    from app.provisioning.check_rules import GOOD_DRIVER, MIN_CAPABILITY, numbers_of

    driver, capability = numbers_of(gpu.driver), numbers_of(gpu.capability)
    return bool(driver and driver[0] < GOOD_DRIVER) or bool(
        capability and capability < MIN_CAPABILITY
    )
