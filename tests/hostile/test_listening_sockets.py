"""What listens while Rackless works, on PCs that are in two networks; and a stranger in one.

The tables: `python -m pytest -s -m "netns or campaign" tests/hostile/test_listening_sockets.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.master import ROOT, Master
from tests.cluster.namespaces import Cluster, Node
from tests.hostile.listening import Door, Watch, table

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(400)]

RUN_FILE = f"""
name: watched
model: {ROOT}/resources/demo/model
data: {{train: {ROOT}/resources/demo/train.jsonl, format: chat}}
adapter: {{kind: lora, rank: 4, alpha: 8, dropout: 0.0, targets: all-linear}}
sequence_tokens: 64
batch_sequences: 6
max_steps: 5000
learning_rate: 1.0e-3
checkpoint: {{every_minutes: null, every_steps: 5000}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return two nodes and a stranger's PC, each in two networks."""
    with Cluster(tmp_path_factory.mktemp("network") / "cluster", 3) as made:
        made.add_network()
        yield made


@pytest.fixture(scope="module")
def master(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Master:
    """Return a master to whom the first two PCs were added."""
    made = Master(cluster, tmp_path_factory.mktemp("master") / "rackless")
    for node in cluster.nodes[:2]:
        where = ("--ssh", f"root@{node.address}", "--key", str(cluster.key))
        shown = cluster.fingerprint(node)
        made.answer("nodes", "add", node.name, *where, "--accept-host-key", shown)
        made.answer("nodes", "setup", node.name, "--python", sys.executable)
    return made


class Watches:
    """All PCs of a cluster, watched."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self._by_name = {
            node.name: stack.enter_context(Watch(node.name, cluster.command(node)))
            for node in (cluster.master, *cluster.nodes)
        }

    def __getitem__(self, node: Node) -> Watch:
        return self._by_name[node.name]

    def describe(self) -> str:
        return table(door for watch in self._by_name.values() for door in watch.doors)


def expect_lan_only(watches: Watches, cluster: Cluster) -> None:
    """Check that each socket has a reason, and is on its PC's address in the first network."""
    for node in (cluster.master, *cluster.nodes):
        for door in watches[node].doors:
            assert door.owner, door
            assert door.address == node.address, door
    assert watches[cluster.master].doors == []


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = 90.0) -> Any:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    pytest.fail(f"{what}: not within {limit_s:.0f} s")


def ask_stranger(
    stranger: subprocess.Popen[str], node: Node, store: Door, others: list[Door]
) -> dict[str, Any]:
    # At the node's address, also where the store listens on all of them.
    question: dict[str, Any] = {"store": [node.address, int(store.port)]}
    question["others"] = [[door.address, int(door.port)] for door in others]
    said, _ = stranger.communicate(json.dumps(question) + "\n", timeout=90)
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def test_a_stranger_on_the_network_reads_and_writes_nothing_and_the_run_goes_on(
    cluster: Cluster,
    master: Master,
    tmp_path: Path,
    attack: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, other = cluster.nodes
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN_FILE)
    with ExitStack() as stack:
        watches = Watches(cluster, stack)
        stranger = stack.enter_context(
            cluster.start(
                other,
                *(sys.executable, str(ROOT / "tests/hostile/stranger.py")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        stack.callback(stranger.kill)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        run_id = master.answer("start", str(run_file))["run_id"]
        ranks = wait_for(
            lambda: watches[second].find("rank of a run") if count_steps(first) else [],
            "ranks that listen and train",
        )
        expect_the_key_nowhere(master, first)
        store, others = wait_for(lambda: split_store(watches[first]), "the store of the ranks")
        seen = ask_stranger(stranger, first, store, [*others, *ranks])
        done = count_steps(first)
        wait_for(lambda: count_steps(first) > done + 5, "steps after the stranger")
        stopped = master.answer("runs", "stop", run_id)
    with capsys.disabled():
        print(f"\n{watches.describe()}")
    for tried, happened in seen["found"].items():
        attack(given=f"a stranger at port {store.port}", tried=tried, happened=happened)
    assert not [f"{k}: {v}" for k, v in seen["found"].items() if v.startswith("GOT")]
    assert seen["silent"] > 0
    assert (stopped["state"], stopped["attempt"]) == ("stopped", 1)
    expect_lan_only(watches, cluster)


def expect_the_key_nowhere(master: Master, node: Node) -> None:
    """Check that no process shows the attempt's key, and that the master keeps none."""
    runs = node.home / ".local/share/rackless-agent/runs"
    (path,) = runs.glob("*/attempts/*/intent.json")
    key = json.loads(path.read_text()).get("credential", "").splitlines()[1:2]
    if not key:  # then the stranger gets in, which says more
        return
    places = [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]
    places += [path for path in master.home.rglob("*") if path.is_file()]
    for place in places:
        with suppress(OSError):
            assert key[0].encode() not in place.read_bytes(), place


def split_store(watch: Watch) -> tuple[Door, list[Door]] | None:
    """Return the store of the first node, and Gloo's sockets there; None: it was not seen yet.

    Where rank 0 itself holds the store, as torch does it, that is the socket on all interfaces.
    """
    ranks = watch.find("rank of a run")
    stores = watch.find("store of") or [d for d in ranks if d.address in ("*", "::", "0.0.0.0")]
    return (stores[0], [door for door in ranks if door not in stores]) if stores else None


def count_steps(node: Node) -> int:
    """Return the number of steps that the first rank has done."""
    runs = node.home / ".local/share/rackless-agent/runs"
    journals = runs.glob("*/attempts/*/rank-0.jsonl")
    return sum(path.read_bytes().count(b'"kind": "step"') for path in journals)


def test_a_check_and_a_run_on_one_node_listen_where_they_have_to(
    cluster: Cluster, master: Master, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN_FILE.replace("max_steps: 5000", "max_steps: 5") + "nodes: [node1]\n")
    with ExitStack() as stack:
        watches = Watches(cluster, stack)
        for _ in range(3):
            rows = master.answer("check")
            assert not [row for row in rows if row["status"] == "fail"], rows
            # A store may come and go between two looks of a busy PC.
            if watches[cluster.nodes[0]].find("store of"):
                break
        expect_lan_only(watches, cluster)
        assert watches[cluster.nodes[0]].find("store of")
        with capsys.disabled():
            print(f"\n{watches.describe()}")
    with ExitStack() as stack:
        watches = Watches(cluster, stack)
        done = master.rackless("start", str(run_file), "--watch")
        assert done.code == 0, done.problem
        doors = [door for node in cluster.nodes for door in watches[node].doors]
        assert {door.owner for door in doors} == {"SSH server of the PC"}


@pytest.mark.campaign
def test_a_whole_demo_listens_on_loopback_alone(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = cluster.master
    environ = {"RACKLESS_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    with Watch("demo", cluster.command(here)) as watch:
        demo = cluster.start(
            here,
            *(sys.executable, "-P", "-m", "app", "demo", "--headless"),
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said, problem = demo.communicate(timeout=390)
    with capsys.disabled():
        print(f"\n{table(watch.doors)}")
    assert demo.returncode == 0, problem + said
    assert [door for door in watch.doors if not door.owner] == []
    assert {door.address for door in watch.doors} == {"127.0.0.1"}
    assert {door.owner.split()[0] for door in watch.doors} >= {"SSH", "store", "rank"}


def test_the_window_listens_on_a_file_of_its_user_alone(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, home = cluster.master, tmp_path / "home"
    environ = {"RACKLESS_HOME": str(home), "PYTHONPATH": str(ROOT)}
    environ["QT_QPA_PLATFORM"] = "offscreen"
    with Watch("PC", cluster.command(here)) as watch:
        window = cluster.start(
            here,
            *(sys.executable, "-P", "-m", "app", "gui"),
            env={**os.environ, **environ},
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda: watch.doors, "the window's socket", 60)
            wait_for((home / "window.sock").exists, "its name", 10)
            mode = (home / "window.sock").stat().st_mode
        finally:
            window.kill()
            window.wait()
    with capsys.disabled():
        print(f"\n{table(watch.doors)}")
    assert mode & 0o077 == 0
    assert {(door.protocol, door.owner) for door in watch.doors} == {("u_str", "window")}
