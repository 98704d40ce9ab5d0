"""What the facts about a node mean: one table for each row of the check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.environments import DeviceTrial, EnvironmentTrial
from agents.contract.node import EnvironmentReport, GpuFacts, MigGpu, NodeFacts
from agents.contract.requests.examination import DriverFacts, Examination
from app.nodes.endpoints import Endpoint
from app.provisioning import check_rules as rules
from app.provisioning.check_row import CheckedGroup, CheckedNode
from app.provisioning.repairs import install_compiler
from app.provisioning.system_repairs import synchronise_clock
from app.provisioning.torch_build import TorchBuild

FACTS = NodeFacts(hostname="pc", os="Ubuntu", kernel="6", python="3.12", architecture="x86_64")
CARD = GpuFacts(uuid="u", index=0, name="RTX 4070", driver="580.65", capability="8.9")
BUILT = EnvironmentReport(python="/p", python_version="3.12.1", fits=True)


def node(
    facts: NodeFacts = FACTS,
    environment: EnvironmentReport = BUILT,
    *,
    name: str = "pc",
    skew_s: float = 0.0,
    num_nodes: int = 1,
) -> CheckedNode:
    return CheckedNode(
        name=name,
        facts=facts,
        environment=environment,
        round_trip_s=0.001,
        skew_s=skew_s,
        num_nodes=num_nodes,
    )


def group(*nodes: CheckedNode) -> CheckedGroup:
    """Nodes that are to use the network device eth0."""
    endpoints = {one.name: Endpoint(address="10.0.0.1", interface="eth0") for one in nodes}
    return CheckedGroup(
        clients={},
        nodes={one.name: one for one in nodes},
        endpoints=endpoints,
        reduce_timeout_s=1.0,
    )


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
    (row,) = rules.judge_environment(node(environment=report))
    assert row.status == status
    assert says in row.message
    assert (row.fix == "") == (status == "pass")


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
    (row,) = rules.judge_compiler(node(facts, replace(BUILT, headers=headers)))
    assert row.status == status
    assert says in row.message
    if status == "warn":
        assert "training is slower" in row.message
        assert row.fix == "sudo apt-get install -y build-essential python3.12-dev"
        assert row.repair == install_compiler("3.12")


def test_no_compiler_is_needed_without_a_gpu() -> None:
    assert rules.judge_compiler(node()) == ()
    (row,) = rules.judge_compiler(node(replace(FACTS, gpus=(CARD,)), EnvironmentReport()))
    assert row.fix == "sudo apt-get install -y build-essential python3-dev"


@pytest.mark.parametrize(
    ("free", "status"),
    [(None, "unknown"), (1 << 30, "fail"), (10 << 30, "warn"), (1 << 40, "pass")],
)
def test_disk(free: int | None, status: str) -> None:
    (row,) = rules.judge_disk(node(replace(FACTS, disk_free_bytes=free)))
    assert row.status == status


@pytest.mark.parametrize(
    ("skew_s", "status", "says"),
    [
        (0.5, "pass", "0.5 s"),
        (-2.0, "pass", "2.0 s"),
        (90, "warn", "ahead of"),
        (-90, "warn", "behind"),
    ],
)
def test_clock(skew_s: float, status: str, says: str) -> None:
    (row,) = rules.judge_clock(node(skew_s=skew_s))
    assert row.status == status
    assert says in row.message


def test_the_clock_of_wsl_is_set_in_another_way() -> None:
    (linux,) = rules.judge_clock(node(skew_s=9))
    (wsl,) = rules.judge_clock(node(replace(FACTS, wsl="mirrored"), skew_s=9))
    assert "timedatectl" in linux.fix
    assert "hwclock" in wsl.fix
    assert linux.repair == synchronise_clock()
    assert wsl.repair is None


@pytest.mark.parametrize(
    ("card", "status"),
    [
        (CARD, "pass"),
        (replace(CARD, driver="560.1"), "pass"),
        (replace(CARD, driver="470.1"), "fail"),
        (replace(CARD, driver=None), "unknown"),
        (replace(CARD, capability="6.1"), "pass"),
        (replace(CARD, capability="12.0"), "pass"),
        (replace(CARD, capability=None), "pass"),
    ],
)
def test_one_card(card: GpuFacts, status: str) -> None:
    (row,) = rules.judge_gpus(node(replace(FACTS, gpus=(card,))))
    assert row.status == status
    assert "RTX 4070" in row.message


@pytest.mark.parametrize(
    ("cards", "statuses"),
    [
        ((CARD,), ["pass"]),
        ((replace(CARD, driver="560.1"),), ["pass"]),
        ((replace(CARD, capability="6.1"),), ["pass"]),
        ((replace(CARD, driver="470.1"),), ["fail"]),
        ((replace(CARD, driver="560.1", capability="12.0"),), ["fail"]),
        ((replace(CARD, capability="3.5"),), ["fail"]),
        ((replace(CARD, capability="6.1"), replace(CARD, capability="12.0")), ["fail", "pass"]),
    ],
)
def test_a_row_passes_with_the_build_that_serves_most_cards_and_says_whose_hashes_it_has(
    cards: tuple[GpuFacts, ...], statuses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = replace(BUILT, built_with="uv 0.13.9")
    rows = rules.judge_gpus(node(replace(FACTS, gpus=cards), built))
    assert [row.status for row in rows] == statuses
    assert all(row.fix for row in rows if row.status != "pass")
    if len(cards) > 1 or statuses != ["pass"] or cards[0] == CARD:
        assert "cu126" not in rows[0].message
        return
    index = "https://download.pytorch.org/whl/cu126"
    assert rows[0].message.endswith(f"torch cu126, with hashes of {index}, not of Rackless")
    monkeypatch.setattr(TorchBuild, "is_shipped", True)
    (row,) = rules.judge_gpus(node(replace(FACTS, gpus=cards)))
    assert row.message.endswith("gets the build of torch cu126")


def test_a_card_that_no_build_serves_with_its_driver_fails_but_in_the_users_own_environment() -> (
    None
):
    gpu = replace(CARD, driver="560.1", capability="12.0")
    pc = node(replace(FACTS, gpus=(gpu,)), replace(BUILT, built_with="uv 0.13.9"))
    (row,) = rules.judge_gpus(pc)
    assert row.status == "fail"
    assert row.message.endswith("no build for older drivers has kernels for this card")
    assert "driver 560.1 is older than 580" in row.message
    (row,) = rules.judge_gpus(replace(pc, environment=replace(BUILT, built_with=None)))
    assert row.status == "warn"


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        (("NVIDIA A100 MIG 1g.5gb", "NVIDIA A100 MIG 3g.20gb"), "into 1g.5gb and 3g.20gb, and"),
        ((), "is in MIG mode without slices"),
    ],
)
def test_a_gpu_in_mig_mode_is_named_and_turns_whole_by_a_command(
    slices: tuple[str, ...], says: str
) -> None:
    divided = MigGpu(index=2, name="NVIDIA A100", slices=slices)
    (row,) = rules.judge_gpus(node(replace(FACTS, gpus=(), mig_gpus=(divided,))))
    assert row.status == "fail"
    assert "GPU 2 (NVIDIA A100)" in row.message
    assert says in row.message
    assert "nvidia-smi -i 2 -mig 0" in row.fix
    rows = rules.judge_gpus(node(replace(FACTS, gpus=(CARD,), mig_gpus=(divided,))))
    assert [row.status for row in rows] == ["pass", "warn"]


def test_an_environment_that_cannot_train_or_is_for_other_gpus_fails() -> None:
    card = DeviceTrial(device="cuda:0", name="RTX 4070", problem="no kernel", is_failed=True)
    trial = EnvironmentTrial(import_s=1.0, torch="2.13.0+cpu", devices=(card,))
    facts = replace(FACTS, gpus=(CARD,))
    (row,) = rules.judge_environment(node(facts, replace(BUILT, trial=trial)))
    assert (row.status, "RTX 4070 could not train with it: no kernel" in row.message) == (
        "fail",
        True,
    )
    built = replace(BUILT, trial=replace(trial, devices=()), built_with="uv 0.13.9")
    (row,) = rules.judge_environment(node(facts, built))
    assert (row.status, row.fix) == ("fail", "rackless nodes setup pc")
    assert "2.13.0+cpu, and the GPUs of this node need cu130" in row.message
    # On a node without GPUs, and for an interpreter of the user's own, that is no fault.
    (row,) = rules.judge_environment(node(FACTS, built))
    assert row.status == "pass"
    (row,) = rules.judge_environment(node(facts, replace(built, built_with=None)))
    assert row.status == "pass"


def test_no_card_is_fine_but_a_broken_driver_is_not() -> None:
    (row,) = rules.judge_gpus(node())
    assert row.status == "pass"
    (row,) = rules.judge_gpus(node(replace(FACTS, gpu_problem="the driver does not answer")))
    assert (row.status, row.message) == ("fail", "the driver does not answer")
    assert "ubuntu-drivers" in row.fix
    (row,) = rules.judge_gpus(node(replace(FACTS, gpu_problem="x", wsl="mirrored")))
    assert "on Windows" in row.fix


def test_a_driver_that_was_updated_wants_a_restart_and_no_installation() -> None:
    broken = node(replace(FACTS, os="Ubuntu 24.04", gpu_problem="the driver was updated"))
    (row,) = rules.judge_gpus(broken)
    assert row.repair is not None
    updated = DriverFacts(module_version="580.65.06", library_version="580.95.05")
    (row,) = rules.judge_gpus(replace(broken, examination=Examination(driver=updated)))
    assert (row.status, row.fix, row.repair) == ("fail", "Restart that PC", None)


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
    (row,) = rules.judge_wsl(node(replace(FACTS, wsl=mode), num_nodes=num_nodes))
    assert row.status == status
    if status == "fail":
        assert "networkingMode=mirrored" in row.fix
        assert "wsl --shutdown" in row.fix


def test_wsl_is_no_matter_elsewhere() -> None:
    assert rules.judge_wsl(node(num_nodes=3)) == ()


def test_the_node_with_another_python_is_named() -> None:
    odd, *same = [
        node(environment=replace(BUILT, python_version=version), name=name)
        for name, version in (("c", "3.11.0"), ("a", "3.12.1"), ("b", "3.12.9"))
    ]
    (row,) = rules.judge_pythons(group(*same, odd))
    assert (row.node, row.status) == ("c", "warn")
    assert rules.judge_pythons(group(*same)) == ()
