"""Judge what nodes say of themselves: rows of the check that need no further request.

Every row that is not `pass` says what to do. A value that is not known gives `unknown`, never a
guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from agents.contract.node import GpuFacts, NodeFacts
from app.provisioning.check_row import CheckedGroup, CheckedNode, CheckRow, Status, make_row
from app.provisioning.repairs import install_compiler, offer_driver
from app.provisioning.system_repairs import synchronise_clock
from app.provisioning.windows.repair import run_script
from app.text import show_bytes, show_list

Value = TypeVar("Value", str, int)
MIN_DISK_BYTES = 2 << 30
"""Free space on a node below which no run can start, in bytes."""
ENOUGH_DISK_BYTES = 20 << 30
"""Free space that a large model and its checkpoints need, in bytes."""
MAX_SKEW_S = 2.0
"""Maximum difference between clocks that logs of several nodes can bear, in seconds."""
MIN_DRIVER = 525
"""Oldest driver that supports CUDA 12."""
GOOD_DRIVER = 580
"""Oldest driver that supports CUDA 13, which torch 2.13 from PyPI is built with."""
MIN_CAPABILITY = (7, 5)
"""Oldest compute capability in CUDA 13 builds: Turing."""
_MIRRORED = (
    "Write networkingMode=mirrored below [wsl2] in %UserProfile%\\.wslconfig on Windows, then run: "
    "wsl --shutdown"
)


def judge_reach(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Report the round trip to a node that answered."""
    facts = node.facts
    text = f"answers in {node.round_trip_s * 1000:.1f} ms; {facts.os}, Python {facts.python}"
    return (make_row("reach", node.name, "pass", text),)


def judge_environment(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the node's training environment fits the lock file."""
    report = node.environment
    if report.fits:
        text = f"Python {report.python_version}, lock {(report.lock_sha256 or '')[:8]}"
        return (make_row("environment", node.name, "pass", text),)
    fix = f"rackless nodes setup {node.name}"
    if report.python is None:
        text = "there is no training environment yet"
    else:
        wrong = [*report.different, *(f"{name} is missing" for name in report.missing)]
        text = f"{report.python} does not fit the lock file: {show_list(wrong[:4])}"
    return (make_row("environment", node.name, "fail", text, fix),)


def judge_disk(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check the free space where the agent keeps its files."""
    return (_judge_disk(node.name, node.facts.disk_free_bytes),)


def judge_clock(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the node's clock agrees with the clock of this PC."""
    skew_s = node.skew_s
    if abs(skew_s) <= MAX_SKEW_S:
        text = f"within {abs(skew_s):.1f} s of this PC's clock"
        return (make_row("clock", node.name, "pass", text),)
    side = "ahead of" if skew_s > 0 else "behind"
    # WSL has no time service of its own: its clock drifts while Windows sleeps.
    fix = "sudo hwclock -s" if node.facts.wsl else "sudo timedatectl set-ntp true"
    text = f"{abs(skew_s):.0f} s {side} this PC's clock"
    repair = None if node.facts.wsl else synchronise_clock()
    return (make_row("clock", node.name, "warn", text, fix, repair),)


def judge_gpus(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check the driver and the age of each GPU; one row per GPU, or one for the node."""
    name, facts = node.name, node.facts
    if facts.gpu_problem:
        fix = (
            "Install the newest NVIDIA driver on Windows, none inside WSL"
            if facts.wsl
            else "sudo ubuntu-drivers install, then restart that PC"
        )
        repair = offer_driver(facts)
        return (make_row("gpu", name, "fail", facts.gpu_problem, fix, repair),)
    if not facts.gpus:
        return (make_row("gpu", name, "pass", "no NVIDIA GPU; trains on its CPU"),)
    return tuple(_judge_gpu(name, gpu, facts) for gpu in facts.gpus)


def judge_compiler(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that a node with GPUs can compile: torch.compile builds its kernels' launchers in C.

    Never `fail`: without a compiler the trainer runs the layers uncompiled.
    """
    facts, report = node.facts, node.environment
    if not facts.gpus:
        return ()
    missing = []
    if facts.compiler is None:
        missing.append("a C compiler")
    # None means unknown, which is not missing.
    if report.headers is False:
        missing.append("Python's headers")
    if not missing:
        headers = " and Python's headers" if report.headers else ""
        return (make_row("compiler", node.name, "pass", f"{facts.compiler}{headers}"),)
    verb = "is" if missing == ["a C compiler"] else "are"
    text = (
        f"{show_list(missing)} {verb} missing, so the model's layers cannot be compiled for its "
        "GPUs and training is slower"
    )
    python = ".".join((report.python_version or "3").split(".")[:2])
    fix = f"sudo apt-get install -y build-essential python{python}-dev"
    return (make_row("compiler", node.name, "warn", text, fix, install_compiler(python)),)


def judge_wsl(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check the networking mode of WSL: other nodes cannot connect through its NAT."""
    mode = node.facts.wsl
    if mode is None:
        return ()
    if mode == "mirrored":
        return (make_row("wsl", node.name, "pass", "WSL networking is mirrored"),)
    if mode == "unknown":
        text, fix = "the networking mode of WSL cannot be read", "Run on that PC: wsl --update"
        return (make_row("wsl", node.name, "unknown", text, fix),)
    text = f"WSL networking is {mode}: other nodes cannot reach this one"
    # A run on a single node needs no connection from another one.
    status: Status = "fail" if node.num_nodes > 1 else "warn"
    return (make_row("wsl", node.name, status, text, _MIRRORED, run_script(node.name)),)


def judge_pythons(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Compare the environments' Pythons: pickled tensors need equal minor versions."""
    reports = {name: node.environment for name, node in group.nodes.items()}
    # An environment that does not fit has a failing row of its own.
    versions = {
        name: ".".join(report.python_version.split(".")[:2])
        for name, report in reports.items()
        if report.fits and report.python_version
    }
    return tuple(
        make_row(
            "python",
            name,
            "warn",
            f"Python {versions[name]}, while most nodes have {usual}",
            f"Set it up again with Python {usual}: rackless nodes setup {name}",
        )
        for name, usual in find_odd(versions).items()
    )


def find_odd(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return, for each node that differs from the majority, the value of the majority."""
    if not values:
        return {}
    usual = max(set(values.values()), key=list(values.values()).count)
    return {name: usual for name, value in values.items() if value != usual}


def _judge_disk(node: str, free: int | None) -> CheckRow:
    if free is None:
        return make_row("disk", node, "unknown", "free space is not known", "Run there: df -h ~")
    text = f"{show_bytes(free)} free"
    if free < MIN_DISK_BYTES:
        fix = "Free some space there; df -h ~ shows what is full"
        return make_row("disk", node, "fail", text, fix)
    if free < ENOUGH_DISK_BYTES:
        fix = "Free some space there before training a large model: df -h ~"
        return make_row("disk", node, "warn", text, fix)
    return make_row("disk", node, "pass", text)


def _judge_gpu(node: str, gpu: GpuFacts, facts: NodeFacts) -> CheckRow:
    text = f"{gpu.name}, driver {gpu.driver or 'not known'}"
    update = "the Windows driver" if facts.wsl else "it: sudo ubuntu-drivers install"
    repair = offer_driver(facts)
    capability = numbers_of(gpu.capability)
    # Before the driver: no update helps a card that torch does not support.
    if capability and capability < MIN_CAPABILITY:
        fix = "Leave this node out: name the others under nodes in the run file"
        return make_row(
            "gpu", node, "fail", f"{gpu.name} is too old for this version of torch", fix
        )
    driver = numbers_of(gpu.driver)
    if not driver:
        return make_row("gpu", node, "unknown", text, "Run there: nvidia-smi")
    if driver[0] < MIN_DRIVER:
        return make_row("gpu", node, "fail", f"{text} is too old", f"Update {update}", repair)
    if driver[0] < GOOD_DRIVER:
        old = f"{text} is older than {GOOD_DRIVER}, which CUDA 13 needs"
        return make_row("gpu", node, "warn", old, f"Update {update}", repair)
    return make_row("gpu", node, "pass", text)


def numbers_of(version: str | None) -> tuple[int, ...]:
    """Return the parts of a version that are numbers; none where it is not known."""
    parts = (version or "").split(".")
    return tuple(int(part) for part in parts if part.isdigit())
