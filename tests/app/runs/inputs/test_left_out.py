"""Rows that are left out are told, and accepted, before anything is sent."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.data import DataPreview
from agents.contract.spec import DataSpec, RunSpec
from app.errors import LeftOutRows, UserError
from app.presentation.left_out_text import offer_start, say_count
from app.runs.inputs import left_out
from app.runs.inputs.left_out import count_before_sending, count_left_out
from app.runs.lifecycle.launch import start_run
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster

GOOD = json.dumps({"instruction": "Say hello", "output": "Hello."})


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let starts count rows again, by reading alone: the model's tokenizer is no real one."""
    monkeypatch.setattr(left_out, "count_before_sending", count_before_sending)
    monkeypatch.setattr(left_out, "can_run_here", lambda: False)


def with_rows(spec: RunSpec, path: Path, *rows: str) -> RunSpec:
    path.write_text("".join(f"{row}\n" for row in rows))
    return replace(spec, data=DataSpec(train=str(path)))


def start(services: Services, spec: RunSpec, *, accepts: bool = False) -> list[str]:
    """Start a run; return what the start says."""
    said: list[str] = []
    asyncio.run(start_run(services, spec, report=said.append, accept_left_out=accepts))
    return said


def count(services: Services, spec: RunSpec) -> DataPreview:
    (one,) = asyncio.run(count_left_out(services, spec))
    assert one.found is not None
    return one.found


@pytest.mark.usefixtures("counting")
def test_one_row_of_three_is_not_left_out_in_silence(
    services: Services, cluster: FakeCluster, spec: RunSpec, tmp_path: Path
) -> None:
    spec = with_rows(spec, tmp_path / "my chats.jsonl", GOOD, "{broken", GOOD)
    with pytest.raises(LeftOutRows) as refusal:
        start(services, spec)
    assert refusal.value.message.startswith(
        "of the 3 rows of my chats.jsonl, 1 is left out (33 %): row 2: not valid JSON"
    )
    assert "--accept-left-out" in refusal.value.hint
    assert refusal.value.offer == "Start without this row"
    assert services.runs.store.all() == ()
    assert not any(node.pushed for node in cluster.nodes.values())


@pytest.mark.usefixtures("counting")
def test_an_accepted_loss_is_said_and_starts(
    services: Services, spec: RunSpec, tmp_path: Path
) -> None:
    spec = with_rows(spec, tmp_path / "chats.jsonl", GOOD, "{broken", GOOD)
    said = start(services, spec, accepts=True)
    assert any(line.startswith("of the 3 rows of chats.jsonl, 1 is left out") for line in said)
    assert len(services.runs.store.all()) == 1


@pytest.mark.usefixtures("counting")
def test_few_rows_are_left_out_without_a_question(
    services: Services, spec: RunSpec, tmp_path: Path
) -> None:
    spec = with_rows(spec, tmp_path / "chats.jsonl", *[GOOD] * 40, "{broken")
    assert any("1 is left out (2 %)" in line for line in start(services, spec))


@pytest.mark.usefixtures("counting")
def test_empty_lines_are_no_loss(services: Services, spec: RunSpec, tmp_path: Path) -> None:
    spec = with_rows(spec, tmp_path / "chats.jsonl", GOOD, "", "", GOOD)
    assert (found := count(services, spec)).num_left_out == 0
    assert say_count("a", found) == "of the 2 rows of a, none is left out or cut"
    start(services, spec)


@pytest.mark.usefixtures("counting")
def test_rows_that_are_cut_count_too(services: Services, spec: RunSpec, tmp_path: Path) -> None:
    row = json.dumps({"instruction": "Tell a story", "output": "Once upon a time. " * 500})
    spec = replace(with_rows(spec, tmp_path / "long.jsonl", row), sequence_tokens=128)
    with pytest.raises(LeftOutRows, match=r"1 is cut at 128 tokens \(losing at least 9") as refusal:
        start(services, spec)
    assert refusal.value.hint.startswith("Raise sequence_tokens")
    assert offer_start(count(services, spec)) == "Start with cut rows"


@pytest.mark.usefixtures("counting")
def test_held_out_data_is_counted_too(services: Services, spec: RunSpec, tmp_path: Path) -> None:
    spec = with_rows(spec, tmp_path / "chats.jsonl", GOOD)
    (tmp_path / "test.jsonl").write_text(f"{GOOD}\n{{broken\n")
    spec = replace(spec, data=replace(spec.data, eval=str(tmp_path / "test.jsonl")))
    with pytest.raises(LeftOutRows, match=r"of the 2 rows of test\.jsonl"):
        start(services, spec)


@pytest.mark.usefixtures("counting")
def test_data_without_a_usable_row_is_refused_by_the_users_name(
    services: Services, spec: RunSpec, tmp_path: Path
) -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "only a question"}]})
    spec = with_rows(spec, tmp_path / "chats.jsonl", row)
    with pytest.raises(UserError, match=r"chats\.jsonl has no usable row"):
        start(services, spec)


@pytest.mark.usefixtures("counting")
def test_a_node_counts_what_this_pc_cannot_read(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    spec = replace(spec, data=DataSpec(train="org/chats"), nodes=("beta",))
    (one,) = asyncio.run(count_left_out(services, spec))
    assert one.found is None
    with pytest.raises(LeftOutRows, match="of the first 3 rows of org/chats, 1 is left out"):
        start(services, spec)
    (job,) = cluster["beta"].previews
    assert job.count_s == left_out.COUNT_S
    assert not any("model-" in name and "tokenizer" not in name for name in cluster["beta"].pushed)
    start(services, spec, accepts=True)


@pytest.mark.usefixtures("counting")
def test_the_time_limit_leaves_the_rest_uncounted(
    services: Services, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_out, "COUNT_S", 0.0)
    spec = with_rows(spec, tmp_path / "chats.jsonl", *[GOOD] * 500)
    found = count(services, spec)
    assert not found.whole
    assert 0 < found.num_rows < 500
    assert say_count("a", found).startswith("of the first ")
