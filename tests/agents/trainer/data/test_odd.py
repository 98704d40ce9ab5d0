"""Odd data from the file to the step: each does what a careful user expects, and is said once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.cache import load_examples
from agents.trainer.data.rows import find_files
from agents.trainer.data.tokenizer import load_tokenizer
from tests.agents.trainer.ranks import DEMO, Run, finish, make_rows, make_spec

PAIRS = [("Who founded Brenford?", "Oren Dale."), ("Where, then?", 'He said: "here"; so what')]
EVERY_PLANE = "".join(chr((plane << 16) + 0x1F41) for plane in range(17))
EVERY_PLANE += "\ufeff\u2028\u202e\u05d0\U0001f469\u200d\U0001f467"
"""One letter of every plane, a byte order mark, a line separator, right to left, a family."""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO / "model")[0]


def load(path, tokenizer, tmp_path, **changes):
    spec = make_spec(**changes)
    return load_examples(find_files(path), path.name, spec, tokenizer, tmp_path / "cache")


def chat(question, answer, role="user"):
    asked = {"role": role, "content": question} if role else {"content": question}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}


def as_csv(pairs):
    lines = ["instruction,output"]
    lines += [",".join('"' + text.replace('"', '""') + '"' for text in pair) for pair in pairs]
    return "\n".join(lines) + "\n"


ROWS = [{"instruction": asked, "output": answer} for asked, answer in PAIRS]
FILES = {
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "a.json": json.dumps(ROWS, indent=1),
    "objects.json": "\n".join(json.dumps(row, indent=1) for row in ROWS),
    "a.csv": as_csv(PAIRS),
}


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
@pytest.mark.parametrize("name", sorted(FILES))
def test_neither_a_bom_nor_crlf_moves_a_token(tmp_path, tokenizer, name, mark, ends):
    plain, odd = tmp_path / "plain.jsonl", tmp_path / name
    plain.write_text(FILES["a.jsonl"])
    odd.write_bytes(mark + FILES[name].replace("\n", ends).encode())
    expected, found = (load(path, tokenizer, tmp_path) for path in (plain, odd))
    assert (found.num_rows, found.num_skipped, found.format) == (2, 0, "alpaca")
    for one, other in zip(found.first_rows(2), expected.first_rows(2), strict=True):
        assert np.array_equal(one[0].ids, other[0].ids)
        assert np.array_equal(one[0].is_target, other[0].is_target)


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_text_files_lose_their_mark_and_line_ends(tmp_path, tokenizer, ends):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + ends.join(["one", "two", ""]).encode())
    by_lines = DataSpec(train="train.jsonl", documents="line")
    found = load(path, tokenizer, tmp_path, data=by_lines)
    texts = [tokenizer.decode(row[0].ids, skip_special_tokens=True) for row in found.first_rows(9)]
    assert texts == ["one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet"])
def test_an_empty_file_is_refused_by_its_name(tmp_path, tokenizer, name):
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(ExpectedError, match=r"is empty|not a complete Parquet") as caught:
        load(path, tokenizer, tmp_path)
    assert str(path) in caught.value.message
    assert not list((tmp_path / "cache").glob("*/about.json"))


def test_text_of_every_plane_reaches_the_examples_whole(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    texts = [json.dumps(EVERY_PLANE), json.dumps(EVERY_PLANE, ensure_ascii=False)]
    path.write_text("".join(f'{{"text": {text}}}\n' for text in texts), encoding="utf-8")
    found = load(path, tokenizer, tmp_path, sequence_tokens=512)
    assert (found.num_skipped, found.num_truncated) == (0, 0)
    for row in found.first_rows(2):
        assert tokenizer.decode(row[0].ids, skip_special_tokens=True) == EVERY_PLANE
        assert row[0].is_target[1:].all()


def test_a_row_of_200_000_tokens_is_cut_named_and_packed(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    rows = [chat("Hi", "Ho"), chat("Hi", "river " * 200_000), chat("Hi", "Ho")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load(path, tokenizer, tmp_path, packing=True)
    assert (found.num_skipped, found.num_truncated) == (0, 1)
    (named,) = found.truncated
    assert named.row == 2
    assert int(named.reason.removesuffix(" tokens")) > 200_000
    assert found.num_tokens.max() == 64
    asked = [chat("river " * 200_000, "Ho"), chat("Hi", "Ho")]
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    found = load(path, tokenizer, tmp_path)
    (left_out,) = found.skipped
    assert left_out.row == 1
    assert not left_out.malformed
    assert "nothing to learn is left within 64 of its 20" in left_out.reason


def test_a_missing_role_costs_its_row_and_is_named(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    rows = [chat("Hi", "Ho"), chat("Hi", "Ho", role=None), chat("Hi", "Ho", role="wizard")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load(path, tokenizer, tmp_path)
    assert [(one.row, one.malformed) for one in found.skipped] == [(2, True), (3, True)]
    assert found.skipped[0].reason == "message 1 has no role"
    assert "the role 'wizard'" in found.skipped[1].reason
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[1:2] * 3))
    with pytest.raises(ExpectedError) as caught:
        load(path, tokenizer, tmp_path)
    assert caught.value.message == (
        f"{path} has no usable row: all 3 were left out (the first, row 1: message 1 has no role)."
    )


def write_odd_file(path: Path, num_good: int) -> None:
    """Write a file with a BOM, CRLF, and a row of every odd kind after `num_good` others."""
    rows = [chat("Hi", f"Ho {i}") for i in range(num_good)]
    rows += [chat("Hi", "river " * 200_000), chat("Hi", EVERY_PLANE), chat("Hi", "", role=None)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", ""]).encode())


def test_a_run_on_odd_data_trains_and_tells_what_it_left_out(tmp_path, tiny_model):
    spec = make_spec(sequence_tokens=256, batch_sequences=4, max_steps=2)
    run = Run(tmp_path / "run", tiny_model, spec, 2)
    write_odd_file(run.train, num_good=3)
    evaluation = tmp_path / "odd-eval.jsonl"
    asked = [chat("Hi", "Ho"), chat("Hi", ""), chat("Hi", "river " * 300)]
    evaluation.write_text("".join(json.dumps(row) + "\n" for row in asked))
    run.train_to_end(eval_path=str(evaluation))
    lines = run.journal()
    (started,) = [line for line in lines if line["kind"] == "started"]
    assert (started["num_rows"], started["num_skipped"], started["truncated"]) == (5, 2, 1)
    assert started["data"] == "train.jsonl"
    assert started["skipped"] == [
        {"row": 6, "reason": "message 1 has no role"},
        {"row": 7, "reason": "the line is empty"},
    ]
    (preview,) = [line for line in lines if line["kind"] == "preview"]
    assert [one["row"] for one in preview["truncated"]] == [4]
    warnings = [line["message"] for line in lines if line["kind"] == "warning"]
    assert warnings[0] == (
        "train.jsonl: more than 99 % of the tokens (199,753 of 200,138) are behind "
        "sequence_tokens and are cut."
    )
    assert warnings[1] == (
        "Of 3 rows of odd-eval.jsonl 1 is left out (the first, row 2: the conversation has no "
        "answer of the assistant)."
    )
    assert warnings[2].startswith("Of 3 rows of odd-eval.jsonl 1 is cut (the first, row 3: ")
    assert warnings[3].startswith("odd-eval.jsonl: ")
    assert len(warnings) == 4
    assert run.steps()[2]["loss"] > 0


@pytest.mark.parametrize(
    ("num_ranks", "packing", "words"), [(2, False, "is 1 row"), (3, True, "is 1 pack of rows")]
)
def test_one_row_fewer_than_ranks_is_trained_and_said(
    tmp_path, tiny_model, num_ranks, packing, words
):
    spec = make_spec(batch_sequences=2, max_steps=2, packing=packing)
    run = Run(tmp_path / "run", tiny_model, spec, num_ranks)
    make_rows(run.train, num_ranks - 1)
    run.train_to_end(eval_path=str(make_rows(tmp_path / "eval.jsonl", 1)))
    lines = run.journal()
    warnings = [line["message"] for line in lines if line["kind"] == "warning"]
    assert warnings == [f"There {words} for {num_ranks} ranks."]
    steps = [run.steps(rank) for rank in range(num_ranks)]
    assert list(steps[0]) == [1, 2]
    for step, line in steps[0].items():
        assert sum(one[step]["tokens"] for one in steps) == line["global_tokens"]
    assert any(line["kind"] == "eval" for line in lines)


@pytest.mark.parametrize(("num_rows", "words"), [(5, "the 5 rows"), (1, "the only row")])
def test_a_batch_larger_than_the_data_is_trained_and_said(tmp_path, tiny_model, num_rows, words):
    run = Run(tmp_path / "run", tiny_model, make_spec(batch_sequences=6, max_steps=1))
    make_rows(run.train, num_rows)
    run.train_to_end()
    warnings = [line["message"] for line in run.journal() if line["kind"] == "warning"]
    assert warnings == [f"A batch of 6 sequences takes {words} of the data more than once."]
    assert run.steps()[1]["epoch"] == 6 / num_rows


def test_an_empty_file_ends_every_rank_with_one_sentence(tmp_path, tiny_model):
    run = Run(tmp_path / "run", tiny_model, make_spec(), 2)
    run.train.write_bytes(b"\xef\xbb\xbf\r\n")
    assert finish(run.start()) == [3, 3]
    message = run.journal()[-1]["message"]
    # By the run file's name: the path is that of the node's copy.
    assert message == f"{make_spec().data.train} is empty."
