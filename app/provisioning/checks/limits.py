"""Judge the limits of the login's programs: temporary files, open files, processes, memory."""

from __future__ import annotations

from agents.contract.requests.examination import NO_LIMIT
from app.presentation.limit_text import find_limit, say_raise, show_cores
from app.provisioning.check_row import CheckedNode, CheckRow, make_row
from app.shell_words import posix_command
from app.text import show_bytes

ENOUGH_TEMPORARY_BYTES = 512 << 20
"""Minimum space for temporary files of compilers and installers, in bytes."""
ENOUGH_OPEN_FILES = 1024
"""Minimum of open files per rank: model shards, data loaders, connections; Linux's default."""
ENOUGH_PROCESSES = 1000
"""Minimum of processes and threads of one login: each rank and its compilers have some per core."""


def judge_temporary(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check the folder for the temporary files of compilers and installers."""
    system = node.examination.system
    folder, free = system.temporary_folder or "/tmp", system.temporary_free_bytes
    if system.temporary_writable is False:
        text = f"{folder} cannot be written, so nothing can be compiled or installed there"
        fix = (
            f"Run there: {posix_command('findmnt', '-T', folder)}; "
            f"{posix_command('sudo', 'chmod', '1777', folder)}"
        )
        return (make_row("tmp", node.name, "fail", text, fix),)
    if free is None:
        fix = f"Run there: {posix_command('df', '-h', folder)}"
        return (make_row("tmp", node.name, "unknown", f"{folder} could not be read", fix),)
    if free < ENOUGH_TEMPORARY_BYTES:
        text = f"{folder} is nearly full: {show_bytes(free)} left for compilers and installers"
        largest = posix_command("du", "-ahx", folder)
        fix = f"Delete old files there; this lists the largest: {largest} | sort -rh | head"
        return (make_row("tmp", node.name, "warn", text, fix),)
    return (make_row("tmp", node.name, "pass", f"{show_bytes(free)} free in {folder}"),)


def judge_limits(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check the limits of the login (`ulimit`), which ranks inherit."""
    system = node.examination.system
    files, processes = system.max_open_files, system.max_processes
    addresses = system.max_address_bytes
    if files is None or processes is None or addresses is None:
        text, fix = "the limits of this login are not known", "Run there: ulimit -a"
        return (make_row("limits", node.name, "unknown", text, fix),)
    group, cpus = (find_limit(node.facts, kind) for kind in ("processes", "cpus"))
    if group is not None:
        processes = min(processes, int(group.amount))
    evidence = (
        f"open files {_show(files)}, processes {_show(processes)}, "
        f"addresses {'without limit' if addresses == NO_LIMIT else show_bytes(addresses)}"
    )
    if cpus is not None:
        evidence += f"; {show_cores(node.facts)}"
    raise_ = (
        "Raise the limit {0} in /etc/security/limits.conf there, and check for ulimit in ~/.bashrc "
        "and ~/.profile"
    )
    # First, since it stops CUDA from starting; the other two only cause errors later.
    if addresses != NO_LIMIT:
        text = (
            f"programs of this login get at most {show_bytes(addresses)} of addresses, while CUDA "
            "reserves more than all memory"
        )
        fix = raise_.format("as")
    elif files < ENOUGH_OPEN_FILES:
        text = f"a program of this login may have only {files} files open"
        fix = raise_.format("nofile")
    elif processes < ENOUGH_PROCESSES and group is not None and processes == group.amount:
        text = f"{group.place} permits only {processes} processes and threads"
        fix = say_raise(group)
    elif processes < ENOUGH_PROCESSES:
        text = f"this login may have only {processes} processes and threads"
        fix = raise_.format("nproc")
    elif cpus is not None and cpus.amount < 1:
        text = f"{cpus.place} leaves this node {cpus.amount:g} of a CPU, so all work there waits"
        fix = say_raise(cpus)
    else:
        return (make_row("limits", node.name, "pass", evidence, "", evidence=evidence),)
    return (make_row("limits", node.name, "warn", text, fix, evidence=evidence),)


def _show(number: int) -> str:
    return "without limit" if number == NO_LIMIT else str(number)
