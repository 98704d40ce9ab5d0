"""Rows about a node's system: what each reading means, and what is only unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.contract.node import InterfaceFacts, NodeFacts, ResourceLimit
from app.provisioning import check_rules
from app.provisioning.checks import system
from tests.fakes.checked import FACTS, checked, group_of, system_with


@pytest.mark.parametrize(
    ("judge", "changes", "status", "says"),
    [
        ("home", {}, "pass", "programs start"),
        ("home", {"home_writable": False}, "fail", "cannot be written"),
        ("home", {"home_executable": False}, "fail", "noexec"),
        ("home", {"home_file_system": "nfs4"}, "warn", "shared drive"),
        ("home", {"home_writable": None}, "unknown", "could not be tested"),
        ("inodes", {}, "pass", "1000000 files"),
        ("inodes", {"inodes": 0, "inodes_free": 0}, "pass", "no limit"),
        ("inodes", {"inodes_free": 20_000}, "warn", "20000 more files"),
        ("inodes", {"inodes_free": 100}, "fail", "100 more files"),
        ("inodes", {"inodes_free": None}, "unknown", "not known"),
        ("swap", {"swap_bytes": 0}, "pass", "RAM enough"),
        ("swap", {"swap_bytes": None}, "unknown", "not known"),
        ("shm", {}, "pass", "16.0 GiB of 16.0 GiB"),
        ("shm", {"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "warn", "has only 64"),
        ("shm", {"shm_free_bytes": 1 << 20}, "warn", "has only 1.0 MiB"),
        ("shm", {"shm_bytes": None}, "unknown", "cannot be read"),
        ("sync", {}, "pass", "a time server keeps"),
        ("sync", {"clock_synchronised": False, "clock_service": "off"}, "warn", "will drift"),
        ("sync", {"clock_synchronised": False, "clock_service": "on"}, "warn", "no server yet"),
        ("sync", {"clock_synchronised": False, "clock_service": "none"}, "warn", "will drift"),
        ("sync", {"clock_synchronised": None, "clock_service": None}, "unknown", "not known"),
        ("sudo", {}, "pass", "with its password"),
        ("sudo", {"sudo": "root"}, "pass", "administrator's"),
        ("sudo", {"sudo": "none"}, "warn", "may not use sudo"),
        ("sudo", {"sudo": None}, "unknown", "not known"),
        ("hostname", {}, "pass", "pc is 10.0.0.1"),
        ("hostname", {"hostname_addresses": ("127.0.1.1",)}, "warn", "127.0.1.1, which is loop"),
        ("hostname", {"hostname_addresses": ()}, "warn", "has no IPv4 address;"),
        ("hostname", {"hostname_addresses": ("fd00::1",)}, "warn", "IPv4 address, only fd00::1"),
        ("hostname", {"hostname_addresses": ("10.0.0.1", "fd00::1")}, "pass", "pc is 10.0.0.1"),
        ("hostname", {"hostname_addresses": ("10.0.0.7",)}, "warn", "10.0.0.7, which is no add"),
        ("hostname", {"hostname_addresses": None}, "unknown", "could not be resolved"),
        ("sleep", {}, "pass", "nothing suspends"),
        ("sleep", {"may_sleep": True}, "warn", "in the middle of a run"),
        ("sleep", {"may_sleep": None}, "unknown", "not known"),
        ("logout", {}, "pass", "outlive a logout"),
        ("logout", {"ends_at_logout": True}, "fail", "ends all programs"),
        ("logout", {"ends_at_logout": True, "lingers": True}, "pass", "outlive"),
        ("logout", {"ends_at_logout": None}, "unknown", "not known"),
    ],
)
def test_reading_of_the_system(judge: str, changes: dict[str, Any], status: str, says: str) -> None:
    (row,) = getattr(system, f"judge_{judge}")(checked(system_with(**changes)))
    assert (row.status, row.node) == (status, "a")
    assert says in row.message
    assert (row.fix == "") == (status == "pass")


def test_a_pc_without_ipv4_needs_none_for_its_name() -> None:
    device = InterfaceFacts(name="eth0", address="fd00::1", mtu=1500)
    facts = replace(FACTS, interfaces=(device,))
    (row,) = system.judge_hostname(
        checked(system_with(hostname_addresses=("fd00::1",)), facts=facts)
    )
    assert row.status == "pass"


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [(32, 24, "pass"), (6, 5, "warn"), (32, 1, "warn"), (None, None, "unknown")],
)
def test_memory(total: int | None, free: int | None, status: str) -> None:
    facts = replace(
        FACTS, memory_bytes=total and total << 30, memory_available_bytes=free and free << 30
    )
    (row,) = system.judge_memory(checked(facts=facts))
    assert row.status == status


MEMORY_LIMIT = ResourceLimit(kind="memory", amount=2 << 30, place="/sys/fs/cgroup/x/memory.max")


def limited(*limits: ResourceLimit, total_gib: int = 2, free_gib: int = 1) -> NodeFacts:
    return replace(
        FACTS,
        memory_bytes=total_gib << 30,
        memory_available_bytes=free_gib << 30,
        pc_memory_bytes=64 << 30,
        limits=limits,
    )


def test_limit_of_a_group_is_named_with_its_place() -> None:
    (row,) = system.judge_memory(checked(facts=limited(MEMORY_LIMIT)))
    assert row.status == "warn"
    assert (
        "/sys/fs/cgroup/x/memory.max leaves this node 2.0 GiB of its PC's 64.0 GiB" in row.message
    )
    assert "/sys/fs/cgroup/x/memory.max" in row.fix
    wide = replace(MEMORY_LIMIT, amount=32 << 30)
    (row,) = system.judge_memory(checked(facts=limited(wide, total_gib=32, free_gib=30)))
    assert row.status == "pass"
    assert "limited by /sys/fs/cgroup/x/memory.max, while the PC has 64.0 GiB" in row.message


def test_limit_of_a_login_says_where_to_raise_it() -> None:
    (row,) = system.judge_memory(checked(facts=limited(replace(MEMORY_LIMIT, place="ulimit -v"))))
    assert "ulimit -v leaves this node 2.0 GiB" in row.message
    assert "/etc/security/limits.conf" in row.fix


def test_group_without_swap_needs_no_file_of_swap() -> None:
    limit = ResourceLimit(kind="swap", amount=0, place="/sys/fs/cgroup/x/memory.swap.max")
    (row,) = system.judge_swap(checked(system_with(swap_bytes=0), facts=limited(limit)))
    assert row.status == "warn"
    assert "memory.swap.max" in row.message
    assert "mkswap" not in row.fix
    assert row.repair is None


def test_swap_matters_with_little_memory() -> None:
    facts = replace(FACTS, memory_bytes=16 << 30)
    (row,) = system.judge_swap(checked(system_with(swap_bytes=0), facts=facts))
    assert row.status == "warn"
    assert "mkswap" in row.fix


def test_windows_keeps_the_clock_of_wsl_and_systems_without_systemd_have_no_rows() -> None:
    wsl = replace(FACTS, wsl="mirrored")
    (row,) = system.judge_sync(checked(system_with(clock_synchronised=False), facts=wsl))
    assert row.status == "pass"
    assert system.judge_sleep(checked(system_with(may_sleep=True), facts=wsl)) == ()
    plain = checked(system_with(first_process="init", may_sleep=None, ends_at_logout=None))
    assert (*system.judge_sleep(plain), *system.judge_logout(plain)) == ()


def test_nodes_with_one_folder_fail_and_are_not_told_to_install_a_driver() -> None:
    held = replace(
        FACTS, agent_home="/nfs/agent", recorder="elsewhere", gpu_problem="the recorder of another"
    )
    nodes = [checked(name="a"), checked(name="b", facts=held), checked(name="c", facts=held)]
    group = replace(group_of(*nodes), shared_homes=(("a", "b"),))
    rows = system.judge_shared_homes(group)
    assert [(row.check, row.node, row.status) for row in rows] == [
        ("shared-home", name, "fail") for name in "abc"
    ]
    assert rows[0].message.startswith("a and b have one folder for the agent")
    # The PC that shares the folder of c is no node here.
    assert rows[2].message.startswith("another PC uses the agent's folder of c")
    assert all("RACKLESS_AGENT_HOME" in row.fix for row in rows)
    for recorder in ("elsewhere", "missing"):
        (row,) = check_rules.judge_gpus(checked(facts=replace(held, recorder=recorder)))
        assert row.repair is None
        assert "install" not in row.fix.lower()
    assert system.judge_shared_homes(group_of(checked())) == ()
