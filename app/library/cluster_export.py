"""Write nodes as a cluster file, with what was measured, to be edited and planned with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from agents.contract.node import Calibration
from agents.shared.cards import GIB
from app.errors import UserError
from app.planning.hardware.cluster import Cluster, LinkSpeed, PlannedGpu, PlannedNode, nominal_gbit

_HEAD = """\
# Written by Rackless from its nodes. Change what you like, then plan with it:
# rackless plan RUN.yaml --cluster {name}
"""
MEASURED = {
    "tflops": ("matrix_flops_per_s", 1e12),
    "memory_gb_per_s": ("memory_bytes_per_s", 1e9),
    "to_host_gb_per_s": ("to_host_bytes_per_s", 1e9),
    "from_host_gb_per_s": ("from_host_bytes_per_s", 1e9),
    "unpack_billion_per_s": ("unpack_values_per_s", 1e9),
}
"""Keys of `measured` in a cluster file: field of Calibration, and its value of one unit."""


def write_cluster(cluster: Cluster, path: Path) -> Path:
    """Write a cluster file that reads back as `cluster`; return its absolute path.

    Raises:
        UserError: the file exists or cannot be written.
    """
    path = path.expanduser().absolute()
    try:
        # A file that was edited must not be lost.
        with path.open("x", encoding="utf-8") as file:
            file.write(format_cluster(cluster, path.name))
    except FileExistsError:
        raise UserError(f"{path} exists", "Give a new file, or delete that one.") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}", "Give a file in another folder."
        ) from error
    return path


def format_cluster(cluster: Cluster, name: str = "FILE") -> str:
    """Return a cluster as the text of a cluster file with this name."""
    links: dict[str, Any] = {}
    for pair, link in cluster.links.items():
        if link.source != "assumed":
            links[" ".join(sorted(pair))] = _describe_link(link)
    plain: dict[str, Any] = {"nodes": [_describe_node(node) for node in cluster.nodes]}
    if links:
        plain["links"] = links
    if cluster.price_per_kwh is not None:
        plain["price_per_kwh"] = _round(cluster.price_per_kwh)
    text = yaml.dump(plain, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)
    return _HEAD.format(name=name) + text


def _describe_link(link: LinkSpeed) -> dict[str, Any]:
    return {
        "gbit_per_s": _round(nominal_gbit(link.bytes_per_s)),
        "latency_ms": _round(link.latency_s * 1000),
    }


def _describe_node(node: PlannedNode) -> dict[str, Any]:
    # Without a GPU a cluster file plans no training.
    gpus = [_describe_gpu(gpu) for gpu in node.gpus if gpu.device != "cpu"]
    found: dict[str, Any] = {"name": node.name, "gpus": gpus}
    if node.ram_bytes:
        found["ram_gib"] = _round(node.ram_bytes / GIB)
    if node.system is not None:
        found["system"] = node.system
    if node.disk_bytes_per_s:
        found["disk_gb_per_s"] = _round(node.disk_bytes_per_s / 1e9)
    if node.pc_w is not None:
        found["pc_power_w"] = _round(node.pc_w)
    if not node.has_compiler:
        found["compiler"] = False
    return found


def _describe_gpu(gpu: PlannedGpu) -> dict[str, Any]:
    found: dict[str, Any] = {"card": gpu.name}
    for key, value in (
        ("memory_gib", gpu.memory_bytes),
        ("reserved_gib", gpu.reserved_bytes),
        ("used_gib", gpu.desktop_bytes),
    ):
        if value is not None:
            found[key] = _round(value / GIB)
    if gpu.card is None and gpu.capability is not None:
        found["capability"] = float("{}.{}".format(*gpu.capability))
    if gpu.power_limit_w is not None:
        found["power_limit_w"] = _round(gpu.power_limit_w)
    if gpu.calibration is not None:
        found["measured"] = _describe_measured(gpu.calibration)
    return found


def _describe_measured(calibration: Calibration) -> dict[str, Any]:
    found = {
        key: _round(value / unit)
        for key, (name, unit) in MEASURED.items()
        if (value := getattr(calibration, name))
    }
    if calibration.context_bytes is not None:
        found["context_gib"] = _round(calibration.context_bytes / GIB)
    return found


def _round(value: float) -> float | int:
    """Return a number with five digits, which is more exact than any measurement."""
    found = float(f"{value:.5g}")
    return int(found) if found == int(found) else found
