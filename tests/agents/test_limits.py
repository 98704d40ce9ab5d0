"""Limits of containers, slices and logins, on a /proc and /sys of the test's own, and on real ones.

Each tree is written as the kernel shows it: both versions of control groups, alone and together,
with and without a namespace of its own.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.contract.node import ResourceLimit
from agents.limits import (
    Memory,
    count_cpus,
    find_process_limit,
    list_groups,
    read_group_limits,
    read_limits,
    read_memory,
    read_swap,
)

GIB = 1 << 30
UNLIMITED = "9223372036854771712\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "36 31 0:33 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "37 31 0:34 {root} /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
USER = "/user.slice/user-1000.slice/session-3.scope"


class Pc:
    """Root of a PC of 24 GiB and 16 CPUs, of which 20 GiB are available."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)
        self.write("/proc/meminfo", self.meminfo(24, 20))

    @staticmethod
    def meminfo(total_gib: int, available_gib: int) -> str:
        kib = 1 << 20
        return (
            f"MemTotal: {total_gib * kib} kB\nMemFree: 1 kB\n"
            f"MemAvailable: {available_gib * kib} kB\nHugePages_Total: 0\nSwapTotal: {8 * kib} kB\n"
        )

    def write(self, path: str, text: object) -> None:
        file = Path(self.root + path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def groups(self, own: str, mounts: str) -> None:
        self.write("/proc/self/cgroup", own)
        self.write("/proc/self/mountinfo", mounts)

    def memory(self) -> Memory:
        found = read_memory(self.root)
        assert found is not None
        return found


@pytest.fixture
def pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pc:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    return Pc(tmp_path)


def test_pc_without_groups_has_all_it_has(pc: Pc) -> None:
    assert pc.memory() == Memory(
        total_bytes=24 * GIB, available_bytes=20 * GIB, pc_bytes=24 * GIB, limit=None
    )
    assert (count_cpus(pc.root), read_limits(pc.root)) == (16, ())
    assert read_swap(pc.root) == (8 * GIB, None)


def test_limit_of_a_slice_counts_though_the_own_group_says_max(pc: Pc) -> None:
    pc.groups(f"0::{USER}", V2)
    pc.write(f"/sys/fs/cgroup{USER}/memory.max", "max")
    pc.write(f"/sys/fs/cgroup{USER}/cpu.max", "max 100000")
    pc.write("/sys/fs/cgroup/user.slice/memory.max", 6 * GIB)
    pc.write("/sys/fs/cgroup/user.slice/user-1000.slice/memory.high", 4 * GIB)
    pc.write("/sys/fs/cgroup/user.slice/user-1000.slice/memory.current", 3 * GIB)
    pc.write("/sys/fs/cgroup/user.slice/cpu.max", "250000 100000")
    memory = pc.memory()
    assert memory.total_bytes == 4 * GIB
    assert memory.available_bytes == GIB
    assert memory.limit is not None
    assert memory.limit.place.endswith("/user-1000.slice/memory.high")
    assert count_cpus(pc.root) == 2


def test_usage_of_another_level_may_leave_less_than_the_tightest_limit(pc: Pc) -> None:
    pc.groups(f"0::{USER}", V2)
    pc.write("/sys/fs/cgroup/user.slice/memory.max", 16 * GIB)
    pc.write("/sys/fs/cgroup/user.slice/memory.current", 15 * GIB)
    pc.write(f"/sys/fs/cgroup{USER}/memory.max", 8 * GIB)
    pc.write(f"/sys/fs/cgroup{USER}/memory.current", 2 * GIB)
    assert (pc.memory().total_bytes, pc.memory().available_bytes) == (8 * GIB, GIB)


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_reclaimable_cache_of_the_group_is_available(pc: Pc, prefix: str) -> None:
    pc.groups("0::/x", V2)
    pc.write("/sys/fs/cgroup/x/memory.max", 4 * GIB)
    pc.write("/sys/fs/cgroup/x/memory.current", 4 * GIB)
    stat = f"anon {GIB}\ninactive_file 7\n{prefix}inactive_file {GIB}\n{prefix}active_file {GIB}"
    pc.write("/sys/fs/cgroup/x/memory.stat", stat)
    assert pc.memory().available_bytes == 2 * GIB
    pc.write("/proc/meminfo", pc.meminfo(24, 1))
    assert pc.memory().available_bytes == GIB, "the PC itself has less"


def test_first_version_in_a_container_that_sees_its_group_as_the_top(pc: Pc) -> None:
    own = "/docker/4f2a"
    pc.groups(f"4:memory:{own}\n5:cpu,cpuacct:{own}\n6:pids:{own}\n0::/", V1.format(root=own))
    pc.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", 2 * GIB)
    pc.write("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", 3 * GIB)
    pc.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 150_000)
    pc.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100_000)
    pc.write("/sys/fs/cgroup/pids/pids.max", 300)
    assert {limit.kind: limit.amount for limit in read_limits(pc.root)} == {
        "memory": 2 * GIB,
        "cpus": 1.5,
        "swap": GIB,
        "processes": 300,
    }
    assert count_cpus(pc.root) == 1
    assert read_group_limits(None, pc.root) == (2 * GIB, 1.5)


def test_first_version_tells_of_ancestors_outside_the_container(pc: Pc) -> None:
    pc.groups("4:memory:/docker/4f2a", V1.format(root="/docker/4f2a"))
    pc.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED)
    pc.write("/sys/fs/cgroup/memory/memory.stat", f"hierarchical_memory_limit {5 * GIB}")
    assert pc.memory().limit == ResourceLimit(
        kind="memory", amount=5 * GIB, place="/sys/fs/cgroup/memory/memory.stat"
    )


def test_ancestor_that_is_seen_is_named_by_its_own_file(pc: Pc) -> None:
    pc.groups("4:memory:/a/b", V1.format(root="/"))
    stat = f"hierarchical_memory_limit {5 * GIB}"
    pc.write("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", UNLIMITED)
    pc.write("/sys/fs/cgroup/memory/a/b/memory.stat", stat)
    pc.write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 5 * GIB)
    limit = pc.memory().limit
    assert limit is not None
    assert limit.place == "/sys/fs/cgroup/memory/a/memory.limit_in_bytes"


def test_first_version_without_limits_sets_none(pc: Pc) -> None:
    pc.groups("4:memory:/\n5:cpu,cpuacct:/\n6:pids:/", V1.format(root="/"))
    pc.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED)
    pc.write("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", UNLIMITED)
    pc.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    pc.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100_000)
    pc.write("/sys/fs/cgroup/pids/pids.max", "max")
    assert read_limits(pc.root) == ()


@pytest.mark.parametrize("second", ["0::/", "0::/x"])
def test_versions_together_are_both_read(pc: Pc, second: str) -> None:
    # Memory in version 1, CPUs in version 2, as a kernel option chooses.
    mounts = V1.format(root="/").replace("rw,cpu,cpuacct", "rw,blkio")
    pc.groups(f"4:memory:/x\n{second}", mounts)
    pc.write("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", 3 * GIB)
    folder = f"/sys/fs/cgroup/unified{second[3:].rstrip('/')}"
    pc.write(f"{folder}/cpu.max", "400000 100000")
    assert (pc.memory().total_bytes, count_cpus(pc.root)) == (3 * GIB, 4)


@pytest.mark.parametrize(
    ("own", "root"), [("/../../x", "/"), ("/", "/.."), ("/other", "/docker/4f2a")]
)
def test_group_outside_the_namespace_has_the_limits_of_the_top_that_is_seen(
    pc: Pc, own: str, root: str
) -> None:
    pc.groups(f"0::{own}", V2.replace(" / /sys", f" {root} /sys"))
    pc.write("/sys/fs/cgroup/memory.max", 2 * GIB)
    assert list_groups("memory", pc.root) == ("/sys/fs/cgroup",)
    assert pc.memory().total_bytes == 2 * GIB


def test_foreign_group_mounted_elsewhere_does_not_count(pc: Pc) -> None:
    other = "50 23 0:26 /other /mnt/other rw - cgroup2 cgroup2 rw\n"
    pc.groups("0::/x", V2 + other)
    pc.write("/mnt/other/memory.max", GIB)
    pc.write("/sys/fs/cgroup/x/memory.max", 3 * GIB)
    assert pc.memory().total_bytes == 3 * GIB


def test_lxcfs_has_done_the_work_already(pc: Pc) -> None:
    pc.write("/proc/meminfo", pc.meminfo(2, 1))
    pc.groups("0::/", V2)
    pc.write("/sys/fs/cgroup/memory.max", 2 * GIB)
    pc.write("/sys/fs/cgroup/memory.current", GIB)
    assert pc.memory() == Memory(total_bytes=2 * GIB, available_bytes=GIB, pc_bytes=2 * GIB)


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("150000 100000", 1), ("20000 100000", 1), ("300000 100000", 3), ("max 100000", 16),
     ("9900000 100000", 16), ("", 16), ("100000", 16), ("1 0", 16), ("-1 100000", 16)],
)  # fmt: skip
def test_quota_counts_in_whole_cpus(pc: Pc, quota: str, cpus: int) -> None:
    pc.groups("0::/x", V2)
    pc.write("/sys/fs/cgroup/x/cpu.max", quota)
    assert count_cpus(pc.root) == cpus


def test_cpuset_and_taskset_count(pc: Pc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 7})
    pc.groups("0::/x", V2)
    pc.write("/sys/fs/cgroup/x/cpu.max", "900000 100000")
    assert count_cpus(pc.root) == 2
    (limit,) = read_limits(pc.root)
    assert (limit.kind, limit.amount) == ("cpus", 2)
    assert "taskset" in limit.place


def test_swap_limit_of_the_second_version(pc: Pc) -> None:
    pc.groups("0::/x", V2)
    pc.write("/sys/fs/cgroup/x/memory.swap.max", 0)
    limit = ResourceLimit(kind="swap", amount=0, place="/sys/fs/cgroup/x/memory.swap.max")
    assert read_swap(pc.root) == (0, limit)


def test_processes_have_the_smallest_number(pc: Pc, monkeypatch: pytest.MonkeyPatch) -> None:
    pc.groups("0::/a/b", V2)
    pc.write("/sys/fs/cgroup/a/pids.max", 512)
    pc.write("/sys/fs/cgroup/a/b/pids.max", "max")
    limits = {resource.RLIMIT_NPROC: (100, 100)}
    whole = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, whole))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    limit = find_process_limit(pc.root)
    assert limit is not None
    assert limit.amount == 512, "root has no limit of its login"
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    limit = find_process_limit(pc.root)
    assert limit is not None
    assert (limit.amount, limit.place) == (100, "ulimit -u")


def test_addresses_of_the_login_limit_memory(pc: Pc, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: (4 * GIB, 4 * GIB)}
    whole = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, whole))
    pages = GIB // os.sysconf("SC_PAGE_SIZE")
    pc.write("/proc/self/statm", f"{pages} 1 1 1 0 1 0")
    memory = pc.memory()
    assert (memory.total_bytes, memory.available_bytes) == (4 * GIB, 3 * GIB)
    assert memory.limit == ResourceLimit(kind="memory", amount=4 * GIB, place="ulimit -v")


def test_folder_that_may_not_be_read_sets_no_limit(pc: Pc) -> None:
    pc.groups("0::/x", V2)  # without any file there
    assert read_limits(pc.root) == ()
    Path(pc.root, "sys/fs").mkdir(parents=True)
    Path(pc.root, "sys/fs/cgroup").write_text("no folder")
    assert pc.memory().total_bytes == 24 * GIB


LINE = st.text(alphabet="0:,/. memorycpu2max\n-", max_size=120)


@given(own=LINE, mounts=LINE, limit=LINE)
def test_odd_texts_of_the_kernel_are_no_error(
    tmp_path_factory: pytest.TempPathFactory, own: str, mounts: str, limit: str
) -> None:
    pc = Pc(tmp_path_factory.mktemp("pc"))
    pc.groups(own, V2 + mounts)
    for name in ("memory.max", "memory.stat", "cpu.max", "pids.max", "memory.swap.max"):
        pc.write(f"/sys/fs/cgroup/{name}", limit)
    assert pc.memory().total_bytes <= 24 * GIB
    assert count_cpus(pc.root) >= 1
    assert len(read_limits(pc.root)) <= 4


@pytest.fixture
def small_groups() -> Iterator[Path]:
    """A real control group of 256 MiB that holds another one without a limit."""
    for parent, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        group = Path("/sys/fs/cgroup", parent, f"rackless-limit-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(256 << 20))
            (group / "inner").mkdir()
            yield group / "inner"
            (group / "inner").rmdir()
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_real_limit_of_an_ancestor_is_the_memory_of_a_process(small_groups: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from agents.limits import read_memory; memory = read_memory()\n"
        "print(memory.total_bytes, memory.available_bytes, memory.limit.place)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(small_groups)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    total, available, place = done.stdout.split()
    assert int(total) == 256 << 20
    assert 0 < int(available) < 256 << 20
    assert Path(place).parent == small_groups.parent
