"""The whole path on two loopback nodes, typed as commands: start, stop, resume, export, delete.

`tests/test_end_to_end.py` has what needs nodes with sshd: a killed master, cut links, idle ports.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.nodes.transport.loopback import power_cut
from tests.fakes.site import Site, open_site, slowed, tagged_processes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NODES = ("alpha", "beta")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("site")) as opened:
        yield opened


@contextlib.contextmanager
def killed_after(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def test_start_stop_resume_export_delete(site: Site, tmp_path: Path) -> None:
    rarely = {"every_minutes": None, "every_steps": 40, "keep": 3, "copies": 2}
    run_file = str(site.write_run_file(300, checkpoint=rarely))
    run = site.answer("start", run_file)
    run_id = run["run_id"]
    assert (run["state"], run["nodes"], run["attempt"]) == ("running", list(NODES), 1)

    wait_until(lambda: len(site.steps_told("alpha", run_id, 0)) >= 6, "six steps")
    with slowed(run_id):
        again = site.rackless("start", run_file)
        assert (again.code, "is already busy" in again.problem) == (1, True)
        assert run_id in again.problem
        assert [known["run_id"] for known in site.answer("runs", "list")] == [run_id]
        shown = site.answer("runs", "show", run_id)
        assert (shown["state"], shown["phase"]) == ("running", "training")
        assert [rank["node"] for rank in shown["ranks"]] == list(NODES)
        assert sum(rank["share"] for rank in shown["ranks"]) == pytest.approx(1.0)

        saved = site.answer("runs", "save", run_id)
        assert saved["stall_s"] < saved["seconds"]
        traced = site.answer("runs", "trace", run_id, "--steps", "2")
        assert (traced["is_complete"], len(traced["ranks"])) == (True, len(NODES))
        for name, trace in zip(NODES, traced["ranks"], strict=True):
            assert (trace["first_step"], trace["last_step"]) == (
                traced["first_step"], traced["first_step"] + 1
            )  # fmt: skip
            assert Path(trace["path"]).parent.name == name
            assert b"traceEvents" in gzip.decompress(Path(trace["path"]).read_bytes())
            assert trace["top"][0]["share"] > 0

        stopped = site.answer("runs", "stop", run_id[:-1])
    assert stopped["state"] == "stopped"
    assert tagged_processes(run_id) == []
    reached = len(site.steps_told("alpha", run_id, 0))

    newest = site.answer("checkpoints", run_id, "--verify")[0]
    assert (newest["step"], newest["verified"]) == (reached, True)
    assert newest["nodes"] == list(NODES)

    refused = site.rackless("runs", "save", run_id)
    assert (refused.code, "only a running run can save" in refused.problem) == (1, True)

    resumed = site.rackless(
        "runs", "resume", run_id, "--verify", "2", "--watch", "--json", "--nodes", "beta"
    )
    assert resumed.code == 0, resumed.problem
    lines = resumed.lines
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[0] <= reached - 1, "two logged steps are replayed"
    texts = [line["text"] for line in lines if line["kind"] == "event"]
    assert any("replayed" in text and "MISMATCH" not in text for text in texts), texts
    ended = lines[-1]["run"]
    assert (ended["state"], ended["attempt"], ended["nodes"]) == ("done", 2, ["beta"])
    assert ended["loss"] < ended["first_loss"]

    out = tmp_path / "model"
    made = site.answer("export", run_id, "--to", "merged", "--out", str(out))
    assert (made["path"], made["artifact"].endswith("-merged:1")) == (str(out), True)
    assert {"config.json", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    full = site.rackless("export", run_id, "--to", "merged", "--out", str(out))
    assert (full.code, full.output) == (1, "")
    assert "is not empty" in full.problem

    small = tmp_path / "small"
    site.answer("export", run_id, "--to", "gguf", "--type", "q8_0", "--out", str(small))
    (proof,) = json.loads((small / "proof.json").read_bytes())["proofs"]
    assert (proof["name"], proof["keep"]) == ("Q8_0", True)
    (file,) = small.glob("*-Q8_0.gguf")
    assert file.read_bytes()[:4] == b"GGUF"
    assert run_id in (small / "README.md").read_text()

    keep_copies(site, out, tmp_path / "copied")
    serve(site, small)
    asked = ("--prompt", "Who founded Brenford?", "--max-tokens", "24")
    told = site.answer("chat", run_id, *asked)
    assert (told["cut"], told["num_tokens"] > 1) == (False, True)
    assert told["runtime"].startswith("Transformers")
    again = site.answer("chat", str(small), "--node", "beta", *asked)
    assert again["runtime"].startswith("llama.cpp")
    assert again["text"][:12] == told["text"][:12]

    logs = site.answer("runs", "logs", run_id, "--rank", "0")
    assert [(log["node"], log["attempt"]) for log in logs] == [("alpha", 1), ("beta", 2)]

    assert site.answer("runs", "delete", run_id)["nodes_not_reached"] == []
    assert site.answer("runs", "list") == []
    assert not any((site.agent_home(name) / "runs" / run_id).exists() for name in NODES)
    assert not (site.home / "runs" / run_id).exists()


def keep_copies(site: Site, out: Path, second: Path) -> None:
    """Copy the merged model to a node and a folder, check both, and delete them again."""
    (name,) = [one["name"] for one in site.answer("artifacts") if one["format"] == "merged"]
    site.answer("artifacts", "copy", name, "--to", "beta")
    (there,) = (site.agent_home("beta") / "artifacts").iterdir()
    assert (there / "config.json").read_bytes() == (out / "config.json").read_bytes()
    site.answer("artifacts", "copy", name, "--to", str(second))
    checked = site.answer("artifacts", "check", name)
    assert [one["state"] for one in checked["copies"]] == ["whole"] * 3
    (there / "config.json").write_text("{}")
    damaged = site.rackless("artifacts", "check", name, "--json")
    assert [one["state"] for one in damaged.document["copies"]] == ["whole", "damaged", "whole"]
    site.answer("artifacts", "delete", name, "--copy", "beta")
    assert not there.exists()
    site.answer("artifacts", "delete", name, "--copy", str(second))
    refused = site.rackless("artifacts", "delete", name, "--json")
    assert (refused.code, "the last copy" in refused.problem) == (1, True)
    assert (out / "config.json").exists()


def serve(site: Site, folder: Path) -> None:
    """Ask for the commands that serve a GGUF artifact; its Modelfile has the model's template."""
    (name,) = [one["name"] for one in site.answer("artifacts") if one["format"] == "gguf"]
    server, ollama = site.answer("artifacts", "serve-command", name)
    assert str(folder) in server["command"]
    assert "the model's own chat template" in ollama["notes"][0]
    assert "<|assistant|>{{ else if" in (folder / "Modelfile-Q8_0").read_text()


def test_the_hubs_token_is_kept_on_nodes_until_it_is_taken_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "hf_" + "x" * 34
    monkeypatch.setenv("HF_TOKEN", token)  # of the commands, not of the nodes
    kept = [site.node_home(name) / ".cache" / "huggingface" / "token" for name in NODES]
    assert [one["place"] for one in site.answer("nodes", "token")] == ["none", "none"]
    given = site.rackless("nodes", "token", "alpha", "--give", "--json")
    assert given.document == [{"node": "alpha", "place": "same", "problem": ""}]
    assert token not in given.output + given.problem
    assert [path.exists() for path in kept] == [True, False]
    assert kept[0].read_text() == token
    assert [one["place"] for one in site.answer("nodes", "token", "--take-back")] == ["none"] * 2
    assert [path.exists() for path in kept] == [False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x\ndata: {train: y}\n", "line 1: modle is not known; did you mean model?"),
        ("model: ./nowhere\ndata: {train: train.jsonl}\n", "train.jsonl (data.train) does not"),
    ],
)
def test_bad_run_file_changes_nothing(site: Site, text: str, message: str) -> None:
    before = site.answer("runs", "list")
    path = site.folder / "bad.yaml"
    path.write_text(text)
    done = site.rackless("start", str(path), "--json")
    assert done.code in (1, 2)
    assert done.output == ""
    assert message in done.problem
    assert site.answer("runs", "list") == before


def test_a_killed_rank_and_a_lost_node_are_recovered_without_a_person(site: Site) -> None:
    """The last test: beta is gone after it."""
    num_steps = 120
    with killed_after(
        site.start("start", str(site.write_run_file(num_steps)), "--watch", "--json")
    ) as watching:
        assert watching.stdout is not None
        run_id = json.loads(watching.stdout.readline())["run_id"]
        wait_until(lambda: len(site.steps_told("alpha", run_id, 0)) >= 8, "eight steps")
        for rank in site.ranks_of("beta", run_id):
            os.kill(rank, signal.SIGKILL)
        wait_until(lambda: len(site.steps_told("alpha", run_id, 0, 2)) >= 8, "attempt 2")
        power_cut(site.node_home("beta"))
        out, problem = watching.communicate(timeout=120)
    assert watching.returncode == 0, problem
    lines = [json.loads(line) for line in out.splitlines()]
    ended = lines[-1]["run"]
    assert (ended["state"], ended["step"], ended["attempt"]) == ("done", num_steps, 3)
    assert ended["nodes"] == ["alpha"]
    told = [line["text"] for line in lines if line.get("event") == "recovery"]
    assert sum("resumed automatically on alpha and beta, " in text for text in told) == 1
    assert sum("resumed automatically on alpha, without beta" in text for text in told) == 1
    assert sum("the loss cost" in text for text in told) == 2, told
    # Every attempt goes on from what alpha saved at the loss, whatever came every five steps.
    reached = 0
    for attempt in (1, 2, 3):
        steps = site.steps_told("alpha", run_id, 0, attempt)
        assert steps == list(range(steps[0], steps[-1] + 1))
        assert reached - 1 <= steps[0] - 1 <= reached
        reached = steps[-1]
    assert reached == num_steps
    assert not tagged_processes(run_id)
