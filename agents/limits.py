"""Memory, CPUs and processes that this process may use: the PC's, or less by a limit.

A container, a slice of systemd or a login may use less than the PC has. /proc shows the whole PC,
so each reader of these figures uses this module. Limits of control groups count in both versions
(also mounted together), on all levels: the tightest ancestor decides. Ranks inherit the groups of
the server that starts them. A group that cannot be read sets no limit.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from agents.contract.node import ResourceLimit
from agents.contract.shares import parse_mounts

# Memory beyond `memory.high` is taken away again at once, so it is a limit as well.
_MEMORY_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USAGE_FILES = ("memory.current", "memory.usage_in_bytes")
# Memory that the kernel takes back from a group before its limit is an error. The first version
# counts descendants only in names with this prefix.
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
_TOTAL = "total_"
# Version 1 shows the largest multiple of the page size, not a word, for no limit.
_NO_LIMIT = 1 << 60
# Limits of a process: constant of the module `resource`, field of /proc/self/statm, and setting.
_PROCESS_LIMITS = (("RLIMIT_AS", 0, "ulimit -v"), ("RLIMIT_DATA", 5, "ulimit -d"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory for a program of this login, in bytes."""

    total_bytes: int
    available_bytes: int
    """Memory that can be taken without swapping, or without a kill by the kernel."""
    pc_bytes: int
    """Memory of the whole PC."""
    limit: ResourceLimit | None = None
    """Limit that makes the total smaller than the PC's; None: no limit."""

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.available_bytes


def parse_memory(text: str) -> tuple[int, int] | None:
    """Return (used, total) bytes from /proc/meminfo; used excludes reclaimable memory."""
    sizes = _parse_meminfo(text)
    # MemAvailable includes the reclaimable page cache; MemFree does not.
    available = sizes.get("MemAvailable", sizes.get("MemFree"))
    if "MemTotal" not in sizes or available is None:
        return None
    return sizes["MemTotal"] - available, sizes["MemTotal"]


def read_memory(root: str = "") -> Memory | None:
    """Return the memory that this process may use; None if the kernel does not report it.

    Args:
        root: parent of /proc and /sys, for tests.
    """
    found = parse_memory(_read(root, "/proc/meminfo"))
    if found is None:
        return None
    used_bytes, pc_bytes = found
    limits = [(limit, most) for limit, most in _memory_limits(root) if limit.amount < pc_bytes]
    tightest = min((limit for limit, _ in limits), key=_amount, default=None)
    total_bytes = int(tightest.amount) if tightest else pc_bytes
    available_bytes = min((pc_bytes - used_bytes, total_bytes, *(most for _, most in limits)))
    return Memory(
        total_bytes=total_bytes,
        available_bytes=max(0, available_bytes),
        pc_bytes=pc_bytes,
        limit=tightest,
    )


def read_available_bytes() -> int:
    """Return the bytes of host memory that this process can still take; 0 if not known."""
    memory = read_memory()
    return memory.available_bytes if memory else 0


def count_cpus(root: str = "") -> int:
    """Return the number of CPUs that this process may keep busy, at least 1.

    A quota counts in whole CPUs: more threads than that wait for each other while paused.
    """
    limit = find_cpu_limit(root)
    return _count_usable() if limit is None else max(1, int(limit.amount))


def find_cpu_limit(root: str = "", process: int | None = None) -> ResourceLimit | None:
    """Return the limit that leaves a process fewer CPUs than the PC has; None: no limit."""
    usable, limits = _count_usable(), list(_cpu_quotas(root, process))
    if usable < (os.cpu_count() or 1):
        place = "cpuset or taskset (Cpus_allowed_list in /proc/self/status)"
        limits.append(ResourceLimit(kind="cpus", amount=usable, place=place))
    tightest = min(limits, key=_amount, default=None)
    return tightest if tightest and tightest.amount < (os.cpu_count() or 1) else None


def read_swap(root: str = "") -> tuple[int, ResourceLimit | None] | None:
    """Return the usable swap in bytes, and the limit that makes it smaller than the PC's."""
    pc_bytes = _parse_meminfo(_read(root, "/proc/meminfo")).get("SwapTotal")
    if pc_bytes is None:
        return None
    limits = [limit for limit in _swap_limits(root) if limit.amount < pc_bytes]
    tightest = min(limits, key=_amount, default=None)
    return (int(tightest.amount) if tightest else pc_bytes), tightest


def find_process_limit(root: str = "") -> ResourceLimit | None:
    """Return the smallest number of processes and threads that a limit permits; None: no limit."""
    limits = [
        ResourceLimit(kind="processes", amount=number, place=path)
        for folder in list_groups("pids", root)
        if (number := _read_number(root, path := f"{folder}/pids.max")) is not None
    ]
    # The kernel exempts root.
    if (soft := _soft_limit("RLIMIT_NPROC")) is not None and os.getuid() != 0:
        limits.append(ResourceLimit(kind="processes", amount=soft, place="ulimit -u"))
    return min(limits, key=_amount, default=None)


def read_limits(root: str = "") -> tuple[ResourceLimit, ...]:
    """Return the limits that leave this process less than the PC has, at most one of each kind."""
    memory, swap = read_memory(root), read_swap(root)
    found = (
        memory.limit if memory else None,
        find_cpu_limit(root),
        swap[1] if swap else None,
        find_process_limit(root),
    )
    return tuple(limit for limit in found if limit is not None)


def read_group_limits(process: int | None = None, root: str = "") -> tuple[float | None, ...]:
    """Return the bytes of memory and the CPUs that control groups leave a process; None: all.

    Args:
        process: process id; None for this process.
        root: parent of /proc and /sys, for tests.
    """
    found = _group_memory(root, process), _cpu_quotas(root, process)
    return tuple(min((limit.amount for limit in limits), default=None) for limits in found)


def list_groups(controller: str, root: str = "", process: int | None = None) -> tuple[str, ...]:
    """Return the folders of a process's control groups: its own, then all visible ancestors.

    Args:
        controller: name such as `memory`; a folder of version 2 may lack its files.
        root: parent of /proc and /sys, for tests.
        process: process id; None for this process.
    """
    # Its path in the hierarchy of version 2 (True), and of version 1.
    paths: dict[bool, str] = {}
    for line in _read(root, f"/proc/{process or 'self'}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or controller in controllers.split(","):
            paths[not controllers] = path
    found: list[str] = []
    tops: list[str] = []
    for mount in parse_mounts(_read(root, "/proc/self/mountinfo")):
        is_second = mount.kind == "cgroup2"
        is_first = mount.kind == "cgroup" and controller in mount.options.split(",")
        if is_second not in paths or not (is_first or is_second):
            continue
        inner, top = PurePosixPath(paths[is_second]), PurePosixPath(mount.place)
        # A container sees its own group as the top of the mount, under its name on the PC.
        if ".." in inner.parts or not inner.is_relative_to(mount.root):
            tops.append(mount.place)
            continue
        own = top / inner.relative_to(mount.root)
        found += [str(place) for place in (own, *own.parents) if place.is_relative_to(top)]
    # Without a mount that shows the group itself, that of a container shows an ancestor.
    return tuple(dict.fromkeys(found or tops))


def _amount(limit: ResourceLimit) -> float:
    return limit.amount


def _count_usable() -> int:
    # LXC shows the CPUs of a container only in what os.cpu_count() reads.
    return max(1, min(len(os.sched_getaffinity(0)), os.cpu_count() or 1))


# ------------------------------------------------------------------- limits


def _memory_limits(root: str) -> Iterator[tuple[ResourceLimit, int]]:
    """Yield each limit of memory, and the bytes that it leaves."""
    for limit in _group_memory(root):
        used_bytes = _read_group_usage(root, str(PurePosixPath(limit.place).parent))
        yield limit, max(0, int(limit.amount) - used_bytes)
    pages = _read(root, "/proc/self/statm").split()
    for name, field, place in _PROCESS_LIMITS:
        if (soft := _soft_limit(name)) is not None:
            used = int(pages[field]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > field else 0
            yield ResourceLimit(kind="memory", amount=soft, place=place), max(0, soft - used)


def _group_memory(root: str, process: int | None = None) -> Iterator[ResourceLimit]:
    folders = list_groups("memory", root, process)
    paths = (f"{folder}/{name}" for folder in folders for name in _MEMORY_FILES)
    found = [(path, _read_number(root, path)) for path in paths]
    # Last, since it names no setting: what version 1 tells of ancestors outside a container.
    found += [
        (f"{folder}/memory.stat", _read_stat(root, folder).get("hierarchical_memory_limit"))
        for folder in folders
    ]
    for path, number in found:
        if number is not None:
            yield ResourceLimit(kind="memory", amount=number, place=path)


def _read_group_usage(root: str, folder: str) -> int:
    """Return the bytes that a group uses without what the kernel can take back."""
    usages = (_read_number(root, f"{folder}/{name}") for name in _USAGE_FILES)
    used_bytes = next((usage for usage in usages if usage is not None), 0)
    stat = _read_stat(root, folder)
    freeable = sum(stat.get(_TOTAL + name, stat.get(name, 0)) for name in _RECLAIMABLE)
    return max(0, used_bytes - freeable)


def _swap_limits(root: str) -> Iterator[ResourceLimit]:
    for folder in list_groups("memory", root):
        path = f"{folder}/memory.swap.max"
        if (number := _read_number(root, path)) is not None:
            yield ResourceLimit(kind="swap", amount=number, place=path)
        # Version 1 limits the sum of memory and swap.
        path = f"{folder}/memory.memsw.limit_in_bytes"
        both = _read_number(root, path)
        memory = _read_number(root, f"{folder}/memory.limit_in_bytes")
        if both is not None and memory is not None and both < _NO_LIMIT:
            yield ResourceLimit(kind="swap", amount=max(0, both - memory), place=path)


def _cpu_quotas(root: str, process: int | None = None) -> Iterator[ResourceLimit]:
    for folder in list_groups("cpu", root, process):
        path = f"{folder}/cpu.max"
        quota, _, period = _read(root, path).partition(" ")
        if not quota:
            path = f"{folder}/cpu.cfs_quota_us"
            quota, period = _read(root, path), _read(root, f"{folder}/cpu.cfs_period_us")
        # Without a quota, version 2 says `max` and version 1 -1.
        if quota.strip().isdigit() and period.strip().isdigit() and int(period) > 0:
            yield ResourceLimit(kind="cpus", amount=int(quota) / int(period), place=path)


# ------------------------------------------------------------------- files


def _soft_limit(name: str) -> int | None:
    """Return a limit of this process (RLIMIT_...); None: not set."""
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _read(root: str, path: str) -> str:
    try:
        with open(root + path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _read_number(root: str, path: str) -> int | None:
    """Return the number in a file; None: it is missing, or says `max`."""
    text = _read(root, path).strip()
    return int(text) if text.isdigit() else None


def _read_stat(root: str, folder: str) -> dict[str, int]:
    lines = (line.split() for line in _read(root, f"{folder}/memory.stat").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def _parse_meminfo(text: str) -> dict[str, int]:
    """Return the sizes of /proc/meminfo, in bytes."""
    fields = (line.split() for line in text.splitlines())
    # In kB, which for the kernel means 1,024 bytes.
    return {
        line[0].rstrip(":"): int(line[1]) * 1024
        for line in fields
        if len(line) == 3 and line[1].isdigit()
    }
