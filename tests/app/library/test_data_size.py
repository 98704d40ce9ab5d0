"""What the first rows suggest of all of them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.spec import DataSpec, RunSpec
from agents.shared.models.config import find_config
from app.library.data_key import make_data_key
from app.library.data_size import NOTHING, cut_and_pack, guess_data, list_files

ROW = {"messages": [{"role": "user", "content": "x" * 400}, {"role": "a", "content": "y" * 800}]}


def test_rows_of_a_large_file_are_guessed_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps(ROW) + "\n") * 3000)
    guess = guess_data(path)
    assert not guess.is_whole
    assert guess.num_rows == pytest.approx(3000, rel=0.01)
    assert guess.mean_tokens == pytest.approx(1200 / 4 + 12)


def test_a_giant_row_behind_a_short_one_is_not_taken_for_many_short_ones(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "short"}\n' + json.dumps({"text": "x" * (6 << 20)}) + "\n")
    guess = guess_data(path)
    assert guess.num_rows is not None
    assert guess.mean_tokens is not None
    assert guess.num_rows < 20
    assert guess.num_rows * guess.mean_tokens == pytest.approx((6 << 20) / 4, rel=0.01)


@pytest.mark.parametrize(
    ("name", "text", "num_rows"),
    [
        ("a.json", json.dumps([ROW, ROW]), 2),
        ("a.json", json.dumps({"version": 1, "data": [ROW, ROW, ROW]}), 3),
        ("a.json", json.dumps(ROW), 1),
        ("a.csv", "instruction,output\nabcdefgh,ijklmnop\nq,r\n", 2),
        ("a.txt", "one line\n\nanother\n", 1),
        ("a.jsonl", json.dumps(ROW) + "\n{broken\n", 1),
    ],
)
def test_small_files_are_counted_whole(tmp_path: Path, name: str, text: str, num_rows: int) -> None:
    (tmp_path / name).write_text(text)
    guess = guess_data(tmp_path / name)
    assert (guess.num_rows, guess.is_whole) == (num_rows, True)


def test_folder_counts_all_its_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("12345678\n" * 5)
    assert guess_data(tmp_path).num_rows == 2
    assert guess_data(tmp_path, DataSpec(train="-", documents="line")).num_rows == 10


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE.txt", "dataset_infos.json", ".cache/a.jsonl", ".a.jsonl"]
)
def test_what_is_no_data_in_a_folder_counts_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.jsonl").write_text((json.dumps(ROW) + "\n") * 100)
    guess = guess_data(tmp_path)
    assert guess.num_rows == 100
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"text": "short"}\n')
    assert guess_data(tmp_path) == guess


@pytest.mark.alone
def test_a_large_folder_is_not_walked(tmp_path: Path) -> None:
    spec = RunSpec(model="m", data=DataSpec(train="/"))
    began_s = time.monotonic()
    assert guess_data(Path("/")) == NOTHING
    assert make_data_key(spec) == make_data_key(spec)
    assert time.monotonic() - began_s < 0.5
    for number in range(600):
        (tmp_path / f"{number}.png").touch()
    (tmp_path / "a.txt").write_text("words\n")
    assert list_files(tmp_path) is None


@pytest.mark.parametrize("train", ["~nobody-of-that-name", "x" * 5000, "a\0b"])
def test_any_text_may_stand_where_a_path_is_typed(train: str) -> None:
    assert guess_data(Path(train)) == NOTHING
    assert make_data_key(RunSpec(model="m", data=DataSpec(train=train)))
    assert find_config(train, {"HOME": "/nowhere"}) is None


@pytest.mark.parametrize("name", ["none.jsonl", "a.parquet", "empty.jsonl"])
def test_what_tells_nothing_is_not_guessed(tmp_path: Path, name: str) -> None:
    if not name.startswith("none"):
        (tmp_path / name).write_bytes(b"PAR1" if name.endswith("parquet") else b"")
    assert guess_data(tmp_path / name) == NOTHING


def test_long_rows_are_cut_as_the_run_does(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 40_000 + "\n")
    data = DataSpec(train="t", long_text="cut")
    spec = RunSpec(model="m", data=data, sequence_tokens=512)
    cut = cut_and_pack(guess_data(tmp_path / "a.txt"), spec)
    assert (cut.mean_tokens, cut.longest_tokens) == (512, 512)
    pairs = cut_and_pack(guess_data(tmp_path / "a.txt"), replace(spec, objective="dpo"))
    assert pairs.longest_tokens == 1024
    split = cut_and_pack(guess_data(tmp_path / "a.txt"), replace(spec, data=DataSpec(train="t")))
    assert (split.num_rows, split.longest_tokens) == (20, 512)
    assert not split.findings


def test_encoding_counts_for_guess_and_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "words"}\n'.encode("utf-16-le") * 20)
    plain, wide = DataSpec(train=str(path)), DataSpec(train=str(path), encoding="utf-16-le")
    assert make_data_key(RunSpec(model="m", data=plain)) != make_data_key(
        RunSpec(model="m", data=wide)
    )
    assert guess_data(path, wide).num_rows == 20
