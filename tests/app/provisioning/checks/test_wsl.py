"""Rows about WSL: its settings as people write them, and what Windows did not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.provisioning.checks import wsl
from tests.fakes.checked import FACTS, checked, wsl_with

STAYS = ("[wsl2]", "vmIdleTimeout=-1", "[general]", "instanceIdleTimeout = -1 # never")


@pytest.mark.parametrize(
    ("judge", "changes", "status", "says"),
    [
        ("idle", {"config": STAYS}, "pass", "stays on"),
        ("idle", {"config": STAYS[:2]}, "warn", "when no terminal is open"),
        ("idle", {"config": ()}, "warn", "idle time-outs are on"),
        ("idle", {}, "unknown", "could not be read"),
        ("boot", {"boot_task": True}, "pass", "starts WSL"),
        ("boot", {"boot_task": False}, "warn", "after a restart"),
        ("boot", {}, "unknown", "not known"),
        ("firewall", {"firewall_allows": True}, "pass", "lets the nodes in"),
        ("firewall", {"firewall_allows": False}, "warn", "ping passes all the same"),
        ("firewall", {}, "unknown", "could not be read"),
        ("memory", {"windows_memory_bytes": 40 << 30}, "pass", "of RAM"),
        ("memory", {"windows_memory_bytes": 64 << 30}, "warn", "has only 32.0 GiB of 64.0 GiB"),
        ("memory", {}, "unknown", "half of it"),
        ("driver", {"linux_driver": ""}, "pass", "no Linux driver"),
        ("driver", {"linux_driver": "nvidia-driver-570"}, "fail", "hides the driver of Windows"),
        ("driver", {}, "unknown", "could not be listed"),
        ("files", {}, "pass", "WSL's own disk"),
        ("sshd", {"sshd_ports": (2222,), "is_systemd": True}, "pass", "port 2222"),
        ("sshd", {"sshd_ports": (22,), "is_systemd": True}, "warn", "shares with the SSH server"),
        ("sshd", {"sshd_ports": (2222,), "is_systemd": False}, "warn", "systemd does not run"),
        ("sshd", {}, "unknown", "could not be read"),
    ],
)
def test_wsl(judge: str, changes: dict[str, Any], status: str, says: str) -> None:
    node = checked(wsl_with(**changes), facts=replace(FACTS, wsl="mirrored"))
    (row,) = getattr(wsl, f"judge_wsl_{judge}")(node)
    assert row.status == status
    assert says in row.message
    assert (row.fix == "") == (status == "pass")
    assert getattr(wsl, f"judge_wsl_{judge}")(checked()) == ()


@pytest.mark.parametrize(("kind", "status"), [("9p", "fail"), (None, "unknown")])
def test_files_on_a_drive_of_windows(kind: str | None, status: str) -> None:
    found = wsl_with()
    node = checked(replace(found, system=replace(found.system, home_file_system=kind)))
    (row,) = wsl.judge_wsl_files(node)
    assert row.status == status


def test_the_first_of_several_values_counts_as_wsl_reads_it() -> None:
    lines = [
        "[WSL2]",
        "memory=4GB",
        "# memory=9GB",
        "[other]",
        "memory=1GB",
        "[wsl2]",
        "MEMORY=8GB",
    ]
    assert wsl.read_setting(lines, "wsl2", "memory") == "4GB"
    assert wsl.read_setting(lines, "general", "memory") == ""


@pytest.mark.parametrize(
    ("judge", "changes", "memory"),
    [
        ("idle", {"config": ()}, ""),
        ("boot", {"boot_task": False}, ""),
        ("firewall", {}, ""),
        ("sshd", {"sshd_ports": (22,), "is_systemd": True}, ""),
        ("memory", {"windows_memory_bytes": 64 << 30}, " --memory 51"),
    ],
)
def test_what_only_windows_can_change_comes_with_its_script(
    judge: str, changes: dict[str, Any], memory: str
) -> None:
    node = checked(wsl_with(**changes), facts=replace(FACTS, wsl="mirrored"))
    (row,) = getattr(wsl, f"judge_wsl_{judge}")(node)
    assert row.repair is not None
    assert row.repair.where == "windows"
    assert f"rackless nodes windows-script {node.name}{memory} " in row.repair.explanation
    assert f"rackless-windows-{node.name}.ps1" in row.repair.script
