"""What the facts about a node mean for training: rows of the check, without asking anybody.

Every row that is not `pass` says what to do. What is not known is `unknown`, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from agents.contract.node import EnvironmentReport, GpuFacts, NodeFacts
from app.text import show_bytes, show_list

Status = Literal["pass", "warn", "fail", "unknown"]
LEAST_DISK_BYTES = 2 << 30
ENOUGH_DISK_BYTES = 20 << 30
MAX_SKEW_S = 2.0
OLDEST_DRIVER = 525
"""First driver for CUDA 12."""
GOOD_DRIVER = 580
"""First driver for CUDA 13, which torch 2.13 from PyPI is built with."""
LEAST_CAPABILITY = (7, 5)
"""Oldest architecture in CUDA 13 builds: Turing."""
_MIRRORED = (
    "In %UserProfile%\\.wslconfig on Windows write networkingMode=mirrored below [wsl2], then run: "
    "wsl --shutdown"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRow:
    """One result of a check."""

    check: str
    """What was looked at, such as `clock`."""
    node: str
    peer: str | None = None
    """The node at the other end; None: it concerns one node."""
    status: Status
    message: str
    fix: str = ""
    """What to do next; empty when all is well."""
    round_trip_s: float | None = None
    """Of a way between two nodes; None: not measured."""
    bytes_per_s: float | None = None


def judge_environment(node: str, report: EnvironmentReport) -> CheckRow:
    """Say whether the node's environment is the one of the lock."""
    if report.fits:
        text = f"Python {report.python_version}, lock {(report.lock_sha256 or '')[:8]}"
        return CheckRow(check="environment", node=node, status="pass", message=text)
    fix = f"rackless nodes setup {node}"
    if report.python is None:
        text = "there is no training environment yet"
    else:
        wrong = [*report.different, *(f"{name} is missing" for name in report.missing)]
        text = f"{report.python} does not fit the lock: {show_list(wrong[:4])}"
    return CheckRow(check="environment", node=node, status="fail", message=text, fix=fix)


def judge_disk(node: str, facts: NodeFacts) -> CheckRow:
    free = facts.disk_free_bytes
    if free is None:
        return _row("disk", node, "unknown", "free space is not known", "Look there: df -h ~")
    text = f"{show_bytes(free)} free"
    if free < LEAST_DISK_BYTES:
        return _row("disk", node, "fail", text, "Free some room there: df -h ~ shows what is full")
    if free < ENOUGH_DISK_BYTES:
        fix = "Free some room there before training a large model: df -h ~"
        return _row("disk", node, "warn", text, fix)
    return _row("disk", node, "pass", text)


def judge_clock(node: str, skew_s: float, facts: NodeFacts) -> CheckRow:
    """`skew_s`: the node's clock minus ours."""
    if abs(skew_s) <= MAX_SKEW_S:
        return _row("clock", node, "pass", f"{abs(skew_s):.1f} s from this PC's")
    side = "ahead of" if skew_s > 0 else "behind"
    fix = "sudo hwclock -s" if facts.wsl else "sudo timedatectl set-ntp true"
    return _row("clock", node, "warn", f"{abs(skew_s):.0f} s {side} this PC's", fix)


def judge_gpus(node: str, facts: NodeFacts) -> tuple[CheckRow, ...]:
    """One row for each card, or one for the node."""
    if facts.gpu_problem:
        fix = (
            "Install the newest NVIDIA driver on Windows, none inside WSL"
            if facts.wsl
            else "sudo ubuntu-drivers install, then restart that PC"
        )
        return (_row("gpu", node, "fail", facts.gpu_problem, fix),)
    if not facts.gpus:
        return (_row("gpu", node, "pass", "no NVIDIA GPU; trains on its CPU"),)
    return tuple(_judge_gpu(node, gpu, bool(facts.wsl)) for gpu in facts.gpus)


def judge_compiler(node: str, facts: NodeFacts, report: EnvironmentReport) -> tuple[CheckRow, ...]:
    """Say whether a node with GPUs can compile: torch.compile builds its kernels' launchers in C.

    Never `fail`: without a compiler the trainer computes as it always could.
    """
    if not facts.gpus:
        return ()
    missing = []
    if facts.compiler is None:
        missing.append("a C compiler")
    if report.headers is False:
        missing.append("Python's headers")
    if not missing:
        headers = " and Python's headers" if report.headers else ""
        return (_row("compiler", node, "pass", f"{facts.compiler}{headers}"),)
    verb = "is" if missing == ["a C compiler"] else "are"
    text = (
        f"{show_list(missing)} {verb} missing: the trainer compiles the model's layers on GPUs; "
        "without it trains, more slowly"
    )
    python = ".".join((report.python_version or "3").split(".")[:2])
    fix = f"sudo apt-get install -y build-essential python{python}-dev"
    return (_row("compiler", node, "warn", text, fix),)


def judge_wsl(node: str, facts: NodeFacts, num_nodes: int) -> tuple[CheckRow, ...]:
    """Training over several nodes needs mirrored networking: others cannot call in through NAT."""
    mode = facts.wsl
    if mode is None:
        return ()
    if mode == "mirrored":
        return (_row("wsl", node, "pass", "WSL networking is mirrored"),)
    if mode == "unknown":
        text = "the networking mode of WSL cannot be read"
        return (_row("wsl", node, "unknown", text, "Update WSL on that PC: wsl --update"),)
    text = f"WSL networking is {mode}: other nodes cannot reach this one"
    status: Status = "fail" if num_nodes > 1 else "warn"
    return (_row("wsl", node, status, text, _MIRRORED),)


def judge_pythons(reports: Mapping[str, EnvironmentReport]) -> tuple[CheckRow, ...]:
    """Compare the environments' Pythons: tensors pickle alike only within one minor version."""
    versions = {
        node: ".".join(report.python_version.split(".")[:2])
        for node, report in reports.items()
        if report.fits and report.python_version
    }
    if len(set(versions.values())) < 2:
        return ()
    usual = max(set(versions.values()), key=list(versions.values()).count)
    fix = f"Set it up again with Python {usual}: rackless nodes setup NAME"
    return tuple(
        _row("python", node, "warn", f"Python {version}, most others {usual}", fix)
        for node, version in versions.items()
        if version != usual
    )


def judge_mtus(mtus: Mapping[str, int | None]) -> tuple[CheckRow, ...]:
    """Different packet sizes on one network lose big packets and keep small ones."""
    known = {node: mtu for node, mtu in mtus.items() if mtu is not None}
    if len(set(known.values())) < 2:
        return ()
    usual = max(set(known.values()), key=list(known.values()).count)
    fix = f"sudo ip link set DEVICE mtu {usual}"
    return tuple(
        _row("mtu", node, "warn", f"packets of {mtu} bytes, most others {usual}", fix)
        for node, mtu in known.items()
        if mtu != usual
    )


def _judge_gpu(node: str, gpu: GpuFacts, is_wsl: bool) -> CheckRow:
    text = f"{gpu.name}, driver {gpu.driver or 'not known'}"
    update = "the Windows driver" if is_wsl else "it: sudo ubuntu-drivers install"
    capability = _numbers(gpu.capability)
    if capability and capability < LEAST_CAPABILITY:
        fix = "Leave this node out: name the others under nodes in the run file"
        return _row("gpu", node, "fail", f"{gpu.name} is too old for this version of torch", fix)
    driver = _numbers(gpu.driver)
    if not driver:
        return _row("gpu", node, "unknown", text, "Look there: nvidia-smi")
    if driver[0] < OLDEST_DRIVER:
        return _row("gpu", node, "fail", f"{text} is too old", f"Update {update}")
    if driver[0] < GOOD_DRIVER:
        old = f"{text} is older than {GOOD_DRIVER}, which CUDA 13 needs"
        return _row("gpu", node, "warn", old, f"Update {update}")
    return _row("gpu", node, "pass", text)


def _numbers(version: str | None) -> tuple[int, ...]:
    parts = (version or "").split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _row(check: str, node: str, status: Status, message: str, fix: str = "") -> CheckRow:
    return CheckRow(check=check, node=node, status=status, message=message, fix=fix)
