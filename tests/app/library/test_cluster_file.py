"""Cluster files: what is right becomes PCs and links, what is wrong is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.shared.cards import bus_bytes_per_s
from app.errors import UsageError
from app.library.cluster_file import parse_cluster, read_cluster_file
from app.planning.hardware.cluster import Cluster
from app.planning.hardware.rates import COPY_SHARE, MATRIX_SHARE, find_rates

CLUSTERS = Path(__file__).parents[3] / "resources" / "clusters"
GIB = 2**30


def problems(text: str) -> list[str]:
    with pytest.raises(UsageError) as refused:
        parse_cluster(text, "pcs.yaml")
    return refused.value.message.splitlines()


@pytest.mark.parametrize(
    ("name", "num_nodes", "num_gpus"),
    [("three-mismatched", 3, 3), ("seven-4070", 7, 7), ("two-3090", 1, 2)],
)
def test_the_examples_are_read(name: str, num_nodes: int, num_gpus: int) -> None:
    cluster = read_cluster_file(CLUSTERS / f"{name}.yaml")

    assert len(cluster.nodes) == num_nodes
    gpus = [gpu for node in cluster.nodes for gpu in node.gpus]
    assert len(gpus) == num_gpus
    assert all(gpu.card is not None and gpu.memory is not None for gpu in gpus)


def test_all_keys_are_taken() -> None:
    cluster = parse_cluster(
        "nodes:\n"
        "  - {name: a, gpus: [{card: RTX 4070, memory_gib: 10, count: 2, power_limit_w: 150}],"
        " ram_gib: 64, system: wsl, disk_gb_per_s: 3.5}\n"
        "  - {name: b}\n"
        "  - {name: c, gpus: [{card: Strange 1, memory_gib: 20}]}\n"
        "links: {default: {gbit_per_s: 10}, a b: {gbit_per_s: 2.5, latency_ms: 1}}\n"
    )

    first, second, third = cluster.nodes
    assert [gpu.device for gpu in first.gpus] == ["cuda:0", "cuda:1"]
    assert first.gpus[0].memory_bytes == 10 * GIB
    assert first.gpus[1].power_w == 150
    assert (first.ram_bytes, first.system) == (64 * GIB, "wsl")
    assert (first.disk_bytes_per_s, second.disk_bytes_per_s) == (3.5e9, None)
    assert second.gpus == ()
    assert third.gpus[0].card is None
    assert cluster.link("b", "a").bytes_per_s == pytest.approx(2.5e9 / 8 * 0.94)
    assert cluster.link("a", "c").bytes_per_s == pytest.approx(10e9 / 8 * 0.94)
    assert cluster.link("a", "b").latency_s == pytest.approx(0.001)


def test_without_links_gigabit_is_assumed() -> None:
    cluster: Cluster = parse_cluster("nodes: [{name: a}, {name: b}]")

    assert cluster.link("a", "b").source == "assumed"
    assert cluster.link("a", "b").bytes_per_s == pytest.approx(117.5e6)


def test_every_mistake_is_told_with_its_line() -> None:
    found = problems(
        "nodes:\n"
        "  - {name: a, gpus: [RTX 4071]}\n"
        "  - {name: a, ram_gb: 32}\n"
        "  - {name: c d, system: mac, gpus: [{card: RTX 4070, count: 0}]}\n"
        "links:\n"
        "  a z: {gbit_per_s: fast}\n"
    )

    assert any("line 2: the card RTX 4071 is not known; did you mean RTX 407" in p for p in found)
    assert "pcs.yaml, line 3: nodes[1].ram_gb is not known; did you mean ram_gib?" in found
    assert "pcs.yaml, line 3: the name a stands twice" in found
    assert "pcs.yaml, line 4: nodes[2].name must be a name without spaces" in found
    assert any("line 4: system is 'mac'; it must be one of linux" in p for p in found)
    assert any("line 4: nodes[2].gpus[0].count is 0; it must be a whole number" in p for p in found)
    assert any("line 6: links.a z.gbit_per_s is 'fast'" in p for p in found)
    assert any("line 6: links.a z must be default, or the names of two nodes" in p for p in found)


@pytest.mark.parametrize("text", ["", "nodes: []", "- a", "nodes: 3", "nodes: [{name: 4}]"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    assert problems(text)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_cluster_file(tmp_path / "no.yaml")


def test_figures_of_an_unlisted_card_and_of_its_slot_are_taken() -> None:
    (node,) = parse_cluster(
        "nodes: [{name: a, pc_power_w: 90, gpus: [{card: Strange 1, memory_gib: 16, tflops: 60, "
        "memory_gb_per_s: 500, capability: 8.6, pcie_generation: 3, pcie_lanes: 4}]}]\n"
    ).nodes
    rates = find_rates(node.gpus[0])

    assert node.power_w == 90
    assert node.gpus[0].capability == (8, 6)
    assert rates.source == "given"
    assert rates.matrix_flops_per_s == pytest.approx(60e12 * MATRIX_SHARE)
    assert rates.copy_bytes_per_s == pytest.approx(500e9 * COPY_SHARE)
    assert rates.to_host_bytes_per_s == pytest.approx(bus_bytes_per_s(3, 4))


def test_uplinks_wifi_and_the_price_are_taken() -> None:
    cluster = parse_cluster(
        "nodes: [{name: a}, {name: b}, {name: c}]\n"
        "links: {default: {gbit_per_s: 10}, a b: {gbit_per_s: 0.5, half_duplex: true}}\n"
        "uplinks: [{nodes: [c], gbit_per_s: 1}]\n"
        "price_per_kwh: 0.3\n"
    )

    assert cluster.price_per_kwh == 0.3
    assert cluster.link("a", "b").bytes_per_s == pytest.approx(0.25e9 / 8 * 0.94)
    assert cluster.link("a", "c").bytes_per_s == pytest.approx(1e9 / 8 * 0.94)


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ("Radeon RX 7900 XTX", "trains on NVIDIA GPUs only"),
        ("Apple M3 Max", "trains on NVIDIA GPUs only"),
        ("A100 MIG 3g.20gb", "trains on whole GPUs only"),
    ],
)
def test_gpus_that_cannot_train_are_refused_with_the_reason(card: str, reason: str) -> None:
    (one,) = problems(f"nodes: [{{name: a, gpus: [{{card: {card}, memory_gib: 20}}]}}]\n")
    assert f"{card} cannot train" in one
    assert reason in one


@pytest.mark.parametrize(
    "text",
    [
        "uplinks: {a: 1}",
        "uplinks: [{nodes: [b], gbit_per_s: 1}]",
        "uplinks: [{nodes: [a], gbit_per_s: fast}]",
        "links: {default: {half_duplex: maybe}}",
        "price_per_kwh: -1",
    ],
)
def test_wrong_values_of_the_network_and_the_price_are_reported(text: str) -> None:
    (one,) = problems(f"nodes: [{{name: a}}]\n{text}\n")
    assert text.partition(":")[0] in one
