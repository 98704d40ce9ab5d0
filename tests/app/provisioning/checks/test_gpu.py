"""Rows about the driver and about torch's builds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.contract.environments import EnvironmentTrial
from agents.contract.node import (
    AllReduceResult,
    EnvironmentReport,
    GpuFacts,
    GpuUse,
    MigGpu,
    TorchFacts,
)
from app.provisioning.checks.gpu import judge_driver
from app.provisioning.checks.reduce import can_use_nccl, judge_nccl
from app.provisioning.checks.torch import judge_torch
from tests.fakes.checked import FACTS, checked, driver_with, group_of

GPU = GpuFacts(uuid="u", index=0, name="RTX 5070 Ti", driver="580.65", capability="12.0")
ON_GPU = replace(FACTS, gpus=(GPU,))
BUILD = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    nccl="2.28.9",
    architectures=("sm_86", "sm_120"),
    num_gpus=1,
)
LOADED = {
    "num_cards": 1,
    "is_loaded": True,
    "nouveau": False,
    "module_version": "580.65.06",
    "library_version": "580.65.06",
    "devices_open": True,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nouveau": True}, "nouveau holds it"),
        ({"is_loaded": False, "library_version": None}, "there is no NVIDIA driver"),
        ({"is_loaded": False}, "module is not loaded"),
        ({"library_version": "590.1"}, "was updated to 590.1 while 580.65.06"),
        ({"devices_open": False}, "may not open the device files"),
        ({"smi_message": "No devices were found"}, "says: No devices were found"),
    ],
)
def test_card_that_is_no_gpu(changes: dict[str, Any], says: str) -> None:
    (row,) = judge_driver(checked(driver_with(**{**LOADED, **changes})))
    assert row.status == "fail"
    assert says in row.message
    assert row.fix


def test_driver_that_works_and_pcs_without_cards() -> None:
    (row,) = judge_driver(checked(driver_with(**LOADED), facts=ON_GPU))
    assert (row.status, row.fix) == ("pass", "")
    divided = replace(FACTS, mig_gpus=(MigGpu(index=0, name="NVIDIA A100"),))
    (row,) = judge_driver(checked(driver_with(**LOADED), facts=divided))
    assert row.status == "pass"
    assert judge_driver(checked(driver_with(num_cards=0))) == ()
    (row,) = judge_driver(checked(driver_with()))
    assert row.status == "unknown"


@pytest.mark.parametrize(
    ("dxg", "has_gpu", "status"),
    [(True, True, "pass"), (True, False, "fail"), (False, False, "warn"), (None, False, "unknown")],
)
def test_driver_of_windows(dxg: bool | None, has_gpu: bool, status: str) -> None:
    facts = replace(ON_GPU if has_gpu else FACTS, wsl="mirrored")
    (row,) = judge_driver(checked(driver_with(dxg=dxg), facts=facts))
    assert row.status == status


def builds(**changes: Any) -> dict[str, TorchFacts]:
    return {"a": BUILD, "b": BUILD, "c": replace(BUILD, **changes)}


@pytest.mark.parametrize(
    ("changes", "check", "status", "says"),
    [
        ({}, "torch", "pass", "torch 2.13.0+cu130, CUDA 13.0, NCCL 2.28.9"),
        ({"version": "2.12.0"}, "torch", "fail", "most nodes have torch 2.13.0"),
        ({"cuda": "12.6"}, "torch", "warn", "most nodes have CUDA 13.0"),
        ({"nccl": "2.27.0"}, "torch", "warn", "most nodes have NCCL 2.28.9"),
        ({}, "cuda", "pass", "has kernels"),
        ({"architectures": ("sm_86", "sm_90")}, "cuda", "fail", "no kernels for RTX 5070 Ti"),
        ({"num_gpus": 0}, "cuda", "fail", "sees 0 of 1 GPUs"),
    ],
)
def test_torch(changes: dict[str, Any], check: str, status: str, says: str) -> None:
    group = group_of(*(checked(name=name, facts=ON_GPU) for name in "abc"))
    rows = [row for row in judge_torch(group, builds(**changes)) if row.check == check]
    assert [row.status for row in rows] == ["pass", "pass", status]
    assert says in rows[2].message


def test_what_gives_all_nodes_one_build_is_the_fix() -> None:
    old = replace(ON_GPU, gpus=(replace(GPU, capability="6.1"),))
    new = replace(ON_GPU, gpus=(replace(GPU, capability="8.6"),))
    of_old = replace(BUILD, version="2.13.0+cu126", cuda="12.6", nccl="2.29.3")
    found = {"a": BUILD, "b": BUILD, "c": of_old}
    for cards, fix in (
        (new, "rackless nodes setup a; rackless nodes setup b"),
        (ON_GPU, "No build serves all cards: to use NCCL, leave c out of the run"),
    ):
        facts = {"a": cards, "b": cards, "c": old}
        group = group_of(*(checked(name=name, facts=one) for name, one in facts.items()))
        (row,) = (one for one in judge_torch(group, found) if one.status == "warn")
        assert (row.node, row.fix) == ("c", fix)


def test_a_build_for_cpus_fits_those_for_gpus() -> None:
    group = group_of(*(checked(name=name, facts=ON_GPU) for name in "ab"), checked(name="c"))
    rows = judge_torch(group, builds(version="2.13.0+cpu", cuda=None, nccl=None, num_gpus=0))
    assert {row.status for row in rows} == {"pass"}


def test_nccl() -> None:
    good = AllReduceResult(seconds=0.1, num_values=4, sum_ok=True, nccl_seconds=0.02)
    bad = replace(good, nccl_seconds=None, nccl_problem="unhandled system error")
    rows = judge_nccl({"a": good, "b": bad, "c": replace(good, nccl_seconds=None)})
    assert [(row.node, row.status) for row in rows] == [("a", "pass"), ("b", "fail")]
    busy = replace(ON_GPU, gpu_uses=(GpuUse(uuid="u", name="run r"),))
    assert can_use_nccl([ON_GPU, ON_GPU])
    trials = [
        EnvironmentTrial(import_s=1, torch=f"2.13.0+{b}", devices=()) for b in ("cu130", "cu126")
    ]
    tried = [replace(ON_GPU, environment=EnvironmentReport(trial=trial)) for trial in trials]
    assert can_use_nccl([tried[0], tried[0], ON_GPU])
    assert not can_use_nccl(tried)
    for facts in ([ON_GPU], [ON_GPU, FACTS], [ON_GPU, busy]):
        assert not can_use_nccl(facts)
