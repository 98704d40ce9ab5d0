"""Choose the build of torch for a node: one per family of CUDA, each with its own lock.

The build for current drivers is the one on PyPI. The others are on PyTorch's own index, under the
same version with a local part (`2.13.0+cpu`). `torch_locks.py` makes the lock of a build that does
not ship when it is first needed.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib.resources.abc import Traversable

from agents.contract.environments import EnvironmentTrial
from agents.contract.node import GpuFacts, NodeFacts
from app.text import show_list

PYTORCH_INDEX = "https://download.pytorch.org/whl/"
BESIDE_TORCH = ("train", "pip")
"""Shipped locks that are installed in addition to each build of torch."""


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
        """Index that has it; None for PyPI."""
        return None if self is TorchBuild.CUDA_13 else PYTORCH_INDEX + self.value

    @property
    def is_shipped(self) -> bool:
        """True if this version of Rackless ships its lock."""
        return _shipped_file(self.lock).is_file()


def shipped_text(name: str) -> str:
    """Return the text of a lock that ships with Rackless."""
    return _shipped_file(name).read_text("utf-8")


def _shipped_file(name: str) -> Traversable:
    return importlib.resources.files("resources").joinpath("environments", f"{name}.lock")


DRIVERS = {TorchBuild.CUDA_13: 580, TorchBuild.CUDA_12: 525}
"""Oldest driver of each build of CUDA, the newest build first."""
_CARDS = {TorchBuild.CUDA_13: ((7, 5), (99, 0)), TorchBuild.CUDA_12: ((5, 0), (10, 0))}
"""Compute capabilities for which each build has kernels: from, and below. CUDA 13 begins with
Turing; the build with 12.6 covers Maxwell to Hopper, but not Blackwell (PyTorch's RELEASE.md)."""


def fitting_builds(facts: NodeFacts) -> tuple[TorchBuild, ...]:
    """Return the builds that serve the most of a node's GPUs, the newest first.

    A node whose GPUs no build serves gets the newest one: its check explains the problem with the
    driver or the card, and an update of the driver solves it without a new build.
    """
    # With a problem, there are GPUs, but the driver does not list them.
    if not facts.gpus and facts.gpu_problem is None and not facts.mig_gpus:
        return (TorchBuild.CPU,)
    return _serving_builds(facts) or (TorchBuild.CUDA_13,)


def _serving_builds(facts: NodeFacts) -> tuple[TorchBuild, ...]:
    served = {build: sum(serves(build, gpu) for gpu in facts.gpus) for build in DRIVERS}
    most = max(served.values())
    return tuple(build for build in DRIVERS if most and served[build] == most)


def choose_torch(facts: NodeFacts, others: Iterable[NodeFacts] = ()) -> TorchBuild:
    """Return the build for a node: of those that serve it, the one that its cluster needs.

    NCCL refuses to connect ranks with different versions of NCCL, which come with the builds. So
    one build for all is better than the newest one, if it serves all cards.

    Args:
        facts: facts of the node.
        others: facts of the other nodes.
    """
    own = fitting_builds(facts)
    needed = {one[0] for other in others if len(one := _serving_builds(other)) == 1}
    return next((build for build in own if needed == {build}), own[0])


def tried_builds(nodes: Mapping[str, NodeFacts]) -> dict[str, str]:
    """Return the tested build of torch of each node with GPUs, such as `cu130`.

    Nodes with an unknown build are left out.
    """
    found = {}
    for name, facts in nodes.items():
        trial = facts.environment.trial if facts.environment else None
        if facts.gpus and trial is not None and (build := trial.torch.partition("+")[2]):
            found[name] = build
    return found


def serves(build: TorchBuild, gpu: GpuFacts) -> bool:
    """Return True if a build of CUDA runs on a GPU with its driver; unknown values are no
    obstacle.
    """
    driver, capability = numbers_of(gpu.driver), numbers_of(gpu.capability)
    oldest, newest = _CARDS[build]
    return not (
        (driver and driver[0] < DRIVERS[build])
        or (capability and not oldest <= capability < newest)
    )


def advise_one_build(nodes: Mapping[str, NodeFacts], builds: Mapping[str, str]) -> str:
    """Return how to give nodes with several builds of torch the same one, so that NCCL connects
    them.

    Args:
        nodes: facts of the nodes.
        builds: build of each node with GPUs, such as `cu130`.
    """
    wanted = {
        name: choose_torch(nodes[name], [nodes[one] for one in builds if one != name])
        for name in builds
    }
    if len(set(wanted.values())) > 1:
        older = [name for name, build in wanted.items() if build is not TorchBuild.CUDA_13]
        few = min(older, [name for name in wanted if name not in older], key=len)
        return f"No build serves all cards: to use NCCL, leave {show_list(few)} out of the run"
    changed = [name for name, build in wanted.items() if builds[name] != build.value]
    return "; ".join(f"rackless nodes setup {name}" for name in changed)


def is_of_other_build(trial: EnvironmentTrial | None, *wanted: TorchBuild) -> bool:
    """Return True if a tested environment has another build of torch than those wanted."""
    # Not for a node without GPUs, where each build runs.
    local = trial.torch.partition("+")[2] if trial else ""
    return TorchBuild.CPU not in wanted and local not in ("", *(one.value for one in wanted))


def numbers_of(version: str | None) -> tuple[int, ...]:
    """Return the numeric parts of a version; empty if it is unknown."""
    parts = (version or "").split(".")
    return tuple(int(part) for part in parts if part.isdigit())
