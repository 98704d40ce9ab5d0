"""A model in several files, which its nodes hold in parts: one of three loopback nodes is lost, two
go on, and what they have trained is exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.nodes.transport.loopback import power_cut
from tests.fakes.site import DEMO, Site, open_site, tagged_processes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NODES = ("alpha", "beta", "gamma")
NUM_STEPS = 24
# Of a loss in fp32, where gradients are added in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("divided"), NODES) as opened:
        opened.answer("settings", "set", "lost_after_s", "3")
        yield opened


def save_in_several_files(folder: Path) -> Path:
    """Save the demo's model in three files or more."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(DEMO / "model", folder)
    whole = folder / "model.safetensors"
    limit = whole.stat().st_size // 4
    whole.unlink()
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype="auto")
    model.save_pretrained(folder, max_shard_size=limit)
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def read_losses(site: Site, name: str, run_id: str, rank: int, attempt: int) -> dict[int, float]:
    text = (site.attempt(name, run_id, attempt) / f"rank-{rank}.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def read_layers(site: Site, name: str, run_id: str, step: int) -> list[Any]:
    """Return first and last layer of each rank in a checkpoint on a node."""
    folder = site.agent_home(name) / "runs" / run_id / "checkpoints" / f"step-{step:08d}"
    layers: list[Any] = json.loads((folder / "state.json").read_bytes())["layers"]
    return layers


def find_trained_layers(base: Path, merged: Path) -> set[int]:
    """Return the layers whose weights a merged model, which loads without a gap, has changed."""
    from transformers import AutoModelForCausalLM

    loaded = [
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        for folder in (base, merged)
    ]
    assert [told["missing_keys"] for _, told in loaded] == [set(), set()]
    before, after = (model.state_dict() for model, _ in loaded)
    assert before.keys() == after.keys()
    changed = [name for name in before if not before[name].equal(after[name])]
    return {int(name.split(".")[2]) for name in changed if name.startswith("model.layers.")}


@pytest.mark.parametrize(
    "exports",
    [
        pytest.param({"merged": ()}, id="merged"),
        pytest.param(
            {"merged": (), "gguf": ("--type", "Q8_0"), "nf4": ()},
            marks=pytest.mark.campaign,
            id="merged, GGUF, NF4",
        ),
    ],
)
def test_a_lost_part_is_divided_among_the_others(
    site: Site, tmp_path: Path, exports: dict[str, tuple[str, ...]]
) -> None:
    model = str(save_in_several_files(tmp_path / "base"))
    whole = site.write_run_file(NUM_STEPS, model=model, parallel="single", nodes=["alpha"])
    one = site.rackless("start", str(whole), "--watch", "--json").lines[0]
    expected = read_losses(site, "alpha", one["run_id"], 0, 1)
    assert sorted(expected) == list(range(1, NUM_STEPS + 1))

    cut = site.write_run_file(NUM_STEPS, model=model, parallel="pipeline", recovery="off")
    with site.start("start", str(cut), "--watch", "--json") as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        told = watching.stdout.readline()
        assert told, watching.stderr.read()
        run_id = json.loads(told)["run_id"]
        wait_until(lambda: len(site.steps_told("beta", run_id, 1)) >= 7, "seven steps")
        power_cut(site.node_home("gamma"))
        output, _ = watching.communicate(timeout=300)
    lines = [json.loads(line) for line in output.splitlines()]
    texts = [line["text"] for line in lines if line["kind"] == "event"]
    assert any("gamma" in text for text in texts), texts
    assert lines[-1]["run"]["state"] not in ("running", "done")
    before = read_losses(site, "beta", run_id, 1, 1)
    assert len(read_layers(site, "alpha", run_id, 5)) == 3

    resumed = site.rackless("runs", "resume", run_id, "--nodes", "alpha,beta", "--watch", "--json")
    assert resumed.code == 0, resumed.problem
    ended = resumed.lines[-1]["run"]
    assert (ended["state"], ended["step"], ended["attempt"]) == ("done", NUM_STEPS, 2)
    assert len(read_layers(site, "alpha", run_id, NUM_STEPS)) == 2
    after = read_losses(site, "beta", run_id, 1, 2)
    assert {**before, **after}.keys() == expected.keys()
    for step, loss in (*before.items(), *after.items()):
        assert loss == pytest.approx(expected[step], rel=TOLERANCE)

    for kind, type_ in exports.items():
        made = site.answer("export", run_id, "--to", kind, *type_, "--out", str(tmp_path / kind))
        assert kind == "merged" or made["verdicts"]
    assert find_trained_layers(Path(model), tmp_path / "merged") == {0, 1, 2, 3}
    assert tagged_processes(run_id) == []
