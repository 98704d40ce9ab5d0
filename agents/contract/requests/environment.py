"""Requests about the training environment of a node: tools, wheels, building and pruning."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.environments import (
    EnvironmentTools,
    KeptItems,
    WheelQuery,
    WheelReport,
    WheelTarget,
)
from agents.contract.node import EnvironmentReport
from agents.contract.requests import DELETE_S, LOOK_S, NodeRequest
from agents.contract.requests.storage import Freed

TRIAL_S = 600.0
"""Maximum duration of trying an environment, in seconds: it imports torch, possibly from a slow
disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentQuery(NodeRequest[EnvironmentReport]):
    """Compare an interpreter's packages with a lock."""

    kind = "environment.find"
    limit_s = LOOK_S
    lock_sha256: str
    requirements: dict[str, str]
    """Exact version of each distribution, by its name."""
    python: str | None = None
    """Interpreter to inspect; None: the one adopted or built before."""
    adopt: bool = False
    """True to keep `python` as this node's environment if it fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentBuild(NodeRequest[EnvironmentReport]):
    """Build the environment from wheels on the node, with `progress` events."""

    kind = "environment.build"
    limit_s = None
    lock_sha256: str
    lock_text: str
    """A lock: exact versions with the hashes of their files."""
    requirements: dict[str, str]
    target: WheelTarget
    """Interpreter that the wheels were chosen for."""
    python: str
    """Path of that interpreter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FindBuildTools(NodeRequest[EnvironmentTools]):
    """Find a Python and a uv to build with."""

    kind = "environment.tools"
    limit_s = LOOK_S


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpackUv(NodeRequest[EnvironmentTools]):
    """Unpack uv from its wheel on the node."""

    kind = "environment.uv"
    flat = "query"
    limit_s = LOOK_S
    query: WheelQuery


@dataclass(frozen=True, kw_only=True, slots=True)
class BringPython(NodeRequest[EnvironmentTools]):
    """Have uv download a Python, with `progress` events."""

    kind = "environment.python"
    limit_s = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TryEnvironment(NodeRequest[EnvironmentReport]):
    """Import the training packages and do one small step on each device, with `progress` events."""

    kind = "environment.try"
    limit_s = TRIAL_S


@dataclass(frozen=True, kw_only=True, slots=True)
class ListKept(NodeRequest[KeptItems]):
    """List what building environments has left on the node."""

    kind = "environment.kept"
    limit_s = LOOK_S


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneKept(NodeRequest[Freed]):
    """Delete some of those items by name."""

    kind = "environment.prune"
    limit_s = DELETE_S
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LookForWheels(NodeRequest[WheelReport]):
    """Find the wheels of a lock that are on the node."""

    kind = "wheels.look"
    flat = "query"
    limit_s = LOOK_S
    query: WheelQuery


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchWheels(NodeRequest[WheelReport]):
    """Download the wheels of a lock, which may be gigabytes, with `progress` events."""

    kind = "wheels.fetch"
    flat = "query"
    limit_s = None
    query: WheelQuery


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagesReport:
    """Result of a PackagesBuild."""

    path: str | None = None
    """Folder relative to the agent's home; None: the environment itself has the packages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagesBuild(NodeRequest[PackagesReport]):
    """Install packages into a folder of their own; the training environment stays unchanged."""

    kind = "packages.build"
    limit_s = None
    python: str
    lock_sha256: str
    lock_text: str
    """A lock: exact versions with the hashes of their files, dependencies included."""
    requirements: dict[str, str]
