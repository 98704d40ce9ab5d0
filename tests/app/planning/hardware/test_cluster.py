"""Cards as their drivers and calibrations describe them."""

from __future__ import annotations

import pytest

from agents.contract.node import Calibration, GpuFacts, GpuSample, NodeFacts, Sample
from app.planning.hardware.cluster import PlannedGpu, guess_desktop, make_cluster

GIB, MIB = 2**30, 2**20
FACTS = GpuFacts(
    uuid="GPU-0", index=0, name="NVIDIA H200", memory_bytes=141 * GIB,
    memory_reserved_bytes=615 * MIB,
)  # fmt: skip


def plan_card(facts: GpuFacts = FACTS, **sensors: object) -> PlannedGpu:
    node = NodeFacts(hostname="n", os="", kernel="", python="", architecture="", gpus=(facts,))
    gpu = GpuSample(uuid="GPU-0", index=0, name=facts.name, **sensors)  # type: ignore[arg-type]
    samples = {"n": Sample(time_s=0.0, seq=1, gpus=(gpu,))} if sensors else {}
    return make_cluster({"n": node}, samples=samples).nodes[0].gpus[0]


def test_an_empty_card_has_no_desktop_and_lacks_what_its_driver_keeps() -> None:
    card = plan_card(memory_used_bytes=0, process_ids=())
    assert card.desktop_bytes == 0
    assert card.memory is not None
    assert card.memory.total_bytes == 141 * GIB - 615 * MIB


def test_an_old_driver_counts_what_it_keeps_only_once() -> None:
    old = GpuFacts(uuid="GPU-0", index=0, name="NVIDIA H200", memory_bytes=141 * GIB)
    card = plan_card(old, memory_used_bytes=645 * MIB, process_ids=())
    assert card.memory is not None
    assert card.memory.total_bytes - card.desktop_bytes == 141 * GIB - 645 * MIB


def test_the_desktop_is_known_while_a_run_computes() -> None:
    busy = {"memory_used_bytes": 9 * GIB, "process_ids": (7,)}
    assert plan_card(**busy, memory_computing_bytes=8 * GIB).desktop_bytes == GIB
    assert plan_card(**busy).desktop_bytes == guess_desktop("linux")


@pytest.mark.parametrize(
    ("name", "gib", "usable_gib"),
    [("RTX 3080", 10, 9.78), ("RTX 3060", 12, 11.75), ("RTX 3090", 24, 23.70)],
)
def test_usable_memory_of_home_cards_is_what_torch_reports(
    name: str, gib: int, usable_gib: float
) -> None:
    memory = PlannedGpu(name=name, memory_bytes=gib * GIB).memory
    assert memory is not None
    assert memory.total_bytes / GIB == pytest.approx(usable_gib, abs=0.04)


def test_a_context_is_as_measured_or_grows_with_the_card() -> None:
    def context(name: str, measured: int | None = None) -> int:
        found = None if measured is None else Calibration(card=name, context_bytes=measured)
        memory = PlannedGpu(name=name, calibration=found).memory
        assert memory is not None
        return memory.context_bytes

    assert 0.75 * GIB <= context("NVIDIA H200") <= 0.85 * GIB
    assert context("RTX 3060") < context("RTX 4090") < context("NVIDIA H200")
    assert context("RTX 4090", 300 * MIB) < context("RTX 4090", 500 * MIB)
