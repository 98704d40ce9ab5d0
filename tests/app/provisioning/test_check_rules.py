"""What the facts about a node mean: one table for each row of the check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.node import EnvironmentReport, GpuFacts, NodeFacts
from app.provisioning.check_rules import (
    judge_clock,
    judge_compiler,
    judge_disk,
    judge_environment,
    judge_gpus,
    judge_mtus,
    judge_pythons,
    judge_wsl,
)

FACTS = NodeFacts(hostname="pc", os="Ubuntu", kernel="6", python="3.12", architecture="x86_64")
CARD = GpuFacts(uuid="u", index=0, name="RTX 4070", driver="580.65", capability="8.9")


@pytest.mark.parametrize(
    ("report", "status", "says"),
    [
        (EnvironmentReport(python="/p", python_version="3.12.1", fits=True), "pass", "3.12.1"),
        (EnvironmentReport(missing=("torch",)), "fail", "no training environment yet"),
        (EnvironmentReport(python="/p", missing=("torch",)), "fail", "torch is missing"),
        (EnvironmentReport(python="/p", different=("a 1 instead of 2",)), "fail", "instead of"),
    ],
)
def test_environment(report: EnvironmentReport, status: str, says: str) -> None:
    row = judge_environment("pc", report)
    assert row.status == status
    assert says in row.message
    assert (row.fix == "") == (status == "pass")


BUILT = EnvironmentReport(python="/p", python_version="3.12.1", fits=True)


@pytest.mark.parametrize(
    ("compiler", "headers", "status", "says"),
    [
        ("/usr/bin/gcc", True, "pass", "/usr/bin/gcc and Python's headers"),
        ("/usr/bin/clang", None, "pass", "/usr/bin/clang"),
        (None, True, "warn", "a C compiler is missing"),
        (None, None, "warn", "a C compiler is missing"),
        ("/usr/bin/gcc", False, "warn", "Python's headers are missing"),
        (None, False, "warn", "a C compiler and Python's headers are missing"),
    ],
)
def test_compiler(compiler: str | None, headers: bool | None, status: str, says: str) -> None:
    facts = replace(FACTS, gpus=(CARD,), compiler=compiler)
    (row,) = judge_compiler("pc", facts, replace(BUILT, headers=headers))
    assert row.status == status
    assert says in row.message
    if status == "warn":
        assert "without it trains, more slowly" in row.message
        assert row.fix == "sudo apt-get install -y build-essential python3.12-dev"


def test_a_compiler_is_not_looked_for_where_nothing_is_compiled() -> None:
    assert judge_compiler("pc", FACTS, BUILT) == ()
    (row,) = judge_compiler("pc", replace(FACTS, gpus=(CARD,)), EnvironmentReport())
    assert row.fix == "sudo apt-get install -y build-essential python3-dev"


@pytest.mark.parametrize(
    ("free", "status"),
    [(None, "unknown"), (1 << 30, "fail"), (10 << 30, "warn"), (1 << 40, "pass")],
)
def test_disk(free: int | None, status: str) -> None:
    assert judge_disk("pc", replace(FACTS, disk_free_bytes=free)).status == status


@pytest.mark.parametrize(
    ("skew_s", "status", "says"),
    [(0.5, "pass", "0.5 s"), (-2.0, "pass", ""), (90, "warn", "ahead of"), (-90, "warn", "behind")],
)
def test_clock(skew_s: float, status: str, says: str) -> None:
    row = judge_clock("pc", skew_s, FACTS)
    assert row.status == status
    assert says in row.message


def test_the_clock_of_wsl_is_set_in_another_way() -> None:
    assert "timedatectl" in judge_clock("pc", 9, FACTS).fix
    assert "hwclock" in judge_clock("pc", 9, replace(FACTS, wsl="mirrored")).fix


@pytest.mark.parametrize(
    ("card", "status"),
    [
        (CARD, "pass"),
        (replace(CARD, driver="560.1"), "warn"),
        (replace(CARD, driver="470.1"), "fail"),
        (replace(CARD, driver=None), "unknown"),
        (replace(CARD, capability="6.1"), "fail"),
        (replace(CARD, capability="12.0"), "pass"),
        (replace(CARD, capability=None), "pass"),
    ],
)
def test_one_card(card: GpuFacts, status: str) -> None:
    (row,) = judge_gpus("pc", replace(FACTS, gpus=(card,)))
    assert row.status == status
    assert "RTX 4070" in row.message


def test_no_card_is_fine_but_a_broken_driver_is_not() -> None:
    (row,) = judge_gpus("pc", FACTS)
    assert row.status == "pass"
    (row,) = judge_gpus("pc", replace(FACTS, gpu_problem="the driver does not answer"))
    assert (row.status, row.message) == ("fail", "the driver does not answer")
    assert "ubuntu-drivers" in row.fix
    (row,) = judge_gpus("pc", replace(FACTS, gpu_problem="x", wsl="mirrored"))
    assert "on Windows" in row.fix


@pytest.mark.parametrize(
    ("mode", "num_nodes", "status"),
    [
        ("mirrored", 3, "pass"),
        ("nat", 3, "fail"),
        ("nat", 1, "warn"),
        ("virtioproxy", 2, "fail"),
        ("none", 2, "fail"),
        ("unknown", 2, "unknown"),
    ],
)
def test_wsl(mode: str, num_nodes: int, status: str) -> None:
    (row,) = judge_wsl("pc", replace(FACTS, wsl=mode), num_nodes)
    assert row.status == status
    if status == "fail":
        assert "networkingMode=mirrored" in row.fix
        assert "wsl --shutdown" in row.fix


def test_wsl_is_no_matter_elsewhere() -> None:
    assert judge_wsl("pc", FACTS, 3) == ()


def test_unequal_pythons_and_packet_sizes_name_the_odd_one() -> None:
    reports = {
        name: EnvironmentReport(python="/p", python_version=version, fits=True)
        for name, version in (("a", "3.12.1"), ("b", "3.12.9"), ("c", "3.11.0"))
    }
    (row,) = judge_pythons(reports)
    assert (row.node, row.status) == ("c", "warn")
    del reports["c"]
    assert judge_pythons(reports) == ()
    (row,) = judge_mtus({"a": 1500, "b": 9000, "c": 1500, "d": None})
    assert (row.node, row.status) == ("b", "warn")
    assert judge_mtus({"a": 1500, "b": None}) == ()
