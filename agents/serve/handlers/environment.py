"""Handle requests about the training environment: its tools, wheels, building and pruning."""

from __future__ import annotations

from typing import Any

from agents.contract.artifacts import PackagesBuild, PackagesReport
from agents.contract.environments import EnvironmentTools, KeptItems, WheelQuery, WheelReport
from agents.contract.node import EnvironmentBuild, EnvironmentQuery, EnvironmentReport
from agents.contract.wire import from_wire
from agents.node import build_tools, environment, kept_environments, packages, wheels
from agents.serve.channel import Call


def find(call: Call) -> EnvironmentReport:
    """Compare an interpreter's packages with the lock."""
    query = from_wire(EnvironmentQuery, call.args, "args")
    return environment.find(call.home, query, call.children)


def find_tools(call: Call) -> EnvironmentTools:
    """Look for a Python and a uv to build with."""
    return build_tools.find_tools(call.home, call.children)


def unpack_uv(call: Call) -> EnvironmentTools:
    """Unpack uv from its wheel."""
    query = from_wire(WheelQuery, call.args, "args")
    return build_tools.unpack_uv(call.home, query, call.children)


def bring_python(call: Call) -> EnvironmentTools:
    """Have uv download a Python, with `progress` events."""
    return build_tools.bring_python(call.home, call.children, call.progress)


def look_for_wheels(call: Call) -> WheelReport:
    """Say which wheels of a lock are here."""
    return wheels.look_for_wheels(call.home, from_wire(WheelQuery, call.args, "args"))


def fetch_wheels(call: Call) -> WheelReport:
    """Fetch the wheels of a lock, with `progress` events."""
    query = from_wire(WheelQuery, call.args, "args")
    return wheels.fetch_wheels(call.home, query, call.children, call.progress)


def build(call: Call) -> EnvironmentReport:
    """Build the environment from the lock, with `progress` events."""
    job = from_wire(EnvironmentBuild, call.args, "args")
    return environment.build(call.home, job, call.children, call.progress)


def list_kept(call: Call) -> KeptItems:
    """List what building environments has left here."""
    return KeptItems(items=kept_environments.list_kept(call.home))


def prune(call: Call) -> dict[str, Any]:
    """Delete some of that by name."""
    names = from_wire(tuple[str, ...], call.args.get("names"), "names")
    return {"freed_bytes": kept_environments.prune(call.home, names)}


def build_packages(call: Call) -> PackagesReport:
    """Put packages beside the training environment, with `progress` events."""
    job = from_wire(PackagesBuild, call.args, "job")
    return packages.build(call.home, job, call.children, call.progress)
