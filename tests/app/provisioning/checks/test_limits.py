"""Rows about what the login's programs get: too little of what is named, and how to get more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.contract.node import ResourceLimit
from app.provisioning.checks import limits
from tests.fakes.checked import FACTS, checked, system_with

PIDS, CPUS = "/sys/fs/cgroup/x/pids.max", "/sys/fs/cgroup/x/cpu.max"


@pytest.mark.parametrize(
    ("judge", "changes", "status", "says"),
    [
        ("temporary", {}, "pass", "8.0 GiB free in /tmp"),
        ("temporary", {"temporary_free_bytes": 1 << 20}, "warn", "/tmp is nearly full: 1.0 MiB"),
        ("temporary", {"temporary_writable": False}, "fail", "/tmp cannot be written"),
        ("temporary", {"temporary_free_bytes": None}, "unknown", "could not be read"),
        ("limits", {}, "pass", "open files 1024, processes 60000, addresses without limit"),
        ("limits", {"max_open_files": 256}, "warn", "only 256 files open"),
        ("limits", {"max_processes": 200}, "warn", "only 200 processes"),
        ("limits", {"max_address_bytes": 8 << 30}, "warn", "8.0 GiB of addresses"),
        ("limits", {"max_processes": 2**63 - 1}, "pass", "processes without limit"),
        ("limits", {"max_open_files": None}, "unknown", "not known"),
    ],
)
def test_what_programs_get(judge: str, changes: dict[str, Any], status: str, says: str) -> None:
    (row,) = getattr(limits, f"judge_{judge}")(checked(system_with(**changes)))
    assert (row.status, row.node) == (status, "a")
    assert says in row.message
    assert (row.fix == "") == (status == "pass")


@pytest.mark.parametrize(
    ("limit", "status", "says"),
    [
        (ResourceLimit(kind="processes", amount=512, place=PIDS), "warn", "permits only 512"),
        (ResourceLimit(kind="processes", amount=5000, place=PIDS), "pass", "processes 5000"),
        (ResourceLimit(kind="cpus", amount=0.5, place=CPUS), "warn", "leaves this node 0.5"),
        (ResourceLimit(kind="cpus", amount=1.5, place=CPUS), "pass", f"(limit: 1.5 by {CPUS})"),
    ],
)
def test_limits_of_groups_are_named(limit: ResourceLimit, status: str, says: str) -> None:
    facts = replace(FACTS, num_cores=1, pc_num_cores=16, limits=(limit,))
    (row,) = limits.judge_limits(checked(system_with(), facts=facts))
    assert row.status == status
    assert says in row.message
    assert (limit.place in row.fix) == (status == "warn")
