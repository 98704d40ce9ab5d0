"""Data is looked over here where that is possible, else on a node that can train."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.spec import DataSpec, RunSpec
from app.errors import UserError
from app.runs.inputs import preview as preview_module
from app.runs.inputs.preview import preview_data
from app.runs.journals.history import RunHistory
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_facts, make_preview

DEMO = Path(__file__).parents[4] / "resources" / "demo"


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_module, "can_run_here", lambda: False)


def make_spec(path: Path) -> RunSpec:
    return RunSpec(
        model=str(DEMO / "model"), data=DataSpec(train=str(path)), sequence_tokens=64, packing=True
    )


def test_a_model_that_lies_here_is_looked_at_here(tmp_path: Path, services: Services) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"instruction": "Hi", "output": f"Ho {i}"}) for i in range(3000)]
    path.write_text("\n".join(["{", *rows]))
    said: list[str] = []
    found = asyncio.run(preview_data(services, make_spec(path), progress=said.append))
    assert (found.format, found.num_rows, found.num_skipped) == ("alpaca", 3001, 1)
    assert found.fill is not None
    assert found.fill > 0.8
    assert said[0] == f"reading {path} on this PC"
    assert list((services.paths.home / "cache" / "tokens").glob("*/about.json"))
    first = asyncio.run(preview_data(services, make_spec(path), whole=False))
    assert (first.whole, first.fill) == (False, None)


def test_what_is_wrong_comes_back_in_its_own_words(tmp_path: Path, services: Services) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Hi"}) + "\n")
    with pytest.raises(UserError, match="no usable row") as caught:
        asyncio.run(preview_data(services, make_spec(path)))
    assert str(path) in str(caught.value)
    assert caught.value.hint


@pytest.mark.usefixtures("nothing_here")
def test_else_the_first_node_that_can_train_does_it(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    cluster["alpha"].reachable = False
    cluster["beta"].facts_now = make_facts(environment=None)
    found = asyncio.run(preview_data(services, spec, whole=False))
    assert found == make_preview(whole=False)
    (job,) = cluster["gamma"].previews
    assert job.python == "/env/bin/python"
    assert job.train_path.endswith("/chats.jsonl")
    assert "-tokenizer-" in job.model_path
    assert len(cluster["gamma"].pushed) == 2


def test_a_named_node_is_taken(services: Services, cluster: FakeCluster, spec: RunSpec) -> None:
    asyncio.run(preview_data(services, spec, node="beta"))
    assert len(cluster["beta"].previews) == 1
    cluster["beta"].facts_now = make_facts(environment=None)
    with pytest.raises(UserError, match="node beta has no training environment"):
        asyncio.run(preview_data(services, spec, node="beta"))


@pytest.mark.usefixtures("nothing_here")
def test_without_any_place_it_says_why(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    for name in cluster.names():
        cluster[name].facts_now = make_facts(environment=None)
    with pytest.raises(UserError, match="alpha has no training environment"):
        asyncio.run(preview_data(services, spec))
    away = replace(spec, model="org/tiny", nodes=("beta",))
    with pytest.raises(UserError, match="beta has no training environment"):
        asyncio.run(preview_data(services, away))


def test_the_journal_tells_what_a_run_learns(tmp_path: Path) -> None:
    from agents.contract.messages import to_wire

    folder = tmp_path / "attempts" / "1" / "alpha"
    folder.mkdir(parents=True)
    lines = [{"kind": "preview", "format": "chat"}, {"kind": "preview", **to_wire(make_preview())}]
    path = folder / "rank-0.jsonl"
    path.write_text(json.dumps(lines[0]) + "\n")
    history = RunHistory("r1", tmp_path)
    history.refresh()
    assert history.data is None
    with path.open("a") as file:
        file.write(json.dumps(lines[1]) + "\n")
    history.refresh()
    assert history.data == make_preview()


@pytest.mark.usefixtures("nothing_here")
def test_evaluation_data_is_looked_at_by_itself(
    services: Services, cluster: FakeCluster, spec: RunSpec, tmp_path: Path
) -> None:
    path = tmp_path / "held-out.jsonl"
    path.write_text(json.dumps({"text": "hello"}) + "\n")
    both = replace(spec, data=replace(spec.data, eval=str(path)))
    asyncio.run(preview_data(services, both, part="eval"))
    (job,) = cluster["alpha"].previews
    assert job.train_path.endswith("/held-out.jsonl")
    with pytest.raises(UserError, match=r"\(data\.eval\) does not exist"):
        asyncio.run(preview_data(services, replace(both, data=replace(both.data, eval="x.csv")),
                                 part="eval"))  # fmt: skip
