"""Handle requests about the training environment."""

from __future__ import annotations

from agents.contract.artifacts import PackagesBuild, PackagesReport
from agents.contract.node import EnvironmentBuild, EnvironmentQuery, EnvironmentReport
from agents.contract.wire import from_wire
from agents.node import environment, packages
from agents.serve.channel import Call


def find(call: Call) -> EnvironmentReport:
    """Compare an interpreter's packages with the lock."""
    query = from_wire(EnvironmentQuery, call.args, "args")
    return environment.find(call.home, query, call.children)


def build(call: Call) -> EnvironmentReport:
    """Build the environment from the lock, with `progress` events."""
    job = from_wire(EnvironmentBuild, call.args, "args")
    return environment.build(call.home, job, call.children, call.progress)


def build_packages(call: Call) -> PackagesReport:
    """Put packages beside the training environment, with `progress` events."""
    job = from_wire(PackagesBuild, call.args, "job")
    return packages.build(call.home, job, call.children, call.progress)
