"""The whole path over three network namespaces with Debian's own sshd in each.

Every action is the `rackless` command, typed in the master's namespace; what happened is read from
the nodes' own files and from /proc, not from what the master says about it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.master import ROOT, Master
from tests.cluster.namespaces import Cluster, Node
from tests.fakes.site import slowed

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS = 60
WHOLE = "never-lost"
"""Name of a run that trains on all nodes to its end."""
BACK_S = 5.0
"""Longest time from the loss of a node to the next step of the others, in seconds."""
RUN_FILE = f"""
name: end-to-end
model: {ROOT}/resources/demo/model
data: {{train: {ROOT}/resources/demo/train.jsonl, format: chat}}
adapter: {{kind: lora, rank: 4, alpha: 8, dropout: 0.0, targets: all-linear}}
sequence_tokens: 64
batch_sequences: 6
max_steps: {NUM_STEPS}
learning_rate: 1.0e-3
checkpoint: {{every_minutes: null, every_steps: 20, keep: 2, copies: 2}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes and a master, for all tests here: to set them up takes a while."""
    with Cluster(tmp_path_factory.mktemp("network") / "cluster") as made:
        yield made


@pytest.fixture(scope="module")
def master(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Master:
    """Return a master to whom all three nodes were added, with a training environment on each."""
    made = Master(cluster, tmp_path_factory.mktemp("master") / "rackless")
    for node in cluster.nodes:
        address, key = f"root@{node.address}", str(cluster.key)
        shown = cluster.fingerprint(node)
        made.answer(
            *("nodes", "add", node.name, "--ssh", address, "--key", key, "--accept-host-key", shown)
        )
        made.answer("nodes", "setup", node.name, "--python", sys.executable)
    return made


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    return path


def wait_until(condition: Callable[[], Any], what: str, limit_s: float) -> Any:
    """Return the condition's value as soon as it is true."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    pytest.fail(f"{what}: not within {limit_s:.0f} s")


def attempt_folder(node: Node, run_id: str, attempt: int = 1) -> Path:
    home = node.home / ".local/share/rackless-agent"
    return home / "runs" / run_id / "attempts" / str(attempt)


def steps_of(journal: Path) -> list[int]:
    """Return the numbers of the steps that a rank's journal on its node holds, in its order."""
    if not journal.exists():
        return []
    whole_lines = journal.read_bytes().rpartition(b"\n")[0].splitlines()
    records = [json.loads(line) for line in whole_lines]
    return [record["step"] for record in records if record["kind"] == "step"]


def losses_of(*journals: Path) -> dict[int, float]:
    """Return the loss of each step; of one that was done twice, the last."""
    lines = [line for path in journals for line in path.read_bytes().splitlines()]
    steps = [json.loads(line) for line in lines if b'"step"' in line]
    return {one["step"]: one["loss"] for one in steps if one["kind"] == "step"}


def rank_journal(cluster: Cluster, run_id: str, rank: int = 0) -> Path:
    """Return the journal of a rank on the node that runs it."""
    found = [attempt_folder(node, run_id) / f"rank-{rank}.jsonl" for node in cluster.nodes]
    return next((path for path in found if path.exists()), found[0])


def mirror(master: Master, run_id: str, node: Node, stream: str) -> Path:
    """Return the master's copy of a log or journal."""
    return master.home / "runs" / run_id / "attempts" / "1" / node.name / stream


def tagged_processes(run_id: str) -> list[str]:
    """Return the command lines of all processes on all nodes that carry the run's tag."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and f"RACKLESS_TAG={run_id}.".encode() in (entry / "environ").read_bytes()
            ):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def attempt_of(pid: int) -> str:
    """Return the run's tag that a process carries; empty: none."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RACKLESS_TAG="):
                return entry.partition(b"=")[2].decode()
    return ""


def listening(cluster: Cluster) -> set[str]:
    return {seen.process for node in cluster.nodes for seen in cluster.listeners(node)}


@contextlib.contextmanager
def ended_after(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def start_run(master: Master, run_file: Path) -> str:
    return str(master.answer("start", str(run_file))["run_id"])


def losses_of_a_whole_run(cluster: Cluster, master: Master, run_file: Path) -> dict[int, float]:
    """Return the losses of the first test's run; where that test was left out, of a new one."""
    runs = master.answer("runs", "list")
    done = [run["run_id"] for run in runs if (run["name"], run["state"]) == (WHOLE, "done")]
    if not done:
        done = [start_run(master, run_file)]
        assert master.rackless("runs", "logs", done[0], "--follow", timeout_s=120).code == 0
    losses = losses_of(rank_journal(cluster, done[0]))
    assert len(losses) == NUM_STEPS
    return losses


def test_a_run_outlives_the_killed_master(cluster: Cluster, master: Master, run_file: Path) -> None:
    run_file.write_text(RUN_FILE.replace("name: end-to-end", f"name: {WHOLE}"))
    with ended_after(master.start("start", str(run_file), "--watch")) as watching:
        run_id = json.loads(watching.stdout.readline())["run_id"]
        wait_until(
            lambda: len(steps_of(rank_journal(cluster, run_id))) >= 5, "the first five steps", 60
        )
    at_kill = len(steps_of(rank_journal(cluster, run_id)))
    mirrored_at_kill = mirror(master, run_id, cluster.nodes[0], "rank-0.jsonl").stat().st_size
    assert watching.returncode == -9
    assert at_kill < NUM_STEPS

    with slowed(run_id):
        wait_until(
            lambda: len(steps_of(rank_journal(cluster, run_id))) > at_kill + 2,
            "steps without master",
            60,
        )
        found = {run["run_id"]: run["state"] for run in master.answer("runs", "list")}
    assert found == {run_id: "running"}

    (master.home / "rackless.sqlite3").unlink()
    followers = [master.start("runs", "logs", run_id, "--follow") for _ in range(2)]
    for follower in followers:
        with ended_after(follower):
            _, problem = follower.communicate(timeout=90)
        assert follower.returncode == 0, problem
    shown = master.answer("runs", "show", run_id)

    assert (shown["state"], shown["step"], shown["attempt"]) == ("done", NUM_STEPS, 1)
    assert shown["spec"]["batch_sequences"] == 6
    known = [node["name"] for node in master.answer("nodes", "list")]
    assert known == [node.name for node in cluster.nodes]
    for rank in range(3):
        assert steps_of(rank_journal(cluster, run_id, rank)) == list(range(1, NUM_STEPS + 1))
    assert 0 < mirrored_at_kill < rank_journal(cluster, run_id).stat().st_size
    for rank, node in enumerate(cluster.nodes):
        for stream in (f"rank-{rank}.jsonl", f"rank-{rank}.log", "supervisor.jsonl"):
            written = (attempt_folder(node, run_id) / stream).read_bytes()
            assert mirror(master, run_id, node, stream).read_bytes() == written, (node, stream)


def test_stop_leaves_no_process_and_idle_nodes_listen_to_ssh_alone(
    cluster: Cluster, master: Master, run_file: Path
) -> None:
    with ended_after(master.start("monitor")) as monitor:
        seen = {json.loads(monitor.stdout.readline())["node"] for _ in range(6)}
        assert seen <= {node.name for node in cluster.nodes}
        assert listening(cluster) == {"sshd"}
    # So many steps that the run cannot end by itself before a busy PC gets to stop it.
    run_file.write_text(RUN_FILE.replace(f"max_steps: {NUM_STEPS}", "max_steps: 5000"))
    run_id = start_run(master, run_file)
    wait_until(lambda: len(steps_of(rank_journal(cluster, run_id))) >= 3, "three steps", 120)
    assert len(tagged_processes(run_id)) >= 6  # a supervisor and a rank on each node

    stopped = master.answer("runs", "stop", run_id)

    assert tagged_processes(run_id) == []
    assert stopped["state"] == "stopped"
    assert listening(cluster) == {"sshd"}
    assert master.answer("checkpoints", run_id) != []


def test_a_cut_link_is_noticed_and_healed(cluster: Cluster, master: Master) -> None:
    with ended_after(master.script(ROOT / "tests/cluster/watch_nodes.py")) as watching:
        states: dict[str, str] = {}

        def read_until(node: str, state: str, limit_s: float) -> float:
            began = time.monotonic()
            while states.get(node) != state and time.monotonic() < began + limit_s:
                change = json.loads(watching.stdout.readline())
                states[change["node"]] = change["state"]
            return time.monotonic() - began

        for node in cluster.nodes:
            read_until(node.name, "online", 20)
        assert set(states.values()) == {"online"}

        lost = cluster.nodes[1]
        cluster.cut(lost)
        noticed_s = read_until(lost.name, "unreachable", 20)
        others = {states[node.name] for node in cluster.nodes if node is not lost}
        cluster.heal(lost)
        healed_s = read_until(lost.name, "online", 40)

    assert noticed_s < 10
    assert others == {"online"}
    assert states[lost.name] == "online"
    assert healed_s < 40


def test_ranks_that_survive_a_node_go_on_in_their_processes(
    cluster: Cluster, master: Master, run_file: Path
) -> None:
    lost, *others = cluster.nodes  # with rank 0, the ranks' store and a writer of checkpoints
    run_file.write_text(f"{run_file.read_text()}rejoin: off\n")
    with ended_after(master.start("start", str(run_file), "--watch")) as watching:
        run_id = json.loads(watching.stdout.readline())["run_id"]
        wait_until(lambda: len(steps_of(rank_journal(cluster, run_id))) > 21, "step 21", 120)
        survivors = read_pids(others, run_id)
        kill_part(lost, run_id)
        lost_s = time.time()
        told, _ = watching.communicate(timeout=200)
    lines = [json.loads(line) for line in told.splitlines()]
    texts = [line["text"] for line in lines if line["kind"] == "event"]
    ended = lines[-1]["run"]
    assert (ended["state"], ended["step"], ended["attempt"]) == ("done", NUM_STEPS, 1), texts
    assert read_pids(others, run_id) == survivors
    names = " and ".join(node.name for node in others)
    (regrouped,) = [text for text in texts if "continued in their processes" in text]
    assert regrouped.startswith(f"{lost.name} was lost; {names} continued"), texts
    for rank, node in enumerate(others, start=1):
        journal = attempt_folder(node, run_id) / f"rank-{rank}.jsonl"
        assert steps_of(journal) == list(range(1, NUM_STEPS + 1)), "no step lost or done twice"
        records = [json.loads(line) for line in journal.read_text().splitlines()]
        (line,) = (record for record in records if record["kind"] == "regrouped")
        first = next(r for r in records if r["kind"] == "step" and r["step"] > line["step"])
        assert first["time_s"] - lost_s < BACK_S
        assert len(first["shares"]) == len(others)
    saved = [record["copies"] for record in records if record["kind"] == "checkpoint"]
    assert saved[-1] == len(others), "the second copy moved to a node that is left"
    (story,) = master.answer("runs", "show", run_id)["interruptions"]
    assert (story["is_regrouped"], story["state"]) == (True, "recovered")
    assert story["resumed_nodes"] == [node.name for node in others]
    wait_until(lambda: not tagged_processes(run_id), "the end of all processes", 30)


def read_pids(nodes: Sequence[Node], run_id: str) -> list[int]:
    """Return the processes of the ranks on these nodes."""
    started = [json.loads((attempt_folder(n, run_id) / "started.json").read_text()) for n in nodes]
    return [row["pid"] for one in started for row in one["ranks"]]


def kill_part(node: Node, run_id: str) -> None:
    """Kill what a node runs of an attempt at once, as when it loses power."""
    folder = attempt_folder(node, run_id)
    owners = [json.loads((folder / name).read_text()) for name in ("started.json", "election.json")]
    for pid in [*(owner["pid"] for owner in owners), *read_pids([node], run_id)]:
        os.kill(pid, signal.SIGKILL)


def test_a_lost_node_is_recovered_on_the_others_without_a_person(
    cluster: Cluster, master: Master, run_file: Path, tmp_path: Path
) -> None:
    """With streamed layers, and as if nothing had been lost. The last test: its setting stays."""
    *others, lost = cluster.nodes
    undisturbed = losses_of_a_whole_run(cluster, master, run_file)
    run_file.write_text(f"{RUN_FILE}parallel: streamed\nrecovery: resume\n")
    master.answer("settings", "set", "lost_after_s", "10")
    with ended_after(master.start("start", str(run_file), "--watch")) as watching:
        run_id = json.loads(watching.stdout.readline())["run_id"]
        wait_until(lambda: len(steps_of(rank_journal(cluster, run_id))) > 21, "step 21", 120)
        cluster.cut(lost)
        told, _ = watching.communicate(timeout=200)
    cluster.heal(lost)
    lines = [json.loads(line) for line in told.splitlines()]
    texts = [line["text"] for line in lines if line["kind"] == "event"]
    (interrupted,) = [text for text in texts if text.startswith("node ") and "was lost" in text]
    assert interrupted.startswith(f"node {lost.name} was lost"), texts
    # At the loss a survivor saves the last step that was done.
    (saved,) = [text for text in texts if text.endswith("before the attempt ended")]
    reached = int(saved.split(" saved step ")[1].split()[0])
    ended = lines[-1]["run"]
    assert watching.returncode == 0, texts
    assert (ended["state"], ended["step"], ended["attempt"]) == ("done", NUM_STEPS, 2), texts
    assert ended["nodes"] == [node.name for node in others]
    journal = attempt_folder(others[0], run_id, 2) / "rank-0.jsonl"
    assert steps_of(journal) == list(range(reached + 1, NUM_STEPS + 1))
    wait_until(lambda: not tagged_processes(run_id), "the end of the lost node's part", 90)
    first = attempt_folder(others[0], run_id) / "rank-0.jsonl"
    assert b'"num_streamed"' in first.read_bytes()
    assert b'"num_streamed"' in journal.read_bytes()
    assert losses_of(first, journal) == pytest.approx(undisturbed, rel=1e-4)
    out = tmp_path / "merged"
    exported = master.rackless("export", run_id, "--to", "merged", "--out", str(out), timeout_s=200)
    assert exported.code == 0, exported.problem
    chat = master.rackless("chat", str(out), "--prompt", "Who?", "--max-tokens", "8", timeout_s=120)
    assert chat.code == 0, chat.problem
    assert chat.document["text"]
