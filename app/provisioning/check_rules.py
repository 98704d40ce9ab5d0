"""Judge the facts of nodes: rows of the check that need no further request.

Every row that is not `pass` has a remedy. An unknown value gives `unknown`, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agents.contract.node import GpuFacts
from app.planning.hardware.mig import describe_mig, say_turn_off
from app.provisioning.check_row import CheckedGroup, CheckedNode, CheckRow, Status, make_row
from app.provisioning.checks.gpu import INSTALL, RESTART
from app.provisioning.checks.majority import find_odd
from app.provisioning.repairs import install_compiler, offer_driver
from app.provisioning.system_repairs import synchronise_clock
from app.provisioning.torch_build import (
    DRIVERS,
    TorchBuild,
    fitting_builds,
    is_of_other_build,
    numbers_of,
    serves,
)
from app.provisioning.windows.repair import run_script
from app.shell_words import posix_command
from app.text import show_bytes, show_list

MIN_DISK_BYTES = 2 << 30
"""Free space on a node below which no run can start, in bytes."""
ENOUGH_DISK_BYTES = 20 << 30
"""Free space that a large model and its checkpoints need, in bytes."""
MAX_SKEW_S = 2.0
"""Maximum difference between clocks for comparable logs of several nodes, in seconds."""
_RECORDER_FIXES = {
    "missing": "Check again in a minute; if it stays, free some space there, or restart that PC",
    "elsewhere": "Give this PC a folder of its own, as the row shared-home says",
}
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
    fix = f"rackless nodes setup {node.name}"
    if report.fits:
        text = f"Python {report.python_version}, lock {(report.lock_sha256 or '')[:8]}"
        tried = report.trial
        if tried is not None and tried.failed:
            card = tried.failed[0]
            text = f"{card.name} could not train with it: {card.problem}"
            return (make_row("environment", node.name, "fail", text, fix),)
        wanted = fitting_builds(node.facts)
        if tried is not None and report.built_with and is_of_other_build(tried, *wanted):
            builds = " or ".join(one.value for one in wanted)
            text = f"its torch is {tried.torch}, and the GPUs of this node need {builds}"
            return (make_row("environment", node.name, "fail", text, fix),)
        return (make_row("environment", node.name, "pass", text),)
    if report.python is None:
        text = "there is no training environment yet"
    else:
        wrong = [*report.different, *(f"{name} is missing" for name in report.missing)]
        text = f"{report.python} does not fit the lock file: {show_list(wrong[:4])}"
    return (make_row("environment", node.name, "fail", text, fix),)


def judge_disk(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check the free space on the disk with the agent's files."""
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
    if facts.recorder != "here":
        # Nothing is known of the driver.
        text = facts.gpu_problem or "its GPUs could not be listed"
        # The row of the shared folder already fails.
        graded: Status = "fail" if facts.recorder == "missing" else "unknown"
        return (make_row("gpu", name, graded, text, _RECORDER_FIXES[facts.recorder]),)
    if facts.gpu_problem:
        fix = (
            "Install the newest NVIDIA driver on Windows, none inside WSL" if facts.wsl else INSTALL
        )
        repair = offer_driver(facts)
        if node.examination.driver.was_updated:
            # Already updated: only a restart is missing.
            fix, repair = RESTART, None
        return (make_row("gpu", name, "fail", facts.gpu_problem, fix, repair),)
    # Its other GPUs can train without it.
    status: Status = "warn" if facts.gpus else "fail"
    divided = tuple(
        make_row("gpu", name, status, describe_mig(gpu), say_turn_off(gpu))
        for gpu in facts.mig_gpus
    )
    if not facts.gpus:
        whole = make_row("gpu", name, "pass", "no NVIDIA GPU; trains on its CPU")
        return divided or (whole,)
    build = fitting_builds(facts)[0]
    return (*(_judge_gpu(node, gpu, build) for gpu in facts.gpus), *divided)


def judge_compiler(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that a node with GPUs can compile: torch.compile builds its kernels' launchers in C."""
    # Never `fail`: without a compiler the trainer runs the layers uncompiled.
    facts, report = node.facts, node.environment
    if not facts.gpus:
        return ()
    missing = []
    if facts.compiler is None:
        missing.append("a C compiler")
    # None means unknown, not missing.
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
    version = re.match(r"3\.[0-9]{1,2}(?=\.|$)", report.python_version or "")
    python = version[0] if version else "3"
    fix = posix_command(
        "sudo", "apt-get", "install", "-y", "build-essential", f"python{python}-dev"
    )
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
    # A single node accepts no connections from other nodes.
    status: Status = "fail" if node.num_nodes > 1 else "warn"
    return (make_row("wsl", node.name, status, text, _MIRRORED, run_script(node.name)),)


def judge_pythons(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Compare the environments' Pythons: pickled tensors need equal minor versions."""
    reports = {name: node.environment for name, node in group.nodes.items()}
    # An environment that does not fit has its own failing row.
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
            f"Python {versions[name]}, while {odd.who} have {odd.value}",
            f"Set it up again with Python {odd.value}: rackless nodes setup {name}",
        )
        for name, odd in find_odd(versions).items()
    )


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


def _judge_gpu(node: CheckedNode, gpu: GpuFacts, build: TorchBuild) -> CheckRow:
    """Check that the node's build of torch runs on a GPU."""
    is_wsl = bool(node.facts.wsl)
    text = f"{gpu.name}, driver {gpu.driver or 'not known'}"
    update = "Update the Windows driver" if is_wsl else "Update it: sudo ubuntu-drivers install"
    repair = offer_driver(node.facts)
    leave_out = "Leave this node out: name the others under nodes in the run file"
    if not numbers_of(gpu.driver):
        return make_row("gpu", node.name, "unknown", text, "Run there: nvidia-smi")
    if serves(build, gpu):
        return make_row("gpu", node.name, "pass", text + _describe_build(build))
    # Compared without the driver: no update helps a card for which a build has no kernels.
    card = replace(gpu, driver=None)
    if not any(serves(one, card) for one in DRIVERS):
        old = f"{gpu.name} is too old for this version of torch"
        return make_row("gpu", node.name, "fail", old, leave_out)
    if not serves(build, card):
        old = (
            f"{gpu.name} has no kernels in the build of torch that this node gets: its other cards "
            "need another one"
        )
        return make_row("gpu", node.name, "fail", old, leave_out)
    # A CUDA 12.8 build in an environment that the user made still runs with an older driver.
    is_own = node.environment.fits and node.environment.built_with is None
    too_old = not is_own or numbers_of(gpu.driver)[0] < min(DRIVERS.values())
    # Only a warning if the present environment still runs with it.
    status: Status = "fail" if too_old else "warn"
    old = f"{text} is older than {DRIVERS[build]}, which the build of torch {build.value} needs"
    if build is TorchBuild.CUDA_13 and not serves(TorchBuild.CUDA_12, card):
        old += "; no build for older drivers has kernels for this card"
    return make_row("gpu", node.name, status, old, update, repair)


def _describe_build(build: TorchBuild) -> str:
    if build is TorchBuild.CUDA_13:
        return ""
    source = "" if build.is_shipped else f", with hashes of {build.index_url}, not of Rackless"
    return f"; gets the build of torch {build.value}{source}"
