"""Measurements: believed only from a free PC, and only figures that its hardware can have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.node import Calibration, GpuFacts, NodeFacts
from app.planning.hardware.cluster import make_cluster
from app.planning.hardware.measurement_limits import find_fault

CARD = "NVIDIA GeForce RTX 3090"
GOOD = Calibration(card=CARD, matrix_flops_per_s=55e12, memory_bytes_per_s=7.8e11, spread=0.03)
CPU = Calibration(card="CPU", matrix_flops_per_s=2e11, memory_bytes_per_s=2e10, other_load=0.02)
NODE = NodeFacts(
    hostname="a",
    os="Linux",
    kernel="6",
    python="3.12",
    architecture="x86_64",
    cpu="Ryzen 7 5800X",
    num_cores=16,
    memory_bytes=32 << 30,
)


def with_gpu(name: str = CARD, power_limit_w: float = 350.0) -> NodeFacts:
    gpu = GpuFacts(uuid="g", index=0, name=name, memory_bytes=24 << 30, power_limit_w=power_limit_w)
    return replace(NODE, gpus=(gpu,))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(GOOD, matrix_flops_per_s=0.003e12), "it gave 0.003 TFLOP/s"),
        (replace(GOOD, matrix_flops_per_s=9e14), "it gave 900 TFLOP/s"),
        (replace(GOOD, memory_bytes_per_s=1e9), "it gave 1 GB/s of memory"),
        (replace(GOOD, spread=0.8), "its repetitions differ by 80%"),
        (replace(GOOD, other_load=0.6), "other programs used 60% of the GPU meanwhile"),
        (replace(CPU, other_load=0.4), "other programs used 40% of the CPU meanwhile"),
        (replace(CPU, matrix_flops_per_s=3e9), "it gave 0.003 TFLOP/s"),
        (replace(CPU, matrix_flops_per_s=1e17), "TFLOP/s"),
        (Calibration(card="Some new card", matrix_flops_per_s=1e9), "it gave 0.001 TFLOP/s"),
    ],
)
def test_a_measurement_that_cannot_be_so_is_named_with_its_reason(
    found: Calibration, words: str
) -> None:
    assert words in find_fault(found, 16)


@pytest.mark.parametrize(
    "found",
    [
        GOOD,
        CPU,
        replace(GOOD, spread=None, other_load=None),
        Calibration(card="NVIDIA GeForce RTX 4070 Laptop GPU", matrix_flops_per_s=9e12),
        Calibration(card="Some new card", matrix_flops_per_s=9e13, memory_bytes_per_s=1e12),
        Calibration(card="CPU", matrix_flops_per_s=2.5e10),
        Calibration(card=CARD),
    ],
)
def test_a_measurement_of_a_free_pc_is_used(found: Calibration) -> None:
    assert find_fault(found, 4) == ""


def test_one_measured_node_corrects_the_guesses_about_equal_ones() -> None:
    facts = {"alpha": with_gpu(), "beta": with_gpu(), "gamma": with_gpu(power_limit_w=200.0)}
    facts["delta"] = with_gpu("NVIDIA GeForce RTX 4090")
    nodes = {n.name: n for n in make_cluster(facts, calibrations={("beta", CARD): GOOD}).nodes}
    (alpha,), (beta,) = nodes["alpha"].gpus, nodes["beta"].gpus
    assert (alpha.calibration, alpha.measured_on) == (GOOD, "beta")
    assert (beta.calibration, beta.measured_on) == (GOOD, "")
    assert nodes["gamma"].gpus[0].calibration is None, "another power limit is another card"
    assert nodes["delta"].gpus[0].calibration is None


def test_equal_cpus_share_a_measurement_and_others_do_not() -> None:
    facts = {"alpha": NODE, "beta": NODE, "gamma": replace(NODE, cpu="Celeron", num_cores=2)}
    nodes = make_cluster(facts, calibrations={("alpha", "CPU"): CPU}).nodes
    assert [node.gpus[0].calibration for node in nodes] == [CPU, CPU, None]
