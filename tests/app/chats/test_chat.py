"""Conversations go to the node that has the model, or get it there first."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.node import GpuFacts
from agents.contract.requests.chats import ChatJob, ChatMessage, ChatTurn
from agents.contract.requests.exports import Origin
from agents.contract.wire import to_wire
from app.artifacts.bundle import read_artifact
from app.artifacts.record import add_folder
from app.chats.chat import Chats, find_project, read_prompt_file
from app.chats.comparison import compare_models
from app.conversation import Loaded, Project, Subject
from app.errors import UsageError, UserError
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster

TURN = ChatTurn(messages=(ChatMessage(role="user", content="What is it?"),))


def load(services: Services, what: str, **changes: object) -> tuple[Loaded, list[str]]:
    told: list[str] = []
    subject = Subject(what=what, **changes)  # type: ignore[arg-type]
    return asyncio.run(Chats(services).open(subject, told.append)), told


def make_artifact(folder: Path, method: str, *types: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1")
    for kind in types:
        (folder / f"valley-{kind}.gguf").write_bytes(kind.encode())
    proofs = [{"name": kind} for kind in types or (method,)]
    if method != "merged":
        (folder / "proof.json").write_text(json.dumps({"method": method, "proofs": proofs}))
    return folder


def test_a_run_is_loaded_where_its_checkpoint_lies(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    found, told = load(services, interrupted[:6])
    assert told == ["loading step 10 on alpha"]
    assert (found.node, found.title.endswith(", step 10")) == ("alpha", True)
    load(services, interrupted, of_base=True)
    load(services, interrupted, checkpoint=5, node="beta")
    newest, base = cluster["alpha"].loaded
    assert newest.checkpoint == f"runs/{interrupted}/checkpoints/step-00000010"
    assert (base.checkpoint, base.model) == (None, newest.model)
    assert cluster["beta"].loaded[0].checkpoint == newest.checkpoint[:-2] + "05"
    assert newest.devices == ()
    node = cluster["alpha"]
    gpus = tuple(GpuFacts(uuid=f"GPU-{i}", index=i, name="x", memory_bytes=1) for i in (0, 1))
    node.facts_now = replace(node.facts_now, gpus=gpus)
    load(services, interrupted)
    assert [one.device for one in node.loaded[-1].devices] == ["cuda:0", "cuda:1"]


def test_what_does_not_belong_to_it_is_refused_and_not_left_out(
    services: Services, interrupted: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="a run has no types"):
        load(services, interrupted, type="Q8_0")
    folder = str(make_artifact(tmp_path / "valley", "nf4"))
    with pytest.raises(UsageError, match="an artifact has a single checkpoint"):
        load(services, folder, checkpoint=5)
    with pytest.raises(UsageError, match="nf4 has no types"):
        load(services, folder, type="Q8_0")
    gguf = str(make_artifact(tmp_path / "small", "gguf", "F16", "Q8_0"))
    assert load(services, gguf, type="q8_0")[0].node == "alpha"


def test_an_artifact_is_asked_where_it_is_now(services: Services, tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "nf4", "nf4")
    name = add_folder(services, folder, "valley").label
    shutil.copytree(folder, tmp_path / "copy")
    add_folder(services, tmp_path / "copy")
    folder.rename(tmp_path / "gone")
    assert load(services, name)[0].title == "copy"
    shutil.rmtree(tmp_path / "copy")
    with pytest.raises(UserError, match="valley:1 has no whole copy on this PC"):
        load(services, name)


def test_several_turns_go_to_one_loaded_model_until_it_is_closed(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    async def talk() -> None:
        chats, said, told = Chats(services), list[str](), list[str]()
        key = (await chats.open(Subject(what=interrupted), told.append)).key
        for _ in range(2):
            found = await chats.ask(key, TURN, told.append, said.append)
        assert (found.text, said) == ("Forty-two.", ["Forty-", "two."] * 2)
        assert len(cluster["alpha"].loaded) == 1
        cluster["alpha"].chats.clear()
        told.clear()
        await chats.ask(key, TURN, told.append, said.append)
        assert told[0] == "nothing was asked for 15 minutes; loading the model again"
        names = [job.chat for job in cluster["alpha"].loaded]
        assert [chat for chat, _ in cluster["alpha"].asked] == [names[0], *names]
        await chats.stop(key)
        assert cluster["alpha"].stopped == [], "nothing is being answered"
        await chats.close(key)
        await chats.close(key)
        assert cluster["alpha"].chats == set()
        with pytest.raises(UserError, match="is closed"):
            await chats.ask(key, TURN, told.append, said.append)

    asyncio.run(talk())


def test_who_stops_listening_stops_the_answer(
    services: Services, cluster: FakeCluster, interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*asked: object) -> None:
        await asyncio.Event().wait()

    async def talk() -> None:
        chats = Chats(services)
        key = (await chats.open(Subject(what=interrupted), str)).key
        monkeypatch.setattr(cluster["alpha"], "chat_ask", never)
        asking = asyncio.create_task(chats.ask(key, TURN, lambda t: None, lambda t: None))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert cluster["alpha"].stopped == [cluster["alpha"].loaded[0].chat]

    asyncio.run(talk())


def test_who_does_not_wait_for_a_model_lets_it_go(
    services: Services, cluster: FakeCluster, interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, asked = cluster["alpha"], asyncio.Event()

    async def never(job: ChatJob, *told: object) -> None:
        node.chats.add(job.chat)
        asked.set()
        await asyncio.Event().wait()

    async def talk() -> None:
        monkeypatch.setattr(node, "chat_open", never)
        opening = asyncio.create_task(Chats(services).open(Subject(what=interrupted), str))
        await asked.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert node.chats == set()

    asyncio.run(talk())


def test_projects_are_base_and_data(services: Services, interrupted: str, tmp_path: Path) -> None:
    spec = services.runs.get(interrupted).spec
    project = Project(base=spec.model, data=spec.data.train)
    assert find_project(services, interrupted) == project
    folder = make_artifact(tmp_path / "nf4", "nf4")
    assert find_project(services, str(folder)) == Project(base=str(folder), data="")
    origin = Origin(base="b", data="d", run_id="r", run_name="n", step=1)
    about = {"method": "nf4", "proofs": [{"name": "nf4"}], "origin": to_wire(origin)}
    (folder / "proof.json").write_text(json.dumps(about))
    assert find_project(services, str(folder)) == Project(base="b", data="d")


def test_models_are_compared_one_after_the_other(
    services: Services, cluster: FakeCluster, interrupted: str, tmp_path: Path
) -> None:
    chats, told = Chats(services), list[str]()
    subjects = (Subject(what=interrupted, of_base=True), Subject(what=interrupted, node="beta"))
    file = tmp_path / "prompts.txt"
    file.write_text("Who?\n\nWhen?\n")
    prompts = read_prompt_file(file)
    found = asyncio.run(compare_models(chats, subjects, prompts, told.append))
    assert found.prompts == ("Who?", "When?")
    assert [one.title.split(", ")[1:] for one in found.models] == [
        ["base", "on alpha"], ["step 10", "on beta"],
    ]  # fmt: skip
    assert [answer and answer.text for answer in found.models[1].answers] == ["Forty-two."] * 2
    assert (cluster["alpha"].chats, cluster["beta"].chats) == (set(), set())
    with pytest.raises(UsageError, match="no test prompts"):
        asyncio.run(compare_models(chats, subjects, (), told.append))
    with pytest.raises(UserError, match="cannot be read"):
        read_prompt_file(tmp_path / "nothing")


def test_a_model_that_cannot_be_loaded_keeps_the_answers_of_the_others(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    told = list[str]()
    good, bad = Subject(what=interrupted), Subject(what=interrupted, checkpoint=7, node="beta")
    found = asyncio.run(compare_models(Chats(services), (good, bad, good), ("Who?",), told.append))
    first, second, third = found.models
    assert [one.answers[0] and one.answers[0].text for one in (first, third)] == ["Forty-two."] * 2
    assert second.answers == (None,)
    assert second.title.startswith(f"{interrupted}, not loaded: ")
    assert any(line.startswith(second.title) for line in told), "with what to do next"
    with pytest.raises(UserError):
        asyncio.run(compare_models(Chats(services), (bad,), ("Who?",), told.append))


def test_an_artifact_is_sent_to_a_node(
    services: Services, cluster: FakeCluster, tmp_path: Path
) -> None:
    gguf = make_artifact(tmp_path / "gguf", "gguf", "Q8_0", "Q4_K_M")
    assert load(services, str(gguf))[0].title == "gguf Q8_0"
    load(services, str(gguf), type="Q4_K_M", node="beta")
    load(services, str(make_artifact(tmp_path / "nf4", "nf4")))
    load(services, str(make_artifact(tmp_path / "merged", "merged")))
    first, nf4, merged = cluster["alpha"].loaded
    (second,) = cluster["beta"].loaded
    assert first.model.endswith("/valley-Q8_0.gguf")
    assert second.model.endswith("/valley-Q4_K_M.gguf")
    assert first.packages is not None
    assert (nf4.packages, merged.packages) == (None, None)
    assert all(job.checkpoint is None for job in (first, second, nf4, merged))


def test_what_cannot_be_asked_is_said(services: Services, tmp_path: Path) -> None:
    gguf = make_artifact(tmp_path / "gguf", "gguf", "Q8_0")
    with pytest.raises(UserError, match="has no Q6_K file"):
        load(services, str(gguf), type="Q6_K")
    with pytest.raises(UsageError, match="does not include its base model"):
        load(services, str(gguf), of_base=True)
    with pytest.raises(UsageError, match="there is no node zeta"):
        load(services, str(gguf), node="zeta")
    for nothing in (str(tmp_path), "~nobody-of-that-name/gguf"):
        with pytest.raises(UserError, match="is no artifact"):
            load(services, nothing)
    (gguf / "proof.json").write_text("[]")
    with pytest.raises(UserError, match="is no artifact"):
        read_artifact(gguf)
