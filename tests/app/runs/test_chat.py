"""Questions go to the node that has the model, or get it there first."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from app.errors import UsageError, UserError
from app.library.artifacts import read_artifact
from app.runs.chat import Question, answer
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster


def ask(services: Services, what: str, **changes: object) -> tuple[str, list[str], list[str]]:
    told: list[str] = []
    said: list[str] = []
    question = Question(prompt="What is it?", **changes)  # type: ignore[arg-type]
    found = asyncio.run(answer(services, what, question, told.append, said.append))
    return found.text, told, said


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


def test_a_run_is_asked_where_its_newest_checkpoint_lies(
    services: Services, cluster: FakeCluster, interrupted: str
) -> None:
    text, told, said = ask(services, interrupted[:6])
    assert (text, said) == ("Forty-two.", ["Forty-", "two."])
    assert told == ["loading step 10 on alpha"]
    (job,) = cluster["alpha"].asked
    assert job.checkpoint == f"runs/{interrupted}/checkpoints/step-00000010"
    ask(services, interrupted, of_base=True)
    assert cluster["alpha"].asked[-1].checkpoint is None
    assert cluster["alpha"].asked[-1].model == job.model
    assert not job.in_4_bits, "a CPU has the room for the whole model"


def test_an_artifact_is_sent_to_a_node(
    services: Services, cluster: FakeCluster, tmp_path: Path
) -> None:
    gguf = make_artifact(tmp_path / "gguf", "gguf", "Q8_0", "Q4_K_M")
    ask(services, str(gguf))
    ask(services, str(gguf), type="Q4_K_M", node="beta")
    ask(services, str(make_artifact(tmp_path / "nf4", "nf4")))
    ask(services, str(make_artifact(tmp_path / "merged", "merged")))
    first, nf4, merged = cluster["alpha"].asked
    (second,) = cluster["beta"].asked
    assert first.model.endswith("/valley-Q8_0.gguf")
    assert second.model.endswith("/valley-Q4_K_M.gguf")
    assert first.packages is not None
    assert (nf4.packages, merged.packages) == (None, None)
    assert all(job.checkpoint is None for job in (first, second, nf4, merged))


def test_what_cannot_be_asked_is_said(services: Services, tmp_path: Path) -> None:
    gguf = make_artifact(tmp_path / "gguf", "gguf", "Q8_0")
    with pytest.raises(UserError, match="has no Q6_K file"):
        ask(services, str(gguf), type="Q6_K")
    with pytest.raises(UsageError, match="no base with it"):
        ask(services, str(gguf), of_base=True)
    with pytest.raises(UsageError, match="there is no node zeta"):
        ask(services, str(gguf), node="zeta")
    with pytest.raises(UserError, match="is no artifact"):
        ask(services, str(tmp_path))
    with pytest.raises(ValueError, match="prompt is empty"):
        Question(prompt=" ")
    (gguf / "proof.json").write_text("[]")
    with pytest.raises(UserError, match="is no artifact"):
        read_artifact(gguf)
