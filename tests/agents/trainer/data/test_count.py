"""A count reads all rows without keeping any, and names data as the run file does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.data import DataPreview
from agents.contract.requests.jobs import PreviewJob
from agents.contract.spec import DataSpec, RunSpec
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.trainer.data import preview
from agents.trainer.data.count import count
from tests.agents.trainer.ranks import DEMO

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho."}]}
QUESTION = {"messages": CHAT["messages"][:1]}


@pytest.fixture
def job(tmp_path: Path) -> PreviewJob:
    """A job on a node, which keeps the user's chats.jsonl below a name of its own."""
    place = tmp_path / "agent" / "data" / "chats-3f2a" / "chats.jsonl"
    place.parent.mkdir(parents=True)
    spec = RunSpec(model="m", data=DataSpec(train="/home/anna/chats.jsonl"), sequence_tokens=64)
    return PreviewJob(
        python="", spec=spec, model_path="", train_path=str(place), whole=False, count_s=60.0
    )


def write(job: PreviewJob, *rows: object) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(job.train_path).write_text("".join(f"{line}\n" for line in lines))


def read(job: PreviewJob, tmp_path: Path) -> DataPreview:
    """Perform a job as the program does, in this process and without its memory limit."""
    with preview.named_as_given(preview._names_of(job)):
        return count(job) if job.count_s is not None else preview.preview(job, tmp_path)


def test_rows_are_counted_without_a_tokenizer(job: PreviewJob, tmp_path: Path) -> None:
    write(job, CHAT, QUESTION, "{broken", "", CHAT)
    found = read(job, tmp_path)
    assert (found.num_rows, found.num_skipped, found.num_malformed, found.num_blank) == (5, 3, 1, 1)
    assert (found.num_left_out, found.left_out_share, found.whole) == (2, 0.5, True)
    assert not found.is_tokenized
    assert found.rows == ()


def test_with_a_tokenizer_the_count_is_that_of_a_run(job: PreviewJob, tmp_path: Path) -> None:
    long = {"instruction": "Tell", "output": "word " * 400}
    write(job, *[{"instruction": "Hi", "output": "Ho."}] * 5, long)
    model = str(DEMO / "model")
    found = read(replace(job, model_path=model), tmp_path)
    assert found.is_tokenized
    assert (found.num_truncated, found.loses_much) == (1, True)
    whole = replace(job, model_path=model, whole=True, count_s=None)
    assert read(whole, tmp_path).cut_share == found.cut_share


@pytest.mark.parametrize("rows", [('{"a"', "["), (QUESTION,), ()])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
def test_no_message_names_a_place_of_the_node(
    job: PreviewJob, tmp_path: Path, suffix: str, rows: tuple[object, ...]
) -> None:
    named = f"/home/anna/chats{suffix}"
    job = replace(
        job,
        spec=replace(job.spec, data=DataSpec(train=named)),
        train_path=str(Path(job.train_path).with_suffix(suffix)),
    )
    write(job, *rows)
    with pytest.raises(ExpectedError) as error:
        read(job, tmp_path)
    said = f"{error.value.message} {error.value.hint}"
    assert named in said
    assert str(tmp_path / "agent") not in said


def test_the_program_counts_without_the_training_packages(job: PreviewJob, tmp_path: Path) -> None:
    write(job, CHAT, QUESTION)
    (tmp_path / "job.json").write_text(json.dumps(to_wire(job)))
    report = tmp_path / "report.json"
    forbidden = "import sys; sys.modules.update(transformers=None, torch=None); "
    start = "from agents.trainer.data import preview; sys.exit(preview.main(sys.argv[1:]))"
    words = (sys.executable, "-c", forbidden + start, str(tmp_path / "job.json"), str(report))
    subprocess.run(words, check=True, cwd=Path(preview.__file__).parents[3])
    assert from_wire(DataPreview, json.loads(report.read_bytes())).num_left_out == 1
