"""The namespace cluster itself: the guarantees that other tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.namespaces import Cluster, ClusterError, is_zombie, namespaces, remove_stale

pytestmark = pytest.mark.netns

RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5999))
print("ready", flush=True)
peer, _ = server.accept()
while peer.recv(1 << 18):
    pass
peer.close()
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5999))
block = bytes(1 << 18)
began = time.perf_counter()
for _ in range(128):
    peer.sendall(block)
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(128 * len(block) * 8 / (time.perf_counter() - began) / 1e6)
"""


def test_every_node_has_its_own_key_home_and_namespace(cluster: Cluster) -> None:
    homes = [cluster.over_ssh(node, "echo ~; echo $HOME").split() for node in cluster.nodes]
    keys = {cluster.fingerprint(node) for node in cluster.nodes}
    seen = [
        cluster.over_ssh(node, "hostname -I 2>/dev/null || ip -o addr") for node in cluster.nodes
    ]

    assert homes == [[str(node.home)] * 2 for node in cluster.nodes]
    assert len(keys) == 3
    assert all(node.address in text for node, text in zip(cluster.nodes, seen, strict=True))


def test_nothing_but_sshd_listens(cluster: Cluster) -> None:
    found = {node.name: cluster.listeners(node) for node in (cluster.master, *cluster.nodes)}

    assert found.pop("master") == []
    for node in cluster.nodes:
        assert [(seen.process, seen.port) for seen in found[node.name]] == [("sshd", 22)]


def test_a_listener_of_ours_is_seen(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    receiver = cluster.start(
        node, sys.executable, "-c", RECEIVE, node.address, stdout=subprocess.PIPE, text=True
    )
    receiver.stdout.readline()

    assert {seen.port for seen in cluster.listeners(node)} == {22, 5999}

    receiver.kill()
    receiver.wait()
    receiver.stdout.close()


def test_links_are_shaped(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    receiver = cluster.start(
        node, sys.executable, "-c", RECEIVE, node.address, stdout=subprocess.PIPE, text=True
    )
    receiver.stdout.readline()

    megabits = float(cluster.run(cluster.master, sys.executable, "-c", SEND, node.address))

    receiver.wait()
    receiver.stdout.close()
    assert 300 < megabits < 1100  # loopback alone carries ten times as much


def test_cut_and_heal(cluster: Cluster) -> None:
    node, other = cluster.nodes[:2]
    cluster.cut(node)
    with pytest.raises(ClusterError, match=r"timed out|No route|unreachable"):
        cluster.over_ssh(node, "true", timeout_s=1)
    assert cluster.over_ssh(other, "echo here") == "here\n"

    cluster.heal(node)

    assert cluster.over_ssh(node, "echo back") == "back\n"


def fail_with_processes_running(folder: Path, started: list[int]) -> None:
    """Leave a cluster by an exception while a process and a daemon live in it."""
    with Cluster(folder, 1) as cluster:
        node = cluster.nodes[0]
        started.append(cluster.start(node, "sleep", "1000").pid)
        started.append(int(cluster.over_ssh(node, "setsid sleep 1000 >/dev/null 2>&1 & echo $!")))
        raise ZeroDivisionError


def test_down_leaves_nothing_even_after_a_failure(tmp_path: Path) -> None:
    started: list[int] = []
    with pytest.raises(ZeroDivisionError):
        fail_with_processes_running(tmp_path, started)

    assert len(started) == 2
    assert all(is_zombie(pid) for pid in started)
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


def test_a_killed_test_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.cluster.namespaces import Cluster;"
        "c = Cluster(pathlib.Path(sys.argv[1]), 1); print(c.master.namespace, flush=True);"
        "import time; time.sleep(1000)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    left = process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()
    assert left in namespaces()

    began = time.monotonic()
    remove_stale()

    assert left not in namespaces()
    assert time.monotonic() - began < 5
