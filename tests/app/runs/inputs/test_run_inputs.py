"""A run's model and data reach its nodes, or it is said why not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.in_place import PlaceAnswer
from agents.contract.model_cut import ModelCut, Stage
from agents.contract.run import RankPlacement
from agents.contract.shares import SharedPlace
from agents.contract.spec import RunSpec
from app.errors import NodeUnreachable, UserError
from app.library.bundles import Source, make_bundle
from app.library.data import find_data
from app.runs.inputs import run_inputs
from app.runs.inputs.run_inputs import Inputs, NodeInputs, find_inputs, send, send_inputs
from app.runs.lifecycle.launch import start_run
from app.runs.preflight import LaunchPlan
from app.runs.services import LaunchForecast, Services
from tests.agents.trainer.data.chat_templates import CHATML, make_model
from tests.fakes.cluster import FakeCluster


def test_data_that_was_edited_and_is_on_no_node_is_named(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(spec.data.train)
    source = find_data(str(path), "data.train", services.hashes)

    async def refuse(*args: Any) -> str:
        raise UserError("alpha: chats.jsonl arrived damaged", "Send it again")

    monkeypatch.setattr(cluster, "push", refuse)
    with pytest.raises(UserError, match="arrived damaged"):
        asyncio.run(send(services, "alpha", source))
    path.write_text('{"text": "hello again"}\n')
    with pytest.raises(UserError) as refused:
        asyncio.run(send(services, "alpha", source))
    assert refused.value.message == (
        f"{path} has changed since the run started, and alpha has no earlier copy"
    )
    path.unlink()
    with pytest.raises(UserError, match="arrived damaged"):
        asyncio.run(send(services, "alpha", source))


def test_a_node_that_goes_away_is_not_said_to_lack_what_was_edited(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(spec.data.train)
    source = find_data(str(path), "data.train", services.hashes)
    path.write_text('{"text": "hello again"}\n')

    async def lose(*args: Any) -> str:
        raise NodeUnreachable("alpha cannot be reached")

    monkeypatch.setattr(cluster, "push", lose)
    with pytest.raises(NodeUnreachable, match="alpha cannot be reached"):
        asyncio.run(send(services, "alpha", source))


def write_weights(path: Path, *names: str) -> None:
    """Write a safetensors file of one number per tensor."""
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n, name in enumerate(names)
    }
    header = json.dumps(entries).encode("ascii")
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * len(names)))


def test_a_node_of_a_pipeline_gets_the_files_of_its_layers_unless_it_has_all(
    services: Services, cluster: FakeCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    for number in (0, 1):
        write_weights(folder / f"model-{number}.safetensors", f"model.layers.{number}.up.weight")
    model = make_bundle("models", "m", folder, folder.iterdir(), services.hashes)
    inputs = Inputs(model=model, train=Source(value="org/data"))
    nodes = ("alpha", "beta")
    cut = ModelCut(
        mode="pipeline",
        stages=(
            Stage(rank=0, first_layer=0, stop_layer=1, has_head=False),
            Stage(rank=1, first_layer=1, stop_layer=2, has_embedding=False),
        ),
    )
    plan = LaunchPlan(
        ranks=tuple(
            RankPlacement(rank=rank, local_rank=0, node=node, device="cpu")
            for rank, node in enumerate(nodes)
        ),
        endpoints={},
        pythons={},
        facts={},
        forecast=LaunchForecast(cut=cut),
    )

    def send_all(plan: LaunchPlan | None) -> dict[str, NodeInputs]:
        return asyncio.run(send_inputs(services, nodes, inputs, plan=plan))

    found = send_all(plan)
    assert all(one.has_parts for one in found.values())
    assert "-parts/.parts-" in found["alpha"].model
    assert found["alpha"].model != found["beta"].model
    # What both need is offered to both at once, before each gets the rest.
    (shared,) = cluster.shared
    both = {file.path for file in shared["alpha"][0].files} & {
        file.path for file in shared["beta"][0].files
    }
    assert both == {"config.json"}
    whole = send_all(None)
    assert not any(one.has_parts for one in whole.values())
    # Now both have the whole model, which is then used as it is.
    assert send_all(plan) == whole


def test_what_a_node_has_on_a_share_is_used_in_place_and_the_others_get_it(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    place = PlaceAnswer(path="/mnt/nas/model", share="nas:/model")
    for name in ("alpha", "beta"):
        cluster[name].places[spec.model] = place
    problem = PlaceAnswer(problem="/mnt/nas/model has another config.json")
    cluster["gamma"].places[spec.model] = problem
    cluster["beta"].places[spec.data.train] = PlaceAnswer(path="/mnt/rows.jsonl", share="nas:/r")
    told: list[str] = []
    nodes = ("alpha", "beta", "gamma")
    inputs = find_inputs(services, spec)
    found = asyncio.run(send_inputs(services, nodes, inputs, told.append))
    assert [found[name].model.startswith("/agent/models/") for name in nodes] == [
        False,
        False,
        True,
    ]
    assert found["alpha"].model == "/mnt/nas/model"
    assert found["alpha"].shared == (SharedPlace(path="/mnt/nas/model", share="nas:/model"),)
    assert [len(found[name].shared) for name in nodes] == [1, 2, 0]
    assert found["beta"].train == "/mnt/rows.jsonl"
    assert [len(cluster[name].pushed) for name in nodes] == [1, 0, 2]
    (shared,) = cluster.shared
    assert [len(shared[name]) for name in nodes] == [1, 0, 2]
    assert told == [
        "gamma gets a copy of the model: /mnt/nas/model has another config.json",
        "the model: used in place from nas:/model on alpha and beta, copied to gamma",
        "the training data: used in place from nas:/r on beta, copied to alpha and gamma",
    ]
    assert asyncio.run(send(services, "alpha", inputs.model)) == "/mnt/nas/model"


def test_a_run_tells_its_nodes_and_its_history_what_is_used_in_place(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    cluster["beta"].places[spec.model] = PlaceAnswer(path="/mnt/model", share="nas:/model")
    run_id = asyncio.run(start_run(services, spec))
    assert cluster["beta"].intents[0].shared == (
        SharedPlace(path="/mnt/model", share="nas:/model"),
    )
    assert cluster["alpha"].intents[0].shared == ()
    texts = [event.text for event in services.runs.events(run_id)]
    assert "nas:/model is used in place on beta" in texts


def cut(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Break the connection to beta for some pushes; return what was asked for."""
    asked: list[str] = []
    push = cluster.push

    async def broken(name: str, *rest: Any) -> str:
        asked.append(name)
        if name == "beta" and asked.count(name) <= times:
            raise NodeUnreachable("the connection to beta broke", where="beta")
        return await push(name, *rest)

    monkeypatch.setattr(cluster, "push", broken)
    monkeypatch.setattr(run_inputs, "RETRY_S", 0.001)
    return asked


def test_a_short_cut_while_files_are_sent_does_not_end_the_start(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(cluster, monkeypatch, 3)
    told: list[str] = []
    run_id = asyncio.run(start_run(services, spec, report=told.append))
    assert services.runs.get(run_id).state == "running"
    (first, *_) = [line for line in told if "broke" in line]
    assert first.startswith("the connection to beta broke; sending is tried again for up to ")


def test_a_node_that_stays_away_ends_the_start_by_its_name(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cut(cluster, monkeypatch, 10_000)
    inputs = find_inputs(services, spec)
    with pytest.raises(NodeUnreachable, match="beta broke; it did not come back within") as error:
        asyncio.run(send_inputs(services, ("beta",), inputs, patience_s=0.05))
    assert error.value.where == "beta"
    assert asked.count("beta") > 1


def test_a_resume_without_the_user_does_not_wait_for_a_node(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cut(cluster, monkeypatch, 10_000)
    inputs = find_inputs(services, spec)
    with pytest.raises(NodeUnreachable):
        asyncio.run(send_inputs(services, ("beta",), inputs))
    assert asked.count("beta") == 1


def test_a_row_with_a_token_without_weights_stops_the_run_before_anything_is_sent(
    services: Services, cluster: FakeCluster, spec: RunSpec, tmp_path: Path
) -> None:
    tokens = tuple(f"<tool{number}>" for number in range(60))
    model = make_model(tmp_path / "m", CHATML, tokens)
    rows = tmp_path / "rows.jsonl"
    said = ("Who founded Brenford?", "Who founded <tool3>?", "Who founded <tool55>?")
    asked = replace(spec, model=str(model), data=replace(spec.data, train=str(rows)))
    for count in (2, 3):
        texts = [{"instruction": one, "output": "Oren Dale."} for one in said[:count]]
        rows.write_text("".join(json.dumps(one) + "\n" for one in texts))
        if count == 2:
            find_inputs(services, asked)
            continue
        with pytest.raises(UserError, match="row 3, '<tool55>' is a token for which the model"):
            asyncio.run(start_run(services, asked))
    assert not any(node.pushed for node in (cluster["alpha"], cluster["beta"], cluster["gamma"]))
