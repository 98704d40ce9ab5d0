"""Handlers of requests about the training environment: tools, wheels, building and pruning."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

from agents.contract.environments import (
    DeviceTrial,
    EnvironmentTools,
    EnvironmentTrial,
    KeptItems,
    TrialJob,
    WheelReport,
)
from agents.contract.node import EnvironmentReport
from agents.contract.requests.environment import (
    BringPython,
    EnvironmentBuild,
    EnvironmentQuery,
    FetchWheels,
    FindBuildTools,
    ListKept,
    LookForWheels,
    PackagesBuild,
    PackagesReport,
    PruneKept,
    TryEnvironment,
    UnpackUv,
)
from agents.contract.requests.storage import Freed
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.node import build_tools, environment, kept_environments, packages, wheels
from agents.node.facts import read_gpus
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.serve.programs import report_of
from agents.supervisor.leases import borrow_device


@handles(EnvironmentQuery)
def find(call: Call, request: EnvironmentQuery) -> EnvironmentReport:
    """Compare an interpreter's packages with the lock."""
    return environment.find(call.home, request, call.children)


@handles(FindBuildTools)
def find_tools(call: Call, request: FindBuildTools) -> EnvironmentTools:
    """Find a Python and a uv to build with."""
    return build_tools.find_tools(call.home, call.children)


@handles(UnpackUv)
def unpack_uv(call: Call, request: UnpackUv) -> EnvironmentTools:
    """Unpack uv from its wheel."""
    return build_tools.unpack_uv(call.home, request.query, call.children)


@handles(BringPython)
def bring_python(call: Call, request: BringPython) -> EnvironmentTools:
    """Have uv download a Python, with `progress` events."""
    return build_tools.bring_python(call.home, call.children, call.progress)


@handles(LookForWheels)
def look_for_wheels(call: Call, request: LookForWheels) -> WheelReport:
    """Return which wheels of a lock are on this node."""
    return wheels.look_for_wheels(call.home, request.query)


@handles(FetchWheels)
def fetch_wheels(call: Call, request: FetchWheels) -> WheelReport:
    """Download the wheels of a lock, with `progress` events."""
    return wheels.fetch_wheels(call.home, request.query, call.children, call.progress)


@handles(EnvironmentBuild)
def build(call: Call, request: EnvironmentBuild) -> EnvironmentReport:
    """Build the environment from the lock, with `progress` events."""
    return environment.build(call.home, request, call.children, call.progress)


@handles(TryEnvironment)
def try_environment(call: Call, request: TryEnvironment) -> EnvironmentReport:
    """Import the training packages and do one small step on each free device; record the result.

    Raises:
        ExpectedError: there is no environment, or a package cannot be imported.
    """
    adopted = environment.read_adopted(call.home)
    if adopted is None or adopted.python is None:
        raise ExpectedError("There is no training environment on this node to try.")
    gpus, _ = read_gpus(call.home)
    node = socket.gethostname()
    devices = []
    with contextlib.ExitStack() as held:
        for gpu in gpus:
            trial = DeviceTrial(device=f"cuda:{gpu.index}", name=gpu.name)
            try:
                held.enter_context(
                    # The callback declines to wait: a busy GPU is reported, not tried.
                    borrow_device(call.home, gpu.uuid, "a trial", node, lambda name: False)
                )
            except ExpectedError as busy:
                trial = replace(trial, problem=f"not tried: {busy.message}")
            devices.append(trial)
        cpu = DeviceTrial(device="cpu", name="CPU")
        # The CPU is tried only if there is no GPU: a step on it says nothing about a GPU.
        job = TrialJob(devices=tuple(devices) or (cpu,))
        found = report_of(
            call, adopted.python, "agents.trainer.trial", to_wire(job), "The trial of training"
        )
    return environment.keep_trial(call.home, from_wire(EnvironmentTrial, found, "report"))


@handles(ListKept)
def list_kept(call: Call, request: ListKept) -> KeptItems:
    """List the items that building environments has left on this node."""
    return KeptItems(items=kept_environments.list_kept(call.home))


@handles(PruneKept)
def prune(call: Call, request: PruneKept) -> Freed:
    """Delete some of those items by name."""
    return Freed(freed_bytes=kept_environments.prune(call.home, request.names))


@handles(PackagesBuild)
def build_packages(call: Call, request: PackagesBuild) -> PackagesReport:
    """Install packages into a folder of their own, with `progress` events."""
    return packages.build(call.home, request, call.children, call.progress)
