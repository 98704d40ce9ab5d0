"""Models and data: what is found, what is sent, and what each wrong one is told."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Tally
from app.errors import UserError
from app.library.data import check_form, explain_missing_data, find_data
from app.library.models import explain_missing_model, find_model
from app.storage.database import open_database
from app.storage.hashes import HashStore
from tests.draws import seed
from tests.fakes.models import write_model


@pytest.fixture
def hashes(tmp_path: Path) -> HashStore:
    return HashStore(open_database(tmp_path / "home" / "rackless.sqlite3"))


def make_model(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(name.encode())
    return folder


def test_model_folder_is_sent_without_pickles_and_hidden_files(
    tmp_path: Path, hashes: HashStore
) -> None:
    names = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    others = ("chat_template.jinja", "pytorch_model.bin", ".cache.json", "code.py", "x.gguf")
    folder = write_model(make_model(tmp_path / "my model", *others))
    (folder / "original").mkdir()
    source = find_model(str(folder), hashes)
    assert [entry.path for entry in source.files] == sorted(names)
    assert source.destination is not None
    assert source.destination.startswith("models/my-model-")
    assert source.path_on_node("/agent/models/x") == "/agent/models/x"


def test_bundle_is_named_by_its_content(tmp_path: Path, hashes: HashStore) -> None:
    first = write_model(tmp_path / "m")
    config = (first / "config.json").read_bytes()
    before = find_model(str(first), hashes).destination
    (first / "config.json").write_bytes(config + b" ")
    changed = find_model(str(first), hashes).destination
    assert before != changed
    (first / "config.json").write_bytes(config)
    os.utime(first / "config.json", ns=(1, 1))
    assert find_model(str(first), hashes).destination == before


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "gpt2", "Qwen/Qwen2.5-0.5B"])
def test_hub_ids_are_left_to_the_nodes(hashes: HashStore, name: str) -> None:
    source = find_model(name, hashes)
    assert (source.value, source.destination) == (name, None)


def test_folder_on_the_nodes_is_passed_on(hashes: HashStore) -> None:
    assert find_model("/srv/models/llama", hashes).value == "/srv/models/llama"


def test_folder_on_the_nodes_is_passed_on_from_windows(
    hashes: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_absolute", lambda path: bool(path.drive))  # as there
    assert find_model("/models/llama", hashes).value == "/models/llama"


@pytest.mark.parametrize("name", ["./absent", "~/absent-model", "a/b/c", "two words", "-x", ""])
def test_name_that_is_no_model(hashes: HashStore, name: str, monkeypatch: pytest.MonkeyPatch,
                               tmp_path: Path) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=r"not a hub id|no config\.json"):
        find_model(name, hashes)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("model.safetensors",), "has no config.json"),
        (("config.json",), "no weights in safetensors format"),
        (("config.json", "pytorch_model.bin"), "only pickled ones"),
    ],
)
def test_folder_that_is_no_model(
    tmp_path: Path, hashes: HashStore, names: tuple[str, ...], message: str
) -> None:
    folder = make_model(tmp_path / "m", *names)
    if "config.json" in names:
        (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=message):
        find_model(str(folder), hashes)


def test_model_that_is_a_file(tmp_path: Path, hashes: HashStore) -> None:
    (tmp_path / "m").write_text("")
    with pytest.raises(UserError, match="is a file"):
        find_model(str(tmp_path / "m"), hashes)


GOOD = {
    "a.jsonl": '{"text": "x"}\n\n{"text": "y\\u2028z"}',
    "b.json": '[{"text": "x"}]',
    "c.json": '{"text": "x"}\n{"text": "y"}\n',
    "d.csv": 'text,label\n"a, b\nc",1\n',
    "e.tsv": "text\tlabel\nx\ty\n",
    "f.txt": "one row\n",
    "g.ndjson": '\ufeff{"text": "x"}\n',
    "h.JSONL": '{"text": "x"}\r\n',
    "i.json": '{\n  "text": "x"\n}\n{\n  "text": "y"\n}\n',
    "j.json": '{"text": "x"}{"text": "y"}',
    "k.json": '\ufeff\n{"text": "x"},\n{"text": "y"},\n',
    "l.json": '[{"text": "x"}, {"text": "y"},]\n',
    "m.json": '{\n "version": 1,\n "data": [{"text": "x"}]\n}',
    "n.jsonl": '{"text": "x"}\r{"text": "y"}\r',
    "o.csv": '\n\ntext;note\nx;"a, b"\n',
    "chats": '{"text": "x"}\n{"text": "y"}\n',
    "chats.data": ' [{"text": "x"}]',
}


@pytest.mark.parametrize("name", sorted(GOOD))
def test_good_data_is_found_and_sent(tmp_path: Path, hashes: HashStore, name: str) -> None:
    path = tmp_path / name
    path.write_text(GOOD[name], newline="")
    source = find_data(str(path), "data.train", hashes)
    assert [entry.path for entry in source.files] == [name]
    assert source.path_on_node("/agent/data/x") == f"/agent/data/x/{name}"


BAD = [
    ("a.jsonl", '{"a": 1}\n' + '{"a": \n' * 11, "line 2: not valid JSON: Expecting value"),
    ("a.jsonl", '{"a": 1}\n' + "3\n" * 11, "line 2: a row is not an object"),
    ("a.jsonl", "", "is empty"),
    ("a.jsonl", "\n\n", "is empty"),
    ("a.jsonl", "[" * 100_000, "line 1: not valid JSON: nested too deeply"),
    ("a.json", '[{"a": 1},\n{"a": }]', "line 2: not valid JSON"),
    ("a.json", '{"a": 1}\n' + '{"a": \n' * 11, "line 2: not valid JSON"),
    ("a.json", '"text"', "holds no list of rows"),
    ("a.json", "[]", "is empty"),
    (
        "a.json",
        '{\n "a": 1\n}\n{\n "a": \n}\n',
        "line 6: not valid JSON: Expecting value at character",
    ),
    ("a.json", '{"a": 1}{"a": }', "line 1: not valid JSON: Expecting value at character 15"),
    ("a.json", '[{"a": 1},\n{"a": 2}\n', "line 3: not valid JSON: the list has no end"),
    ("a.json", '[{"a": 1}]\n[{"a": 2}]', "line 2: not valid JSON: more follows the end of the"),
    ("a.json", '[{"a": 1},\n' + "3,\n" * 11 + "]", "line 2: a row is not an object"),
    ("a.json", "[1]", "line 1: a row is not an object"),
    ("a.json", "[" * 100_000, "line 1: not valid JSON: nested too deeply"),
    ("a.json", "[\n" + "9" * 5000 + "]", "line 2: not valid JSON: a number has too many digits"),
    ("a.json", " \n", "is empty"),
    ("a", '{"a": 1}\n' + '{"a": \n' * 11, "line 2: not valid JSON"),
    ("a", '[{"a": 1}', "line 1: not valid JSON: the list has no end"),
    ("a", "", "'' is not a kind of data file"),
    ("a.csv", "a,b\n1,2\n" + "3\n" * 11, "line 3: 1 fields, but the first line names 2 columns"),
    ("a.csv", 'a,b\n"1,2\n', "line 2: not valid CSV"),
    ("a.csv", "a,b\n", "is empty"),
    ("a.txt", " \n", "is empty"),
    ("a.parquet", "PAR1", "is not a complete Parquet file"),
    ("a", "x", "'' is not a kind of data file"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_bad_data_is_told_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        check_form(path)
    assert message in refused.value.message
    assert str(path) in refused.value.message


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_that_are_one_value_need_another_name(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=indent))
    with pytest.raises(UserError) as refused:
        check_form(path)
    assert refused.value.hint.startswith("Name the file .json")
    assert trains(path.rename(tmp_path / "a.json"))


def trains(path: Path) -> bool:
    """Tell whether a node would train on the file."""
    tally = Tally(name=str(path))
    try:
        rows = sum(1 for _ in RowReader(find_files(path), DataSpec(train="-"), "sft", tally))
        tally.check_usable(rows)
    except ExpectedError:
        return False
    return True


def passes(path: Path) -> bool:
    try:
        check_form(path)
    except UserError:
        return False
    return True


PIECES = [
    *('{"text": "x"}', '{"text": "x"}', '{\n "text": "x"\n}', '{"text": "x"}\n' * 30),
    *("\n", "\n", "\r\n", " ", ",", "[", "]", "{", "3", '"', "\u00a0", "\ufeff", "\n" * 300),
    *('{"text": \n' * 11, "1" * 5000),
]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a"])
def test_what_a_node_can_read_passes_and_nothing_else(tmp_path: Path, name: str) -> None:
    chance = random.Random(seed(7))
    path = tmp_path / name
    passed = 0
    for _ in range(800):
        text = "".join(chance.choices(PIECES, k=chance.randint(1, 5)))
        text = f"[{text}]" if chance.random() < 0.3 else text
        path.write_text(text, encoding="utf-8", newline="")
        assert passes(path) == trains(path), text
        passed += passes(path)
    assert 50 < passed < 750


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", " " * (1 << 20) + '{"text": "x"}\n{broken\n'),
        ("a.json", '{"text": "' + "x" * (1 << 20) + '"}\n{broken\n'),
        ("a.json", '{"text": "x"}\n{broken\n'),
        ("a.json", '[{"text": "x"}] and more'),
        ("a.jsonl", '{"text":\r"x"}\n'),
        ("a.tsv", "text\tnote;a;b\nx\ty\n"),
        ("a", " " * 5000 + '{"text": "x"}'),
    ],
)
def test_odd_files_are_judged_as_a_node_does(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, newline="")
    assert passes(path) == trains(path)


FOLDERS = [
    ({"a.jsonl": "", "b.jsonl": '{"text": "x"}'}, True),
    ({"a.jsonl": "", "b.jsonl": "\n"}, False),
    ({"a.jsonl": '{"text": "x"}\n' * 400, "b.jsonl": "{\n" * 15}, True),
    ({"a.jsonl": '{"text": "x"}\n' * 200, "b.jsonl": "{\n" * 15}, False),
    ({"a.csv": "text,id\nx,1\n", "b.csv": "text,id\n"}, True),
    ({"license_cases.csv": "text\nx\n", "README.md": "about"}, True),
    ({"LICENSE.txt": "about"}, False),
    ({"a.csv": "text\nx\n", "a.csv.gz": "packed", "b.tar.gz": "packed"}, True),
    ({"a.csv": "text\nx\n", "b.csv.gz": "packed"}, False),
]


@pytest.mark.parametrize(("contents", "fine"), FOLDERS)
def test_a_folder_is_judged_as_a_whole_as_a_node_does(
    tmp_path: Path, hashes: HashStore, contents: dict[str, str], fine: bool
) -> None:
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    assert trains(tmp_path) == fine
    if fine:
        find_data(str(tmp_path), "data.train", hashes)
        return
    with pytest.raises(UserError):
        find_data(str(tmp_path), "data.train", hashes)


def test_folders_behind_links_are_sent_once(tmp_path: Path, hashes: HashStore) -> None:
    (tmp_path / "d" / "deep").mkdir(parents=True)
    (tmp_path / "d" / ".other").mkdir()
    for name in ("d/deep/a.jsonl", "d/.other/b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}')
    (tmp_path / "d" / "more").symlink_to(tmp_path / "d" / ".other")
    (tmp_path / "d" / "deep" / "itself").symlink_to(tmp_path / "d")
    (tmp_path / "d" / "above").symlink_to("..")
    source = find_data(str(tmp_path / "d"), "data.train", hashes)
    assert [entry.path for entry in source.files] == ["deep/a.jsonl", "more/b.jsonl"]


def test_a_name_that_is_no_text_is_said(tmp_path: Path, hashes: HashStore) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"text": "x"}')
    with pytest.raises(UserError, match=r"the name of .*/caf.udce9\.jsonl is not UTF-8"):
        find_data(str(tmp_path), "data.train", hashes)


def test_large_json_with_a_row_in_each_line_is_looked_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.library.data._LARGE_JSON_BYTES", 10)
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}\n' + '{"a": \n' * 11)
    assert not passes(path)
    path.write_text('[{"a": 1},\n{"a": }]')
    assert passes(path), "only its node reads it"


@pytest.mark.parametrize(
    ("name", "start", "said"),
    [
        ("a.jsonl", b"\x1f\x8b\x08", "is compressed (gzip)"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "is compressed (gzip)"),
        ("a.csv", b"PK\x03\x04", "is compressed (zip)"),
        ("a.xlsx", b"PK\x03\x04", "'.xlsx' is not a kind of data file"),
        ("a.txt", b"PAR1\x15", "is a Parquet file"),
    ],
)
def test_data_that_is_not_what_its_name_says(
    tmp_path: Path, name: str, start: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(start)
    with pytest.raises(UserError) as refused:
        check_form(tmp_path / name)
    assert said in refused.value.message
    assert not trains(tmp_path / name)


def test_data_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "\u00e4"}'.encode("utf-16"))
    with pytest.raises(UserError, match="not text in UTF-8"):
        check_form(path)


def test_data_that_is_not_there(tmp_path: Path, hashes: HashStore) -> None:
    with pytest.raises(UserError, match=r"the data file x\.jsonl \(data\.eval\) does not exist"):
        find_data("x.jsonl", "data.eval", hashes)
    with pytest.raises(UserError, match="holds no data file"):
        find_data(str(tmp_path), "data.train", hashes)


def test_a_data_set_of_the_hub_is_left_to_the_nodes(hashes: HashStore) -> None:
    source = find_data("tatsu-lab/alpaca", "data.train", hashes)
    assert (source.value, source.destination) == ("tatsu-lab/alpaca", None)


def test_a_folder_is_sent_with_its_data_files_only(tmp_path: Path, hashes: HashStore) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": \n')
    for name in ("README.md", ".hidden.jsonl", "photo.png"):
        (tmp_path / name).write_text("x")
    source = find_data(str(tmp_path), "data.train", hashes)
    assert [entry.path for entry in source.files] == ["a.jsonl", "deep/b.jsonl"]
    assert source.path_on_node("/agent/data/x") == "/agent/data/x"


@pytest.mark.parametrize(
    ("name", "is_missing"),
    [
        ("chats.jsonl", True),
        ("/nowhere/chats.jsonl", True),
        ("~/nowhere/chats", True),
        ("org/chats.csv", True),
        ("org/chats", False),
        ("x" * 5000, True),
        ("\x00", True),
        ("HERE", False),
        ("HERE/model", False),
    ],
)
def test_data_that_is_not_there_is_told_without_a_look_into_it(
    tmp_path: Path, name: str, is_missing: bool
) -> None:
    (tmp_path / "model").mkdir()
    assert bool(explain_missing_data(name.replace("HERE", str(tmp_path)))) == is_missing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/model", ""),
        ("gpt2", ""),
        ("/on/the/nodes", ""),
        ("HERE", ""),
        ("HERE/file", "This is a file"),
        ("~/nowhere", "no such folder"),
        ("../nowhere", "no such folder"),
        ("org/model/part", "no such folder"),
        ("my model", "no such folder"),
        ("x" * 5000, "no such folder"),
        ("\x00", "no such folder"),
    ],
)
def test_a_model_that_is_not_there_is_told_without_a_look_into_it(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "file").touch()
    told = explain_missing_model(name.replace("HERE", str(tmp_path)))
    assert words in told
    assert bool(told) == bool(words)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/x", "y" * 300 + "/b", "\x00"])
def test_names_that_no_disk_can_have_are_told(hashes: HashStore, name: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find_data(name, "data.train", hashes)
    with pytest.raises(UserError, match="no model folder"):
        find_model(name, hashes)


@pytest.mark.parametrize(
    ("name", "head", "row", "end"),
    [
        ("a.jsonl", "", '{"text": "caf\xe9 %d"}\n', ""),
        ("a.csv", "text\n", "caf\xe9 %d\n", ""),
        ("a.txt", "", "caf\xe9 %d\n", ""),
        ("a.json", "[", '{"text": "caf\xe9 %d"},', '{"text": "x"}]'),
    ],
)
def test_data_in_another_encoding_is_refused_at_once_and_a_few_such_rows_are_not(
    tmp_path: Path, name: str, head: str, row: str, end: str
) -> None:
    path = tmp_path / name
    rows = [row % number for number in range(300)]
    path.write_bytes((head + "".join(rows) + end).encode("latin-1"))
    with pytest.raises(UserError, match="byte 0xe9 is not UTF-8") as error:
        check_form(path)
    assert error.value.hint.startswith("Save the file as UTF-8")
    path.write_bytes((head + "".join(rows[:3])).encode("latin-1") +
                     ("".join(rows[3:]) + end).encode())  # fmt: skip
    check_form(path)
