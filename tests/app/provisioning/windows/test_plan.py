"""What would change on Windows for given facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.provisioning.windows.facts import Distro, PortRange, StartTask, WindowsFacts, WindowsWanted
from app.provisioning.windows.plan import plan_windows, rules_for, settings_for
from app.provisioning.windows.wslconfig import merge

WANTED = WindowsWanted(
    node="red", distro="Ubuntu-24.04", peers=("192.168.1.10",), masters=("192.168.1.2",)
)
READY = WindowsFacts(
    windows_build=22631,
    wsl_version="2.4.13.0",
    wsl_path="C:\\Program Files\\WSL\\wsl.exe",
    distros=(Distro(name="Ubuntu-24.04", version=2),),
    wslconfig=merge("", settings_for(WANTED, 22631)),
    has_hyperv_firewall=True,
    rules=rules_for(WANTED),
    task=StartTask(
        start="boot",
        execute="C:\\Program Files\\WSL\\wsl.exe",
        arguments="-d Ubuntu-24.04 --exec /bin/sleep infinity",
        time_limit="PT0S",
    ),
    standby_s=0,
    hibernate_s=0,
    sshd_lacks=(),
)


def test_a_pc_that_is_ready_changes_nothing() -> None:
    plan = plan_windows(READY, WANTED)
    assert (plan.changes, plan.problems) == ((), ())


@pytest.mark.parametrize(
    ("changed", "expected", "before"),
    [
        ({"wslconfig": None}, "wslconfig", None),
        ({"rules": ()}, "firewall", "no rule of Rackless"),
        ({"rules": None}, "firewall", "cannot be read without an administrator"),
        ({"task": None}, "keep-running", "no such task"),
        ({"standby_s": 900}, "sleep", "sleeps after 900 s"),
        ({"hibernate_s": 60}, "sleep", "hibernates after 60 s"),
        ({"sshd_lacks": ("key",)}, "sshd", "lacks key"),
        ({"distros": ()}, "install", "WSL 2.4.13.0"),
    ],
)
def test_what_is_missing_is_one_change(
    changed: dict[str, object], expected: str, before: str | None
) -> None:
    (change,) = plan_windows(replace(READY, **changed), WANTED).changes
    assert (change.id, change.before) == (expected, before)


def test_a_task_that_windows_ends_after_three_days_is_replaced() -> None:
    assert READY.task is not None
    facts = replace(READY, task=replace(READY.task, time_limit="PT72H"))
    (change,) = plan_windows(facts, WANTED).changes
    assert change.before is not None
    assert change.before.endswith("PT72H")
    assert change.after.endswith("PT0S")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"windows_build": 19045}, "train alone but not with others"),
        ({"has_hyperv_firewall": False}, "Hyper-V firewall cannot be asked"),
        ({"wsl_version": None}, "wsl --update"),
        ({"distros": (Distro(name="ubuntu-24.04", version=1),)}, "wsl --set-version"),
        ({"sshd_lacks": None}, "does not answer"),
        ({"excluded_ports": (PortRange(first=2200, last=2299),)}, "set port 2222 aside"),
        ({"dynamic_ports": PortRange(first=1024, last=15000)}, "only the ports 1024 to 15000"),
    ],
)
def test_what_no_script_can_change_is_said(changed: dict[str, object], problem: str) -> None:
    plan = plan_windows(replace(READY, **changed), WANTED)
    assert plan.changes == ()
    assert len(plan.problems) == 1
    assert problem in plan.problems[0]


def test_an_older_windows_gets_no_mirrored_network() -> None:
    facts = replace(READY, windows_build=19045, has_hyperv_firewall=False, wslconfig=None)
    (change,) = plan_windows(facts, WANTED).changes
    assert "networkingMode" not in change.after
    assert "instanceIdleTimeout=-1" in change.after
