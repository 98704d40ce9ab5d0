"""Several sources are one run's data: in one order, counted by weight, with rows held out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agents.contract.data import SourceSpec
from agents.contract.requests.jobs import PreviewJob
from agents.contract.spec import DataSpec, RunSpec
from agents.errors import ExpectedError
from agents.trainer.data import preview
from agents.trainer.data import sources as sources_module
from agents.trainer.data.hub import find_data
from agents.trainer.data.order import order_rows
from agents.trainer.data.sources import DataLoader, find_sources
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.parallel.batch import choose_batch
from tests.agents.trainer.ranks import DEMO


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO / "model")[0]


def write(path, count, name="a", **more):
    rows = [{"instruction": f"{name} {n}", "output": f"Ho {n}", **more} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_spec(*sources, **data):
    named = tuple(
        one if isinstance(one, SourceSpec) else SourceSpec(path=str(one)) for one in sources
    )
    spec = DataSpec(train=named[0].path, sources=named, **data).simplify()
    return RunSpec(model="m", data=spec, sequence_tokens=64, batch_sequences=4)


def make_loader(spec, tokenizer, home, evaluation=None):
    paths = [source.path for source in spec.data.list_sources()]
    files = find_data(str(evaluation)) if evaluation else None
    return DataLoader(
        spec=spec,
        sources=find_sources(spec, paths, None),
        tokenizer=tokenizer,
        cache=home / "tokens",
        evaluation=files,
        evaluation_sha256="e" * 64 if files else "",
    )


def texts_of(tokenizer, examples):
    return [
        tokenizer.decode(segment.ids)
        for place in range(len(examples))
        for segment in examples[place].segments
    ]


def questions(tokenizer, examples):
    return [text.split("<|user|>")[1].split("<|end|>")[0] for text in texts_of(tokenizer, examples)]


def test_one_source_is_the_same_data_in_both_ways(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", 20)
    plain = RunSpec(model="m", data=DataSpec(train=str(path)), sequence_tokens=64)
    listed = replace(plain, data=replace(plain.data, sources=(SourceSpec(path=str(path)),)))
    loaders = [make_loader(spec, tokenizer, tmp_path) for spec in (plain, listed)]
    one, other = (loader.load("train") for loader in loaders)
    assert loaders[0].sha256 == loaders[1].sha256
    assert one.folder == other.folder
    for step in (1, 7):
        batches = [choose_batch(spec, one, step, shares=(1,), rank=0) for spec in (plain, listed)]
        assert batches[0].row_numbers == batches[1].row_numbers


def test_sources_follow_each_other_and_each_row_has_a_number_of_its_own(tmp_path, tokenizer):
    first = write(tmp_path / "a.jsonl", 3)
    other = tmp_path / "b.csv"
    other.write_text("question,answer\nb 0,Ho\nb 1,Ho\n")
    columns = ("instruction=question", "output=answer")
    spec = make_spec(first, SourceSpec(path=str(other), columns=columns))
    examples = make_loader(spec, tokenizer, tmp_path).load("train")
    assert questions(tokenizer, examples) == ["a 0", "a 1", "a 2", "b 0", "b 1"]
    rows = [examples[place].rows for place in range(5)]
    assert len(set(rows)) == 5
    assert examples.parts == (3, 2)
    assert examples.num_tokens.tolist() == [examples[place].num_tokens for place in range(5)]


@pytest.mark.parametrize("packing", [False, True])
def test_weights_are_counted_exactly_over_epochs(tmp_path, tokenizer, packing):
    sources = [
        SourceSpec(path=str(write(tmp_path / f"{name}.jsonl", 40, name)), weight=weight)
        for name, weight in (("a", 1), ("b", 2), ("c", 0.25))
    ]
    spec = replace(make_spec(*sources), packing=packing)
    examples = make_loader(spec, tokenizer, tmp_path).load("train")
    order = order_rows(spec, examples.parts)
    sizes = np.array(examples.parts)
    assert order.taken[1] == 2 * sizes[1]
    taken = Counter()
    for epoch in range(1, 5):
        taken.update(order.choose(step=epoch, batch=order.num_rows))
    counts = np.array([taken[place] for place in range(len(examples))])
    assert set(counts[: sizes[0]]) == {4}
    assert set(counts[sizes[0] : sizes[0] + sizes[1]]) == {8}
    if not packing:  # 10 rows in each epoch, and every row once in four
        assert set(counts[sizes[0] + sizes[1] :]) == {1}


def test_the_order_of_the_file_is_kept_with_and_without_packing(tmp_path, tokenizer):
    first, other = write(tmp_path / "a.jsonl", 9), write(tmp_path / "b.jsonl", 5, "b")
    for packing in (False, True):
        spec = replace(make_spec(first, other, shuffle=False), packing=packing)
        examples = make_loader(spec, tokenizer, tmp_path).load("train")
        order = order_rows(spec, examples.parts)
        assert order.choose(step=1, batch=order.num_rows) == list(range(len(examples)))
        expected = [f"a {n}" for n in range(9)] + [f"b {n}" for n in range(5)]
        assert questions(tokenizer, examples) == expected


@pytest.mark.parametrize("packing", [False, True])
def test_no_held_out_row_is_in_any_batch(tmp_path, tokenizer, packing):
    first, other = write(tmp_path / "a.jsonl", 60), write(tmp_path / "b.jsonl", 40, "b")
    # The same rows once more in another file.
    again = write(tmp_path / "c.jsonl", 60)
    spec = replace(make_spec(first, other, again, eval="0.1"), packing=packing)
    loader = make_loader(spec, tokenizer, tmp_path)
    train, held_out = loader.load("train"), loader.load("eval")
    out = set(questions(tokenizer, held_out))
    assert len(questions(tokenizer, held_out)) == held_out.choice.num_held_out == 16
    trained = set()
    for step in range(1, 60):
        batch = choose_batch(spec, train, step, shares=(1, 2), rank=1)
        trained |= {
            tokenizer.decode(segment.ids).split("<|user|>")[1].split("<|end|>")[0]
            for example in batch.mine.examples
            for segment in example.segments
        }
    assert len(trained) > 50
    assert not trained & out
    assert len(out) + len(set(questions(tokenizer, train))) == 100


def test_the_choice_is_made_once_per_node_and_is_part_of_the_datas_hash(
    tmp_path, tokenizer, monkeypatch
):
    path = write(tmp_path / "a.jsonl", 100)
    spec = make_spec(SourceSpec(path=str(path), max_rows=30), eval="10")
    loader = make_loader(spec, tokenizer, tmp_path)
    first = loader.load("train")
    assert (len(first), first.choice.num_over, first.choice.num_held_out) == (20, 70, 10)
    with monkeypatch.context() as patched:
        patched.setattr(sources_module, "choose_rows", None)
        assert len(make_loader(spec, tokenizer, tmp_path).load("eval")) == 10
    whole = make_loader(make_spec(path), tokenizer, tmp_path)
    assert len({loader.sha256, whole.sha256}) == 2
    other = make_loader(
        make_spec(SourceSpec(path=str(path), max_rows=31), eval="10"), tokenizer, tmp_path
    )
    assert other.sha256 != loader.sha256
    # A damaged choice is made again.
    for file in (tmp_path / "tokens").glob("*/train-0"):
        file.write_bytes(b"")
    assert len(loader.load("train")) == 20


def test_too_few_rows_for_auto_are_not_evaluated(tmp_path, tokenizer):
    spec = make_spec(write(tmp_path / "a.jsonl", 3), eval="auto")
    loader = make_loader(spec, tokenizer, tmp_path)
    assert loader.load("eval") is None
    assert len(loader.load("train")) == 3


def test_copies_of_evaluation_data_are_not_trained(tmp_path, tokenizer):
    path, evaluation = write(tmp_path / "a.jsonl", 10), write(tmp_path / "e.jsonl", 4, "a")
    spec = make_spec(path, deduplicate="exact", eval=str(evaluation))
    loader = make_loader(spec, tokenizer, tmp_path, evaluation)
    assert questions(tokenizer, loader.load("train")) == [f"a {n}" for n in range(4, 10)]
    assert len(loader.load("eval")) == 4


def test_a_source_without_rows_is_named(tmp_path, tokenizer):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"instruction": "Hi", "output": ""}\n')
    for data in ({}, {"deduplicate": "exact"}):
        spec = make_spec(write(tmp_path / "a.jsonl", 3), empty, **data)
        with pytest.raises(ExpectedError, match=r"empty\.jsonl has no usable row"):
            make_loader(spec, tokenizer, tmp_path).load("train")


def test_a_split_of_a_folder_is_read_alone(tmp_path, tokenizer):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("train-00000-of-00001", "train_sft", "test"):
        write(folder / f"{name}.jsonl", 2, name)
    spec = make_spec(
        *(SourceSpec(path=str(folder), split=split) for split in ("train", "train_sft", "test"))
    )
    found = questions(tokenizer, make_loader(spec, tokenizer, tmp_path).load("train"))
    assert [text.split()[0] for text in found[::2]] == [
        "train-00000-of-00001", "train_sft", "test",
    ]  # fmt: skip
    with pytest.raises(ExpectedError, match=r"has no split dev; its files are test\.jsonl, tr"):
        find_sources(make_spec(SourceSpec(path=str(folder), split="dev")), [str(folder)], None)


@pytest.mark.parametrize("whole", [True, False])
def test_a_preview_tells_each_source_by_its_name(tmp_path, whole):
    first = write(tmp_path / "a.jsonl", 8, source="x")
    with first.open("a") as file:
        file.write("{\n")
    other = write(tmp_path / "b.jsonl", 4, "b")
    spec = make_spec(first, SourceSpec(path=str(other), weight=2.0))
    job = PreviewJob(
        python="",
        spec=spec,
        model_path=str(DEMO / "model"),
        train_path=str(first),
        more_paths=(str(other),),
        whole=whole,
    )
    found = preview.preview(job, tmp_path)
    assert (found.num_rows, found.num_examples, found.num_skipped) == (13, 12, 1)
    assert [(one.name, one.num_examples, one.weight) for one in found.sources] == [
        ("a.jsonl", 8, 1.0), ("b.jsonl", 4, 2.0),
    ]  # fmt: skip
    assert sum(one.num_tokens for one in found.sources) == found.num_tokens
    assert [row.file for row in found.skipped] == ["a.jsonl"]
    assert {row.source for row in found.rows} == {"a.jsonl", "b.jsonl"}
    assert [(one.column, one.source) for one in found.findings] == [("source", "a.jsonl")]
    if whole:
        assert (found.num_in_epoch, found.num_tokens_in_epoch) == (
            16, found.num_tokens + found.sources[1].num_tokens,
        )  # fmt: skip


def test_a_preview_shows_the_held_out_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", 100)
    spec = make_spec(path, eval="auto")
    job = PreviewJob(
        python="", spec=spec, model_path=str(DEMO / "model"), train_path=str(path), held_out=True
    )
    found = preview.preview(job, tmp_path)
    assert (found.num_examples, found.choice.num_held_out) == (2, 2)
    assert preview.preview(replace(job, held_out=False), tmp_path).num_examples == 98
