"""The fleet over real links: one that is cut and healed, and one that is slow."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.namespaces import Cluster
from tests.draws import random_bytes

pytestmark = [pytest.mark.netns, pytest.mark.alone]
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def watching(cluster: Cluster, home: Path, *more: str) -> Iterator[Iterator[dict[str, Any]]]:
    """A master that watches the first node; yields its output."""
    node = cluster.nodes[0]
    place = ("--host", node.address, "--key", str(cluster.key), "--home", str(home))
    process = cluster.start(
        cluster.master,
        *(sys.executable, "-m", "tests.cluster.fleet_probe", *place),
        *("--fingerprint", cluster.fingerprint(node), *more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        yield (json.loads(line) for line in process.stdout)
    finally:
        process.stdin.close()
        process.wait(timeout=30)


def wait_for(said: Iterator[dict[str, Any]], state: str) -> float:
    return next(float(line["time_s"]) for line in said if line.get("state") == state)


def test_a_cut_link_is_noticed_in_time_and_a_healed_one_used_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    with watching(cluster, tmp_path / "master") as said:
        wait_for(said, "online")
        for _ in range(2):
            time.sleep(2.0)  # pings go on
            cut_s = time.monotonic()
            cluster.cut(cluster.nodes[0])
            assert wait_for(said, "unreachable") - cut_s <= 3.2
            time.sleep(2.0)
            cluster.heal(cluster.nodes[0])
            healed_s = time.monotonic()
            assert wait_for(said, "online") - healed_s <= 15


def test_a_node_that_is_sent_a_model_over_a_slow_link_stays_online(tmp_path: Path) -> None:
    """4 MB at 6 Mb/s take more than five seconds; a ping behind them would be overdue."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(random_bytes(4_000_000))
    with Cluster(tmp_path / "cluster", num_nodes=1, rate="6mbit") as cluster:
        push = ("--push", str(model / "weights"))
        with watching(cluster, tmp_path / "master", *push) as said:
            lines = []
            for line in said:
                lines.append(line)
                if "pushed_s" in line:
                    break
    assert lines[-1]["pushed_s"] > 5
    states = [line["state"] for line in lines if "state" in line]
    assert "unreachable" not in states[states.index("online") :]
