"""Requests through the server that reach more than one module: runs, streams, merges, probes."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.contract import requests
from agents.contract.node import GpuFacts, GpuUse, NodeFacts
from agents.contract.requests import NodeRequest
from agents.contract.requests.connection import Cancel, Ping, Shutdown
from agents.contract.requests.exports import MakeJob, Origin, TextSource
from agents.contract.requests.node import ReadFacts
from agents.contract.run import ControlRequest, RankPlacement
from agents.contract.spec import DataSpec, RunSpec
from agents.contract.wire import to_wire
from agents.serve.channel import Call
from agents.serve.handlers import find_handler, handler_of
from agents.state import Home
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.control_requests import take_requests
from agents.supervisor.launch import launch
from agents.supervisor.leases import borrow_device
from app.nodes.credential import make_credential
from tests.agents.node.test_checkpoints import make
from tests.agents.serve.test_server import Agent, serve_agent
from tests.agents.supervisor.conftest import Node, kill_supervisor, make_node


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    yield from make_node(tmp_path, monkeypatch)


@pytest.fixture
def agent(node: Node) -> Iterator[Agent]:
    yield from serve_agent(node.home.path)


def ask(agent: Agent, kind: str, **args: Any) -> Any:
    response = agent.ask(kind, **args)
    assert response["error"] is None, response["error"]
    return response["result"]


def all_requests() -> list[type[NodeRequest[Any]]]:
    found = []
    for module in pkgutil.iter_modules(requests.__path__, f"{requests.__name__}."):
        values = vars(importlib.import_module(module.name)).values()
        classes = [one for one in values if isinstance(one, type) and issubclass(one, NodeRequest)]
        found += [one for one in classes if one.__module__ == module.name]
    return found


@pytest.mark.parametrize("request_class", all_requests())
def test_every_request_is_found_by_its_kind_and_handled(
    request_class: type[NodeRequest[Any]],
) -> None:
    kind = request_class.kind
    if issubclass(request_class, (Ping, Cancel, Shutdown)):
        assert find_handler(kind) is None, "the server answers it itself"
        return
    assert requests.find_request(kind) is request_class
    *taken, given = typing.get_type_hints(handler_of(request_class)).values()
    assert taken == [Call, request_class]
    assert given in (request_class.answer, dict[str, Any])  # what a program reports is a dict
    if request_class.flat:
        assert [field.name for field in dataclasses.fields(request_class)] == [request_class.flat]


def test_no_two_requests_have_one_kind() -> None:
    kinds = [one.kind for one in all_requests()]
    assert len(kinds) == len(set(kinds)) > 60


def test_run_from_launch_to_deletion(agent: Agent, node: Node) -> None:
    status = ask(agent, "attempt.launch", **to_wire(node.intent("train")))
    assert status["state"] in ("starting", "running")
    assert ask(agent, "attempt.list")["attempts"][0]["run_id"] == "run-1"
    error = agent.ask("run.delete", run_id="run-1")["error"]
    assert error["message"] == "Run run-1 is still running on this node."
    assert ask(agent, "attempt.confirm", run_id="run-1", attempt=1, is_final=True) == {}
    assert ask(agent, "attempt.keep", run_id="run-1", attempt=1, is_closed=False) == {}
    assert (node.home.attempt("run-1", 1) / "kept").exists()
    assert ask(agent, "attempt.keep", run_id="run-1", attempt=1, is_closed=True) == {}
    assert (node.home.attempt("run-1", 1) / "closed.json").exists()
    kill_supervisor(AttemptFolder(node.home, "run-1", 1))
    error = agent.ask("run.delete", run_id="run-1")["error"]
    assert error["message"] == "Run run-1 is still running on this node."
    assert ask(agent, "attempt.status", run_id="run-1", attempt=1)["state"] == "running"
    wish = {"wish_id": "w1", "kind": "save"}
    assert ask(agent, "attempt.wish", run_id="run-1", attempt=1, wish=wish) == {}
    assert take_requests(node.home.attempt("run-1", 1)) == [
        ControlRequest(wish_id="w1", kind="save")
    ]
    error = agent.ask("attempt.wish", run_id="run-1", attempt=1, wish={**wish, "kind": "fly"})
    assert "kind" in error["error"]["message"]
    status = ask(agent, "attempt.stop", run_id="run-1", attempt=1, grace_s=5)
    error = agent.ask("attempt.wish", run_id="run-1", attempt=1, wish=wish)["error"]
    assert error["message"] == "Attempt 1 of run run-1 has ended on this node."
    assert (status["state"], status["num_processes"]) == ("stopped", 0)
    assert "supervisor.jsonl" in ask(agent, "stream.list", run_id="run-1", attempt=1)["streams"]
    assert ask(agent, "run.fence", run_id="run-1", attempt=3) == {"attempt": 3, "halted": 0}
    claim = ask(agent, "run.claim", run_id="run-1", attempt=4, replaces=1)
    assert claim == {"is_granted": True, "fence": 4, "launched": 1}
    assert ask(agent, "run.delete", run_id="run-1")["freed_bytes"] > 0
    assert not node.home.run("run-1").exists()
    assert ask(agent, "run.delete", run_id="run-1") == {"freed_bytes": 0}
    assert ask(agent, "attempt.list") == {"attempts": []}


def test_list_of_very_many_attempts_fits_into_a_message(agent: Agent, node: Node) -> None:
    ended = {"state": "done", "message": "", "hint": "", "ended_s": 2.0, "ranks": []}
    for number in range(330):
        intent = node.intent("finish", run_id=f"run-{number % 300}", attempt=1 + number // 300)
        intent = replace(intent, spec=replace(intent.spec, model="org/" + "m" * 4000))
        folder = node.home.attempt(intent.run_id, intent.attempt)
        folder.mkdir(parents=True)
        (folder / "intent.json").write_text(json.dumps(to_wire(intent)))
        (folder / "started.json").write_text(json.dumps({"started_s": float(number)}))
        (folder / "exit.json").write_text(json.dumps(ended))
    attempts = ask(agent, "attempt.list")["attempts"]
    assert 180 < len(attempts) < 330
    runs = [(a["run_id"], a["attempt"]) for a in attempts]
    assert runs == sorted(runs)
    assert {("run-29", 2), ("run-299", 1)} <= set(runs)
    for told in attempts:
        is_newest = told["attempt"] == 2 or (told["run_id"], 2) not in runs
        assert (told["spec"] is not None) is is_newest


def test_run_outlives_the_connection(agent: Agent, node: Node) -> None:
    ask(agent, "attempt.launch", **to_wire(node.intent("train")))
    agent.end()
    again = Agent(node.home.path)
    again.read()
    before = ask(again, "attempt.status", run_id="run-1", attempt=1)
    assert before["state"] == "running"
    ask(again, "attempt.stop", run_id="run-1", attempt=1, grace_s=5)
    again.end()


def test_follow_sends_the_whole_log_then_ends(agent: Agent, node: Node) -> None:
    ask(agent, "attempt.launch", **to_wire(node.intent("chatty")))
    line = {"run_id": "run-1", "attempt": 1, "offsets": {}}
    agent.write(
        json.dumps({"type": "request", "id": 9, "kind": "stream.follow", "args": line}).encode()
        + b"\n"
    )
    assert agent.read()["result"] == {"follow": 9}
    data: dict[str, bytes] = {}
    while (message := agent.read())["kind"] == "stream.data":
        assert message["request_id"] == 9
        chunk = message["data"]
        assert chunk["follow"] == 9
        assert chunk["offset"] == len(data.get(chunk["stream"], b""))
        data[chunk["stream"]] = data.get(chunk["stream"], b"") + base64.b64decode(
            chunk["data_base64"]
        )
    assert message["kind"] == "stream.end"
    assert message["data"] == {"follow": 9, "state": "done", "error": None}
    folder = node.home.attempt("run-1", 1)
    for name, seen in data.items():
        assert (folder / name).read_bytes() == seen
    assert set(data) == {"supervisor.jsonl", "rank-0.log", "rank-0.jsonl"}


def test_unfollow_ends_a_follow(agent: Agent, node: Node) -> None:
    ask(agent, "attempt.launch", **to_wire(node.intent("train")))
    agent.ask("stream.follow", 4, run_id="run-1", attempt=1)
    wish = {"type": "request", "id": 5, "kind": "stream.unfollow", "args": {"follow": 4}}
    agent.write(json.dumps(wish).encode() + b"\n")
    answered, ended = None, None  # either may come first
    while answered is None or ended is None:
        message = agent.read()
        if message["type"] == "response":
            answered = message
        elif message["kind"] == "stream.end":
            ended = message
    assert (answered["id"], answered["error"]) == (5, None)
    assert ended["data"]["error"] is None
    ask(agent, "attempt.stop", run_id="run-1", attempt=1, grace_s=5)


def test_follow_of_a_deleted_attempt_ends_with_the_reason(agent: Agent, node: Node) -> None:
    ask(agent, "attempt.launch", **to_wire(node.intent("finish")))
    while ask(agent, "attempt.status", run_id="run-1", attempt=1)["num_processes"]:
        pass
    agent.ask("stream.follow", 4, run_id="run-1", attempt=1, offsets={"rank-0.jsonl": 10**9})
    while (message := agent.read()).get("kind") == "stream.data":
        pass
    assert message["kind"] == "stream.end"
    assert "it was truncated" in message["data"]["error"]["message"]


def test_checkpoints_over_the_wire(agent: Agent, node: Node) -> None:
    make(node.home)
    (listed,) = ask(agent, "checkpoint.list")["checkpoints"]
    assert listed["step"] == 100
    assert ask(agent, "checkpoint.verify", run_id="run-1", step=100)["verified"] is True
    assert ask(agent, "checkpoint.delete", run_id="run-1", step=100) == {}
    assert ask(agent, "checkpoint.list", run_id="run-1") == {"checkpoints": []}


MERGE = """#!{python}
import json, os, sys
assert sys.argv[1:4] == ["-m", "agents.program", "agents.quantizers.merge"], sys.argv
job = json.load(open(sys.argv[4]))
print("a warning of some library", flush=True)
print(json.dumps({{"kind": "progress", "message": "loading the model"}}), flush=True)
if job["model_path"] == "missing":
    print(json.dumps({{"kind": "failed", "message": "No model there.", "hint": "Bring it"}}))
    sys.exit(3)
assert os.path.isdir(job["checkpoint"])
os.makedirs(job["destination"])
with open(os.path.join(job["destination"], "model.safetensors"), "wb") as file:
    file.write(b"abc")
print(json.dumps({{"kind": "progress", "message": "wrote 3 bytes", "phase": "write"}}))
"""


@pytest.fixture
def merge(tmp_path: Path) -> str:
    path = tmp_path / "merge-python"
    path.write_text(MERGE.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def merge_job(merge: str, **changes: Any) -> dict[str, Any]:
    job = {"run_id": "run-1", "step": 100, "python": merge, "model_path": "org/tiny"}
    return {**job, "destination": "runs/run-1/exports/merged-100", **changes}


def test_merge_reports_progress_and_files(agent: Agent, node: Node, merge: str) -> None:
    make(node.home)
    line = {"type": "request", "id": 2, "kind": "export.merged", "args": merge_job(merge)}
    agent.write(json.dumps(line).encode() + b"\n")
    messages = [agent.read() for _ in range(3)]
    reported = [(m["data"]["phase"], m["data"]["message"]) for m in messages[:2]]
    assert reported == [("", "loading the model"), ("write", "wrote 3 bytes")]
    result = messages[2]["result"]
    assert result["path"] == "runs/run-1/exports/merged-100"
    assert [(f["path"], f["size_bytes"]) for f in result["files"]] == [("model.safetensors", 3)]
    left = sorted(path.name for path in node.home.run("run-1").iterdir())
    assert left == ["checkpoints", "exports"]


def test_failed_merge_says_why(agent: Agent, node: Node, merge: str) -> None:
    make(node.home)
    error = agent.ask("export.merged", **merge_job(merge, model_path="missing"))["error"]
    assert (error["message"], error["hint"]) == ("No model there.", "Bring it")
    error = agent.ask("export.merged", **merge_job(merge, step=7))["error"]
    assert error["message"] == "This node has no checkpoint of run run-1 at step 7."
    error = agent.ask("export.merged", **merge_job(merge, destination="../x"))["error"]
    assert "The destination '../x' is not allowed." in error["message"]
    error = agent.ask("export.merged", **merge_job("/bin/false"))["error"]
    assert error["message"] == "The merge of run-1 failed: it said nothing"


PREVIEW = """#!{python}
import json, sys
assert sys.argv[1:4] == ["-m", "agents.program", "agents.trainer.data.preview"], sys.argv
job = json.load(open(sys.argv[4]))
print(json.dumps({{"kind": "progress", "message": "1,000 rows"}}), flush=True)
if job["train_path"] == "missing":
    print(json.dumps({{"kind": "failed", "message": "No data there.", "hint": "Bring it"}}))
    sys.exit(1)
json.dump({{"format": "text", "rows": job["spec"]["batch_sequences"]}}, open(sys.argv[5], "w"))
"""


def start_preview(agent: Agent, folder: Path, script: str) -> dict[str, Any]:
    """Ask for a preview by a Python that is a script, and return the job."""
    python = folder / "python"
    python.write_text(script.format(python=sys.executable))
    python.chmod(0o755)
    spec = to_wire(RunSpec(model="m", data=DataSpec(train="t"), batch_sequences=7))
    job = {"python": str(python), "spec": spec, "model_path": "m", "train_path": "t"}
    line = {"type": "request", "id": 2, "kind": "data.preview", "args": job}
    agent.write(json.dumps(line).encode() + b"\n")
    return job


def test_preview_runs_in_the_environment_and_leaves_nothing(
    agent: Agent, node: Node, tmp_path: Path
) -> None:
    job = start_preview(agent, tmp_path, PREVIEW)
    messages = [agent.read() for _ in range(2)]
    assert messages[0]["data"]["message"] == "1,000 rows"
    assert messages[1]["result"] == {"format": "text", "rows": 7}
    error = agent.ask("data.preview", **{**job, "train_path": "missing"})["error"]
    assert (error["message"], error["hint"]) == ("No data there.", "Bring it")
    assert not list(node.home.path.glob(".job-*"))


SLOW = """#!{python}
import json, time
print(json.dumps({{"kind": "progress", "message": "at work"}}), flush=True)
time.sleep(60)
"""


def test_an_agent_that_ends_in_the_middle_leaves_no_job_behind(
    agent: Agent, node: Node, tmp_path: Path
) -> None:
    start_preview(agent, tmp_path, SLOW)
    assert agent.read()["data"]["message"] == "at work"
    assert list(node.home.path.glob(".job-*"))
    agent.end()
    assert not list(node.home.path.glob(".job-*"))


def test_the_next_agent_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with subprocess.Popen(["true"]) as ended:
        pass
    left, used = home / f".job-a-{ended.pid}", home / f".job-b-{os.getpid()}"
    for folder in (left, used):
        folder.mkdir(parents=True)
    Agent(home).end()
    assert (left.exists(), used.exists()) == (False, True)


CALIBRATION = """#!{python}
import json, os, sys
assert sys.argv[1:4] == ["-m", "agents.program", "agents.trainer.calibration"], sys.argv
assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
job = json.load(open(sys.argv[4]))
json.dump({{"card": job["device"], "matrix_flops_per_s": 5e13}}, open(sys.argv[5], "w"))
"""


def test_calibration_leases_its_gpu(agent: Agent, node: Node, tmp_path: Path) -> None:
    python = tmp_path / "calibration-python"
    python.write_text(CALIBRATION.format(python=sys.executable))
    python.chmod(0o755)
    job = {"python": str(python), "device": "cuda:1", "device_id": "GPU-1", "seconds": 1.0}
    told = ask(agent, "gpu.calibrate", **job)
    assert told == {"card": "cuda:1", "matrix_flops_per_s": 5e13}
    ask(agent, "attempt.launch", **to_wire(node.intent("train")))
    busy = agent.ask("gpu.calibrate", **{**job, "device_id": "cpu"})["error"]
    assert "already busy: run run-1 uses its CPU" in busy["message"]
    ask(agent, "attempt.stop", run_id="run-1", attempt=1, grace_s=5)


QUANTIZE = """#!{python}
import json, os, sys, time
job = json.load(open(sys.argv[4]))
seen = [job["device"], os.environ["CUDA_VISIBLE_DEVICES"]]
home = os.environ["RACKLESS_AGENT_HOME"]
print(json.dumps({{"kind": "progress", "message": " ".join(seen)}}), flush=True)
while not os.path.exists(os.path.join(home, "go-on")):
    time.sleep(0.01)
os.makedirs(os.path.join(home, job["destination"]))
"""


@pytest.fixture
def quantize(tmp_path: Path) -> str:
    path = tmp_path / "quantize-python"
    path.write_text(QUANTIZE.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def export(agent: Agent, number: int, python: str, device: str, device_id: str) -> None:
    job = MakeJob(
        python=python,
        model="m",
        method="nf4",
        destination=f"runs/r-{number}/exports/nf4",
        origin=Origin(base="b", data="d", run_id=f"r-{number}", run_name="n", step=1),
        train=TextSource(path="t"),
        device=device,
        device_id=device_id,
    )
    line = {"type": "request", "id": number, "kind": "export.made", "args": to_wire(job)}
    agent.write(json.dumps(line).encode() + b"\n")


def test_exports_have_a_gpu_one_after_the_other(agent: Agent, node: Node, quantize: str) -> None:
    export(agent, 1, quantize, "cuda:1", "GPU-1")
    assert agent.read()["data"]["message"] == "cuda:0 1", "all that it sees is that one"
    export(agent, 2, quantize, "cuda:1", "GPU-1")
    waiting = "waiting until the export of run r-1 has finished with the GPU"
    assert agent.read()["data"]["message"] == waiting
    export(agent, 3, quantize, "cpu", "cpu")
    assert agent.read()["data"]["message"] == "cpu ", "it sees no GPU"
    (node.home.path / "go-on").touch()
    ended = [agent.read() for _ in range(4)]
    answers = {one["id"]: one["error"] for one in ended if one["type"] == "response"}
    assert answers == {1: None, 2: None, 3: None}


def test_an_export_that_waits_can_be_cancelled(agent: Agent, node: Node, quantize: str) -> None:
    export(agent, 1, quantize, "cuda:1", "GPU-1")
    agent.read()
    export(agent, 2, quantize, "cuda:1", "GPU-1")
    assert "waiting until" in agent.read()["data"]["message"]
    assert agent.ask("cancel", 8, request=2)["result"] == {}
    ended = agent.read()
    assert (ended["id"], ended["error"]["kind"]) == (2, "user")
    assert "the export of run r-1 uses GPU GPU-1" in ended["error"]["message"]
    (node.home.path / "go-on").touch()
    assert agent.read()["error"] is None


def test_an_export_never_joins_a_run(agent: Agent, node: Node, quantize: str) -> None:
    place = RankPlacement(rank=0, local_rank=0, node="a", device="cuda:1", device_id="GPU-1")
    intent = replace(node.intent("train"), ranks=(place,))
    ask(agent, "attempt.launch", **to_wire(intent))
    export(agent, 1, quantize, "cuda:1", "GPU-1")
    error = agent.read()["error"]
    assert "already busy: run run-1 uses GPU GPU-1" in error["message"]
    assert not (node.home.path / "runs" / "r-1").exists()
    ask(agent, "attempt.stop", run_id="run-1", attempt=1, grace_s=5)


def test_facts_tell_who_uses_a_gpu(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from agents.serve.handlers import node as handler

    cards = tuple(GpuFacts(uuid=f"GPU-{i}", index=i, name="x") for i in range(3))
    plain = handler.read_node_facts

    def read(home: Home) -> NodeFacts:
        return replace(plain(home), gpus=cards)

    monkeypatch.setattr("agents.node.facts.RECORDER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(handler, "read_node_facts", read)
    place = RankPlacement(rank=0, local_rank=0, node="a", device="cuda:1", device_id="GPU-1")
    launch(node.home, replace(node.intent("train"), ranks=(place,)))
    call = SimpleNamespace(home=node.home)
    with borrow_device(node.home, "GPU-2", "the export of run r-2", "a", lambda name: False):
        uses = handler.read_facts(call, ReadFacts()).gpu_uses  # type: ignore[arg-type]
    assert uses == (
        GpuUse(uuid="GPU-1", name="run run-1", run_id="run-1"),
        GpuUse(uuid="GPU-2", name="the export of run r-2"),
    )


def test_config_of_a_model_on_the_node(agent: Agent, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    assert ask(agent, "model.config", model=str(folder)) == {"config": {"hidden_size": 64}}
    assert ask(agent, "model.config", model=str(tmp_path / "none")) == {"config": None}
    (folder / "config.json").write_text("[")
    error = agent.ask("model.config", model=str(folder))["error"]
    assert "config.json is not JSON" in error["message"]


def test_link_between_two_agents(agent: Agent, node: Node) -> None:
    door = ask(agent, "probe.listen", address="127.0.0.1", timeout_s=5)
    link = ask(agent, "probe.connect", address="127.0.0.1", num_bytes=100_000, **door)
    assert link["bytes_per_s"] > 0
    assert 1024 <= ask(agent, "port.choose", address="127.0.0.1")["port"] < 65536


def test_allreduce_over_two_agents_and_without_the_second(agent: Agent, node: Node) -> None:
    pytest.importorskip("torch")
    probe = {
        "python": sys.executable,
        "world_size": 2,
        "master_address": "127.0.0.1",
        "interface": "lo",
        "num_values": 1000,
        "credential": make_credential(),
    }

    def post(number: int, rank: int, port: int, timeout_s: float) -> None:
        args = {**probe, "rank": rank, "master_port": port, "timeout_s": timeout_s}
        line = {"type": "request", "id": number, "kind": "probe.allreduce", "args": args}
        agent.write(json.dumps(line).encode() + b"\n")

    port = ask(agent, "port.choose", address="127.0.0.1")["port"]
    post(10, 0, port, 60)
    post(11, 1, port, 60)
    answers = {m["id"]: m for m in (agent.read(), agent.read())}
    assert set(answers) == {10, 11}
    for answer in answers.values():
        assert answer["error"] is None
        assert answer["result"]["sum_ok"] is True
        assert answer["result"]["num_values"] == 1000
        assert answer["result"]["seconds"] > 0
    port = ask(agent, "port.choose", address="127.0.0.1")["port"]
    post(12, 0, port, 2)
    error = agent.read()["error"]
    assert error["message"] == (
        f"Rank 1 did not come to the all-reduce at 127.0.0.1 port {port} within 2 s."
    )


def test_a_stranger_can_do_nothing_with_the_store_of_a_check(agent: Agent, node: Node) -> None:
    """Rank 0 waits alone while a stranger tries its store; then rank 1 comes, and all is well."""
    pytest.importorskip("torch")
    from tests.hostile.stranger import try_bytes, try_torch

    port = ask(agent, "port.choose", address="127.0.0.1")["port"]
    probe = {
        "python": sys.executable,
        "world_size": 2,
        "master_address": "127.0.0.1",
        "master_port": port,
        "num_values": 10,
        "credential": make_credential(),
        "timeout_s": 60,
    }
    for rank in range(2):
        line = {"type": "request", "id": 20 + rank, "kind": "probe.allreduce"}
        agent.write(json.dumps({**line, "args": {**probe, "rank": rank}}).encode() + b"\n")
        if rank == 0:
            _wait_for_listener(port)
            tried = {**try_torch("127.0.0.1", port), **try_bytes("127.0.0.1", port)}
    answers = [agent.read(), agent.read()]
    assert {name for name, said in tried.items() if said.startswith("GOT")} == set()
    assert [answer["result"]["sum_ok"] for answer in answers] == [True, True]


def _wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")


def test_allreduce_without_torch_says_so(agent: Agent, node: Node, tmp_path: Path) -> None:
    python = tmp_path / "no-torch"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\"; exit 1\n")
    os.chmod(python, 0o755)
    error = agent.ask(
        "probe.allreduce",
        python=str(python),
        rank=1,
        world_size=2,
        master_address="127.0.0.1",
        master_port=1,
    )["error"]
    assert "it said: ModuleNotFoundError: No module named 'torch'" in error["message"]
    assert error["hint"].startswith("Build the training environment")


def test_artifacts_are_hashed_and_deleted_and_nothing_else_is(agent: Agent, node: Node) -> None:
    folder = node.home.path / "artifacts" / "poems-1"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "a.json").write_bytes(b"{}")
    (listed,) = ask(agent, "artifact.hash", path="artifacts/poems-1")["files"]
    assert (listed["path"], listed["size_bytes"]) == ("adapter/a.json", 2)
    for path in ("models/m", "artifacts/poems-1/adapter", "artifacts/../runs"):
        error = agent.ask("artifact.delete", path=path)["error"]
        assert "is not an artifact" in error["message"] or "is not allowed" in error["message"]
    assert ask(agent, "artifact.delete", path="artifacts/poems-1") == {"freed_bytes": 2}
    assert not folder.exists()
    assert ask(agent, "artifact.delete", path="artifacts/poems-1") == {"freed_bytes": 0}
    assert ask(agent, "artifact.hash", path="artifacts/poems-1") == {"files": []}


def test_what_an_export_made_is_deleted_and_nothing_else_of_a_run(agent: Agent, node: Node) -> None:
    run = node.home.path / "runs" / "r1"
    for name in ("exports/awq-8", "checkpoints/step-00000008"):
        (run / name).mkdir(parents=True)
        (run / name / "a").write_bytes(b"12")
    assert ask(agent, "artifact.delete", path="runs/r1/exports/awq-8") == {"freed_bytes": 2}
    error = agent.ask("artifact.delete", path="runs/r1/checkpoints/step-00000008")["error"]
    assert "is not an artifact" in error["message"]
    assert (
        "is not an artifact"
        in agent.ask("artifact.hash", path="runs/r1/exports/awq-8")["error"]["message"]
    )
    assert [path.name for path in run.rglob("a")] == ["a"]


def test_the_ends_of_the_newest_logs_are_read(agent: Agent, node: Node) -> None:
    assert ask(agent, "logs.tail") == {"tails": []}
    for place, attempt in enumerate(("1", "2")):
        folder = node.home.runs / "run-9" / "attempts" / attempt
        folder.mkdir(parents=True)
        (folder / "rank-0.log").write_bytes(b"one line\n" * 5000 + b"the end \xff\n")
        (folder / "supervisor.log").write_bytes(b"")
        os.utime(folder / "rank-0.log", (1000 + place, 1000 + place))
    newest, oldest = ask(agent, "logs.tail")["tails"]
    assert (newest["attempt"], oldest["attempt"]) == (2, 1)
    assert (newest["run_id"], newest["name"], newest["written_s"]) == ("run-9", "rank-0.log", 1001)
    assert newest["size_bytes"] == 45010
    lines = newest["text"].splitlines()
    assert lines[-1] == "the end \ufffd"
    assert set(lines[:-1]) == {"one line"}, "it begins with a whole line"
