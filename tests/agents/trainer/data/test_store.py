"""Examples on disk: the same as in memory, made once, whole or not there; packed tightly."""

from __future__ import annotations

import fcntl
import json
import pkgutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agents.contract.spec import DataSpec, RunSpec
from agents.errors import ExpectedError
from agents.trainer.data import cache
from agents.trainer.data.cache import load_examples, make_key, prune
from agents.trainer.data.examples import Segment
from agents.trainer.data.packing import pack
from agents.trainer.data.rows import find_files
from agents.trainer.data.store import open_examples, write_about, write_examples
from agents.trainer.data.tally import Tally
from agents.trainer.data.tokens import Tokenized
from agents.trainer.model.model import load_tokenizer
from tests.agents.trainer.ranks import DEMO
from tests.draws import seed

MODEL = DEMO / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)[0]


def make_spec(**changes):
    spec = RunSpec(model="m", data=DataSpec(train="d"), sequence_tokens=64)
    return replace(spec, **changes)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path, tokenizer, folder, sha256="0", **changes):
    return load_examples(find_files(path), sha256, make_spec(**changes), tokenizer, folder)


def key_of(path, sha256="0", spec=None, tokenizer=None):
    files = find_files(path)
    return make_key(files, sha256, spec or make_spec(), tokenizer or load_tokenizer(MODEL)[0])


def texts(num_rows):
    return [{"text": f"The river {'runs ' * (i % 7)}on, {i}."} for i in range(num_rows)]


def decode(tokenizer, example):
    return [tokenizer.decode(segment.ids) for segment in example.segments]


def test_examples_come_back_as_they_were_written(tmp_path, tokenizer):
    found = load(write_rows(tmp_path / "a.jsonl", texts(20)), tokenizer, tmp_path / "c")
    assert len(found) == 20
    assert found.format == "text"
    assert decode(tokenizer, found[3]) == ["The river runs runs runs on, 3.<|end|>"]
    assert found[3].rows == (4,)
    assert found.num_tokens.tolist() == [example.num_tokens for example in found]
    assert found.weights.tolist() == [example.num_targets for example in found]
    assert found[3].segments[0].is_target.tolist() == [False] + [True] * (found.num_tokens[3] - 1)


def test_labels_come_back_in_their_order(tmp_path):
    segment = Segment(1, np.arange(3, dtype=np.int32), np.array([False, True, True]))
    rows = [Tokenized((segment,), label=label) for label in (1.0, 0.0, 1.0)]
    sizes = write_examples(tmp_path / "entry", iter(rows), capacity=None)
    write_about(tmp_path / "entry", sizes, "chat", Tally(name="t"))
    by_row = open_examples(tmp_path / "entry", weighs_tokens=False)
    by_token = open_examples(tmp_path / "entry")
    assert by_row.labels.tolist() == [1.0, 0.0, 1.0]
    assert (by_row.weights.tolist(), by_token.weights.tolist()) == ([1, 1, 1], [2, 2, 2])


@pytest.mark.parametrize("module", ["rows.py", "meaning.py"])
def test_tokens_are_made_anew_by_other_code(tmp_path, monkeypatch, module):
    path = write_rows(tmp_path / "a.jsonl", texts(1))
    before = key_of(path)
    read = pkgutil.get_data

    def change(package, name):
        return (read(package, name) or b"") + (b"\n" if name == module else b"")

    monkeypatch.setattr(cache.pkgutil, "get_data", change)
    assert key_of(path) != before


def test_a_second_reader_maps_what_the_first_one_made(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", texts(5))
    load(path, tokenizer, tmp_path / "c")
    monkeypatch.setattr(cache, "write_examples", None)
    assert len(load(path, tokenizer, tmp_path / "c")) == 5


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_tokenizing_tells_how_far_it_is(tmp_path, tokenizer, name):
    path = tmp_path / name
    rows = [{"text": f"The river Venna runs through Tolmar, said {i}."} for i in range(6000)]
    if name == "a.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name == "a.json":
        path.write_text(json.dumps(rows))
    elif name == "a.csv":
        path.write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    told = []
    load_examples(
        find_files(path), "0", make_spec(), tokenizer, tmp_path / "cache",
        lambda count, share: told.append((count, share)),
    )  # fmt: skip
    assert [count for count, _ in told] == [1000, 2000, 3000, 4000, 5000, 6000]
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1
    if name == "a.parquet":
        assert shares[2] == pytest.approx(0.5, abs=0.06)


def test_long_rows_are_told_of_before_there_are_a_thousand(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(cache, "_REPORT_CHARS", 1000)
    path = write_rows(tmp_path / "a.jsonl", [{"text": "river " * 100}] * 20)
    told = []
    load_examples(
        find_files(path), "0", make_spec(), tokenizer, tmp_path / "c", lambda *far: told.append(far)
    )
    assert [count for count, _ in told] == list(range(2, 21, 2))


def test_who_waits_for_another_process_says_that_it_is_alive(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(cache, "_WAIT_S", 0.01)
    path = write_rows(tmp_path / "a.jsonl", texts(5))
    folder = tmp_path / "c"
    folder.mkdir()
    lock = (folder / f"{key_of(path)}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    signs = []

    def wait():
        signs.append(1)
        if len(signs) == 3:
            lock.close()

    found = load_examples(find_files(path), "0", make_spec(), tokenizer, folder, wait=wait)
    assert len(found) == 5
    assert len(signs) == 3


def test_whatever_decides_the_content_makes_another_entry(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", texts(1))
    keys = {key_of(path), key_of(path, "1")}
    for change in ({"packing": True}, {"sequence_tokens": 65}, {"objective": "dpo"}):
        keys.add(key_of(path, spec=make_spec(**change)))
    tokenizer = load_tokenizer(MODEL)[0]
    tokenizer.chat_template += " "
    keys.add(key_of(path, tokenizer=tokenizer))
    keys.add(key_of(write_rows(tmp_path / "a.txt", texts(1))))
    assert len(keys) == 7
    again = write_rows(tmp_path / "b.jsonl", texts(1))
    assert key_of(again, spec=make_spec(seed=7)) == key_of(path)


def test_the_same_bytes_are_other_rows_by_another_name(tmp_path, tokenizer):
    rows = {}
    for name in ("a.txt", "a.jsonl", "a.csv"):
        path = tmp_path / name
        path.write_text('{"text": "one"}\n{"text": "two"}\n' if name != "a.csv" else "text\none\n")
        data = DataSpec(train="d", format="text", documents="line")
        found = load(path, tokenizer, tmp_path / "c", data=data)
        rows[name] = [decode(tokenizer, example)[0] for example in found]
    assert rows["a.txt"][0] == '{"text": "one"}<|end|>'
    assert rows["a.jsonl"] == ["one<|end|>", "two<|end|>"]
    assert rows["a.csv"] == ["one<|end|>"]


def test_rows_left_out_are_named_by_the_files_of_this_folder(tmp_path, tokenizer):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / f"{name}-1.jsonl", texts(3))
        write_rows(tmp_path / name / f"{name}-2.jsonl", [{"text": ""}])
        (skipped,) = load(tmp_path / name, tokenizer, tmp_path / "c").skipped
        assert (skipped.file, skipped.row) == (f"{name}-2.jsonl", 1)


def test_what_a_killed_writer_left_is_never_taken(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", texts(5))
    folder = tmp_path / "c"
    key = key_of(path)
    (folder / f"{key}.unfinished").mkdir(parents=True)
    (folder / f"{key}.unfinished" / "tokens").write_bytes(b"half")
    assert len(load(path, tokenizer, folder)) == 5
    for name, content in (("tokens", b"torn"), ("about.json", b"{"), ("about.json", b"[]")):
        (folder / key / name).write_bytes(content)
        assert open_examples(folder / key) is None
        assert len(load(path, tokenizer, folder)) == 5
    assert sorted(file.name for file in folder.iterdir()) == [key, f"{key}.lock"]


def test_a_refused_file_leaves_nothing(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [{"text": " "}])
    with pytest.raises(ExpectedError, match="no usable row"):
        load(path, tokenizer, tmp_path / "c")
    assert not [file for file in (tmp_path / "c").iterdir() if file.is_dir()]


def test_entries_unused_for_longest_make_room(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", texts(5))
    for sha256 in "123":
        load(path, tokenizer, tmp_path / "c", sha256)
    keys = [key_of(path, sha256) for sha256 in "123"]
    load(path, tokenizer, tmp_path / "c", "1")  # used again
    prune(tmp_path / "c", 0, keep=keys[0])
    assert [(tmp_path / "c" / key).is_dir() for key in keys] == [True, False, False]


def test_packs_hold_every_row_once_and_no_more_than_fits(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", texts(50))
    found = load(path, tokenizer, tmp_path / "c", packing=True)
    assert sorted(row for example in found for row in example.rows) == list(range(1, 51))
    assert found.num_tokens.max() <= 64
    assert found.num_tokens.tolist() == [example.num_tokens for example in found]
    assert found.num_targets.tolist() == [example.num_targets for example in found]
    assert len(found) < 25


@pytest.mark.parametrize("spread", [0.5, 0.9, 1.3])
def test_ordinary_lengths_fill_packs_to_95_percent(spread):
    random = np.random.default_rng(seed(1))
    lengths = np.clip(random.lognormal(5.5, spread, 20_000), 4, 2048).astype(np.int32)
    order, first = pack(lengths, 2048)
    sizes = np.add.reduceat(lengths[order], first[:-1])
    assert sizes.max() <= 2048
    assert sorted(order.tolist()) == list(range(20_000))
    assert sizes.mean() / 2048 >= 0.95


def test_pairs_become_two_segments_that_learn_only_what_differs(tmp_path, tokenizer):
    row = {"prompt": "Hi", "chosen": "Hello you", "rejected": "Go"}
    found = load(
        write_rows(tmp_path / "a.jsonl", [row]), tokenizer, tmp_path / "c", objective="dpo"
    )
    chosen, rejected = found[0].segments
    assert tokenizer.decode(chosen.ids[chosen.is_target]) == "Hello you<|end|>"
    assert tokenizer.decode(rejected.ids[rejected.is_target]) == "Go<|end|>"
    assert tokenizer.decode(rejected.ids) == "<|begin|><|user|>Hi<|end|><|assistant|>Go<|end|>"
    assert found.weights.tolist() == [1]
    assert found[0].rows == (1,)
