"""Data files: what is read, what is left out, and what ends the run before it begins."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data import files, parquet_reader
from agents.trainer.data.conversations import ConversationTurn
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Tally

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def read_rows(path, data_format, objective="sft"):
    tally = Tally(name=str(path))
    data = DataSpec(train="-", format=data_format, documents="line")
    reader = RowReader(find_files(path), data, objective, tally)
    rows = list(reader)
    tally.check_usable(len(rows))
    return SimpleNamespace(rows=rows, skipped=tally.named, format=reader.format, tally=tally)


def refuse(path, data_format="auto", objective="sft"):
    with pytest.raises(ExpectedError) as caught:
        read_rows(path, data_format, objective)
    assert caught.value.hint
    return caught.value.message


def test_chat_lines_become_turns(tmp_path):
    found = read_rows(write(tmp_path, "a.jsonl", json.dumps(CHAT) + "\n"), "auto")
    assert found.format == "chat"
    turns = (
        ConversationTurn(role="user", content="Hi"),
        ConversationTurn(role="assistant", content="Ho"),
    )
    assert found.rows[0].turns == turns


@pytest.mark.parametrize("names", [("human", "gpt"), ("Human", "GPT"), ("USER", "Assistant")])
def test_sharegpt_names_and_text_parts_are_understood(tmp_path, names):
    row = {
        "conversations": [
            {"from": names[0], "value": "Hi"},
            {"from": names[1], "value": [{"type": "text", "text": "Ho"}]},
        ]
    }
    found = read_rows(write(tmp_path, "a.jsonl", json.dumps(row)), "auto")
    assert [turn.role for turn in found.rows[0].turns] == ["user", "assistant"]
    assert found.rows[0].turns[1].content == "Ho"


def test_names_of_either_kind_may_stand_beside_each_other_in_a_table(tmp_path):
    chats = [CHAT["messages"], [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]]
    names = ["role", "content", "from", "value"]
    kind = pa.list_(pa.struct([(name, pa.string()) for name in names]))
    table = pa.table({"messages": pa.array(chats, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    found = read_rows(tmp_path / "a.parquet", "auto")
    contents = [[turn.content for turn in row.turns] for row in found.rows]
    assert contents == [["Hi", "Ho"], ["a", "b"]]


@pytest.mark.parametrize(
    ("question", "answer"), [("instruction", "output"), ("prompt", "completion")]
)
def test_instructions_become_one_question_and_one_answer(tmp_path, question, answer):
    row = {question: "Add", "input": "1 2", answer: "3", "system": "Be short"}
    found = read_rows(write(tmp_path, "a.json", json.dumps([row])), "auto")
    assert found.format == "alpaca"
    contents = [(turn.role, turn.content) for turn in found.rows[0].turns]
    assert contents == [("system", "Be short"), ("user", "Add\n\n1 2"), ("assistant", "3")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n'),
        ("a.jsonl", '\ufeff{"text": "one"}\r\n{"text": "two"}\r\n'),
        ("a.json", '[{"text": "one"}, {"text": "two"}]'),
        ("a.json", '{"text": "one"}\n{"text": "two"}'),
        ("a.csv", "text\none\ntwo\n"),
        ("a.csv", "\ufeffid;text\r\n1;one\r\n2;two\r\n"),
        ("a.tsv", "text\tid\none\t1\ntwo\t2"),
        ("a.tsv", "text\none\ntwo\n"),
        ("a.TSV", "text\tsome, more; or less, notes\none\t1\ntwo\t2"),
        ("a.txt", "one\ntwo\n"),
        ("a.data", '{"text": "one"}\n{"text": "two"}'),
    ],
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name, content):
    found = read_rows(write(tmp_path, name, content), "auto")
    assert [row.text for row in found.rows] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "one\rtwo\r"),
        ("a.jsonl", '{"text": "one"}\r{"text": "two"}'),
        ("a.json", '{"text": "one"}\r{"text": "two"}\r'),
        ("a.csv", "text,id\rone,1\rtwo,2\r"),
        ("a.csv", "\n \ntext;note\none;a, b\ntwo;c\n"),
    ],
)
def test_old_line_ends_and_empty_lines_ahead_of_a_table_are_understood(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content.encode())
    assert [row.text for row in read_rows(path, "auto").rows] == ["one", "two"]


def test_a_return_inside_of_a_text_with_other_line_ends_stays(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\rtwo\nthree\n")
    assert [row.text for row in read_rows(path, "auto").rows] == ["one\rtwo", "three"]


@pytest.mark.parametrize("more", [' [{"text": "two"}]', "and more", " " * 3000 + "x"])
def test_what_follows_a_list_is_never_dropped(tmp_path, monkeypatch, more):
    monkeypatch.setattr(files, "_BLOCK_CHARS", 1024)
    message = refuse(write(tmp_path, "a.json", f'[{{"text": "one"}}]\n{more}'))
    assert "row 2: not valid JSON: more follows the end of the list" in message
    found = read_rows(write(tmp_path, "a.json", '[{"text": "one"}]' + " \r\n" * 2000), "auto")
    assert [row.text for row in found.rows] == ["one"]


def test_two_columns_of_one_name_are_refused(tmp_path):
    said = "has more than one column 'text'"
    assert said in refuse(write(tmp_path, "a.csv", "text,id, text\none,1,two\n"))
    found = read_rows(write(tmp_path, "a.csv", "text,,\none,,\n"), "auto")
    assert [row.text for row in found.rows] == ["one"]
    columns = [pa.array(["one"]), pa.array(["two"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text"] * 2), tmp_path / "a.parquet")
    assert said in refuse(tmp_path / "a.parquet")


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    found = read_rows(write(tmp_path, "a.jsonl", '{"text": "one\u2028two"}\n'), "auto")
    assert found.rows[0].text == "one\u2028two"


def test_a_csv_field_may_hold_line_breaks_and_what_follows_keeps_its_line(tmp_path):
    found = read_rows(write(tmp_path, "a.csv", 'text,id\n"one\ntwo",1\nthree\n'), "auto")
    assert [row.text for row in found.rows] == ["one\ntwo"]
    reason = "1 fields, but the first line names 2 columns"
    assert [(item.row, item.reason) for item in found.skipped] == [(4, reason)]


def test_a_csv_quote_that_never_ends_is_refused(tmp_path):
    assert "line 3: not valid CSV" in refuse(write(tmp_path, "a.csv", 'text\none\n"two\nthree\n'))


def test_empty_rows_are_left_out_and_named(tmp_path):
    lines = ['{"text": "one"}', "", '{"text": "  "}', '{"text": "two"}']
    found = read_rows(write(tmp_path, "a.jsonl", "\n".join(lines)), "auto")
    assert [row.number for row in found.rows] == [1, 4]
    assert [(item.row, item.reason) for item in found.skipped] == [
        (2, "the line is empty"),
        (3, "the text is empty"),
    ]


def test_a_chat_without_an_answer_is_left_out(tmp_path):
    rows = [CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, {"messages": []}]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert [item.row for item in read_rows(path, "chat").skipped] == [2, 3]


def test_a_table_of_tabs_with_one_column_may_hold_commas(tmp_path):
    found = read_rows(write(tmp_path, "a.tsv", "text\none, two; three\n"), "auto")
    assert [row.text for row in found.rows] == ["one, two; three"]


TOO_LONG = "not valid JSON: a number has too many digits"


def test_a_number_without_end_costs_its_row_in_our_words(tmp_path):
    row = '{"text": "two", "id": ' + "1" * 5000 + "}"
    path = write(tmp_path, "a.jsonl", f'{{"text": "one"}}\n{row}\n{{"text": "three"}}\n')
    found = read_rows(path, "auto")
    assert [row.number for row in found.rows] == [1, 3]
    assert [(item.row, item.reason, item.malformed) for item in found.skipped] == [
        (2, TOO_LONG, True)
    ]
    message = refuse(write(tmp_path, "a.json", f'[{{"text": "one"}}, {row}]'))
    assert message == f"{tmp_path / 'a.json'}, row 2: {TOO_LONG}."


def test_a_number_without_end_is_found_before_the_rest_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK_CHARS", 1 << 13)
    path = write(tmp_path, "a.json", "[" + "1" * 5000 + ', {"text": "one"}' * 10_000 + "]")
    reading = files.FileReading()
    with pytest.raises(ExpectedError, match=f"row 1: {TOO_LONG}"):
        list(files.read_file(path, reading))
    assert reading.done_bytes < path.stat().st_size / 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "two"', "not valid JSON: Expecting ',' delimiter at character 15"),
        ('["two"]', "expected an object {...}, found a list"),
        ('{"test": "two"}', "'text' is missing; the row has the keys ['test']"),
        ('{"text": 2}', "'text' should be a string, but is a number"),
        ('{"text": "\\ud800"}', "half a character"),
        ("[" * 100_000, "nested too deeply"),
        ("{'text': 'two'}", "not valid JSON"),
    ],
)
def test_a_broken_line_is_left_out_and_named_with_its_reason(tmp_path, line, reason):
    path = write(tmp_path, "a.jsonl", f'{{"text": "one"}}\n{line}\n{{"text": "three"}}\n')
    found = read_rows(path, "auto")
    assert [row.number for row in found.rows] == [1, 3]
    (skipped,) = found.skipped
    assert (skipped.row, skipped.malformed) == (2, True)
    assert reason in skipped.reason


@pytest.mark.parametrize(
    ("num_rows", "num_broken", "fine"),
    [(20, 10, True), (20, 11, False), (1000, 50, True), (1000, 51, False)],
)
def test_too_many_broken_rows_are_refused(tmp_path, num_rows, num_broken, fine):
    lines = ['{"text": "one"}'] * (num_rows - num_broken) + ["{"] * num_broken
    path = write(tmp_path, "a.jsonl", "\n".join(lines))
    if fine:
        found = read_rows(path, "auto")
        assert found.tally.num_malformed == num_broken
        assert len(found.skipped) == min(num_broken, 20)
        return
    message = refuse(path)
    assert f"{num_broken} of {num_rows} rows are malformed, the first in row " in message
    assert "not valid JSON" in message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "oracle", "content": "x"}, "message 2 has the role 'oracle'"),
        ({"content": "x"}, "message 2 has no role"),
        ({"role": "assistant", "content": "x\0"}, "'message 2' holds a NUL byte"),
        ({"role": "assistant", "content": None}, "message 2 has no text: 'content' is null"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "has a part without text"),
        ("hello", "message 2 should be an object, but is a string"),
    ],
)
def test_a_broken_message_is_named(tmp_path, message, reason):
    row = {"messages": [{"role": "user", "content": "Hi"}, message]}
    assert reason in refuse(write(tmp_path, "a.jsonl", json.dumps(row)), "chat")


def test_what_is_quoted_is_short(tmp_path):
    row = {"messages": [{"role": "x" * 300_000, "content": "c"}]}
    message = refuse(write(tmp_path, "a.jsonl", json.dumps(row)), "chat")
    assert f"message 1 has the role '{'x' * 40}...'; it must be one of" in message
    assert len(message) < 400
    keys = json.dumps({"k" * 300_000: 1, **{f"y{i:03}": i for i in range(500)}})
    for data_format in ("auto", "text", "chat"):
        message = refuse(write(tmp_path, "a.jsonl", keys), data_format)
        assert f"['{'k' * 40}...', 'y000', 'y001'," in message
        assert "'y018' and 481 more]" in message
        assert len(message) < 800


CALL = {"type": "function", "function": {"name": "sky", "arguments": "{}"}}
CALLS = "message 2 calls a tool, which is not trained"


@pytest.mark.parametrize(
    ("answer", "columns", "reason"),
    [
        ({"content": "", "tool_calls": [CALL]}, {}, CALLS),
        ({"content": "I look", "tool_calls": [CALL]}, {}, CALLS),
        ({"content": None, "tool_calls": [CALL]}, {}, CALLS),
        ({"tool_calls": [CALL]}, {}, CALLS),
        ({"content": "Blue", "tool_calls": json.dumps([CALL])}, {}, CALLS),
        ({"content": None, "function_call": CALL["function"]}, {}, CALLS),
        ({"content": "Blue", "function_calls": "sky()"}, {}, CALLS),
        ({"content": "Blue"}, {"tools": [CALL]}, "'tools' offers tools, which is not trained"),
        ({"content": "Blue"}, {"tools": json.dumps([CALL])}, "'tools' offers tools"),
        ({"content": "Blue"}, {"functions": [CALL]}, "'functions' offers tools"),
        ({"content": "Blue", "weight": 100.5}, {}, "message 2 has the weight 100.5"),
        ({"content": "Blue", "weight": -1}, {}, "message 2 has the weight -1"),
        ({"content": "Blue", "weight": "x" * 9999}, {}, f"the weight '{'x' * 39}"),
    ],
)
@pytest.mark.parametrize("shape", ["messages", "prompt", "chosen"])
def test_what_is_not_trained_costs_its_row_and_is_named(tmp_path, answer, columns, reason, shape):
    turns = [{"role": "user", "content": "Sky?"}, {"role": "assistant", **answer}]
    after = [{"role": "tool", "content": "blue"}, {"role": "assistant", "content": "Blue"}]
    rows = {
        "messages": {"messages": turns + after},
        "prompt": {"prompt": turns, "completion": after},
        "chosen": {"chosen": turns, "rejected": [turns[0], after[1]]},
    }
    path = write(tmp_path, "a.jsonl", json.dumps({**rows[shape], **columns}))
    objective = "dpo" if shape == "chosen" else "sft"
    tally = Tally(name="a")
    # Since version 3 of the rules, tools are trained.
    rules = 2 if columns or "weight" not in answer else 3
    reader = RowReader(find_files(path), DataSpec(train="-"), objective, tally, rules=rules)
    assert not list(reader)
    (skipped,) = tally.named
    assert reason in skipped.reason
    assert skipped.malformed


@pytest.mark.parametrize("nothing", [None, [], "", "[]", "null", {}])
def test_empty_calls_and_tools_and_a_weight_of_one_say_nothing(tmp_path, nothing):
    calls = {"tool_calls": nothing, "function_call": nothing}
    asked = {**CHAT["messages"][0], **calls, "weight": 0}  # a question is never learned
    for weight in (None, 1, 1.0):
        answer = {**CHAT["messages"][1], **calls, "weight": weight}
        row = {"messages": [asked, answer], "tools": nothing}
        found = read_rows(write(tmp_path, "a.jsonl", json.dumps(row)), "auto")
        assert [turn.content for turn in found.rows[0].turns] == ["Hi", "Ho"]


def test_text_that_names_tools_is_learned_all_the_same(tmp_path):
    row = {"text": "one", "tools": [CALL]}
    assert read_rows(write(tmp_path, "a.jsonl", json.dumps(row)), "auto").rows[0].text == "one"


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_bytes_that_are_no_text_cost_only_their_row(tmp_path, name):
    rows = {"a.jsonl": b'{"text": "one"}\n{"text": "\xff"}\n{"text": "three"}'}
    found = read_rows(write(tmp_path, name, rows.get(name, b"text\ntwo \xff\nthree")), "auto")
    assert [item.reason for item in found.skipped] == ["byte 0xff in 'text' is not UTF-8"]
    assert found.rows[-1].text == "three"


def test_utf_16_is_refused(tmp_path):
    assert "UTF-16" in refuse(write(tmp_path, "b.txt", "one".encode("utf-16")))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", gzip.compress(b'{"text": "one"}', mtime=0), "is compressed (gzip)."),
        ("a.csv.gz", gzip.compress(b"text", mtime=0), "is compressed (gzip)."),
        ("a.txt", bz2.compress(b"one"), "is compressed (bzip2)."),
        ("a.json", lzma.compress(b"[]"), "is compressed (xz)."),
        ("a.csv", b"PK\x03\x04\x14", "is compressed (zip)."),
        ("a.xlsx", b"PK\x03\x04\x14", "'.xlsx' is not a kind of data file"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04", "is compressed (zstd)."),
        ("a.txt", b"PAR1\x15\x04\x15\n", "is a Parquet file."),
        ("a.txt", b'\n{"text": "one"}\n', "its lines are rows of JSON."),
        ("a.md", json.dumps(CHAT).encode(), "its lines are rows of JSON."),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_files_that_are_not_what_their_name_says_are_refused(tmp_path, name, content, said):
    assert said in refuse(write(tmp_path, name, content))


def test_text_that_only_looks_like_json_is_learned(tmp_path):
    lines = ["{", "[1]", '{"a": 1}', '"text"', "{}"]
    found = read_rows(write(tmp_path, "a.txt", "\n".join(lines)), "auto")
    assert [row.text for row in found.rows] == lines
    found = read_rows(write(tmp_path, "a.txt", '{"text": "one"}'), "text")
    assert [row.text for row in found.rows] == ['{"text": "one"}']


def test_files_that_cannot_be_read_are_refused(tmp_path):
    assert "does not exist" in refuse(tmp_path / "none.jsonl")
    assert "not a complete Parquet file" in refuse(write(tmp_path, "a.parquet", b"PAR1"))
    assert "'.xlsx' is not a kind" in refuse(write(tmp_path, "a.xlsx", b"PK"))


def test_a_folder_is_read_in_the_order_of_its_names_and_names_the_file_of_a_bad_row(tmp_path):
    folder = tmp_path / "d"
    (folder / "deep").mkdir(parents=True)
    write(folder, "b.jsonl", '{"text": "three"}\n{"text": 4}\n')
    write(folder, "a.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    write(folder, "README.md", "about")
    write(folder, ".hidden.jsonl", "no")
    write(folder / "deep", "c.jsonl", '{"text": "five"}')
    found = read_rows(folder, "auto")
    assert [(row.number, row.text) for row in found.rows] == [
        (1, "one"),
        (2, "two"),
        (3, "three"),
        (5, "five"),
    ]
    assert [(item.file, item.row) for item in found.skipped] == [("b.jsonl", 2)]


def test_a_folder_of_nothing_or_of_several_kinds_is_refused(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    assert "holds no data file" in refuse(folder)
    write(folder, "a.jsonl", "")
    write(folder, "b.csv", "")
    assert "several kinds: 1 csv, 1 jsonl" in refuse(folder)


def test_data_that_is_named_like_a_note_is_read(tmp_path):
    folder = make_folder(tmp_path, ["license_cases.jsonl", "readme.jsonl", "rest.jsonl"])
    for name in ("README.md", "LICENSE.txt"):
        write(folder, name, "about")
    texts = [row.text for row in read_rows(folder, "auto").rows]
    assert texts == ["license_cases.jsonl", "readme.jsonl", "rest.jsonl"]


def test_a_compressed_file_of_a_folder_is_never_left_out_without_a_word(tmp_path):
    folder = make_folder(tmp_path, ["a.jsonl", "b.jsonl"])
    for name in ("a.jsonl.gz", ".b.jsonl.gz", "code.tar.gz", "README.md.gz", "state.json.gz"):
        write(folder, name, b"\x1f\x8b")
    assert len(read_rows(folder, "auto").rows) == 2
    write(folder, "C.JSONL.GZ", b"\x1f\x8b")
    assert f"{folder / 'C.JSONL.GZ'} is compressed and would be left out." in refuse(folder)


def test_a_link_into_a_hidden_folder_is_followed(tmp_path):
    folder = make_folder(tmp_path, [".versions/3/a.jsonl"])
    (folder / "now").symlink_to(Path(".versions", "3"))
    assert [row.text for row in read_rows(folder, "auto").rows] == [".versions/3/a.jsonl"]


def test_hidden_folders_are_not_looked_into(tmp_path, monkeypatch):
    """That of deleted files, on many drives, is another user's."""
    folder = make_folder(tmp_path, ["a.jsonl", ".Trash-0/b.jsonl", "deep/.hub/c.jsonl"])
    scan = os.scandir

    def refuse_hidden(path):
        if Path(path).name.startswith("."):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse_hidden)
    assert [row.text for row in read_rows(folder, "auto").rows] == ["a.jsonl"]


def test_folders_behind_links_are_read_once(tmp_path):
    folder = make_folder(tmp_path, ["a.jsonl", "deep/b.jsonl", ".kept/c.jsonl"])
    (folder / "more").symlink_to(folder / ".kept")
    (folder / "itself").symlink_to(folder)
    (folder / "above").symlink_to(tmp_path)
    (folder / "deep" / "again").symlink_to(folder / "deep")
    texts = [row.text for row in read_rows(folder, "auto").rows]
    assert texts == ["a.jsonl", "deep/b.jsonl", ".kept/c.jsonl"]


SPLITS = ("dev", "test", "train", "train-00001-of-00002", "validation")


def make_folder(tmp_path, names):
    folder = tmp_path / "d"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder, name, json.dumps({"text": name}))
    return folder


def test_of_a_folder_of_splits_only_the_training_files_are_read(tmp_path):
    folder = make_folder(tmp_path, [f"{name}.jsonl" for name in (*SPLITS, "more")])
    texts = [row.text for row in read_rows(folder, "auto").rows]
    assert texts == ["train-00001-of-00002.jsonl", "train.jsonl"]
    held_out = find_files(folder, held_out=True).paths
    assert [path.name for path in held_out] == ["dev.jsonl", "validation.jsonl"]


def test_files_that_are_held_out_may_be_of_another_kind(tmp_path):
    folder = make_folder(tmp_path, ["train/0.jsonl", "test/0.csv", "notes.txt"])
    assert find_files(folder).paths == (folder / "train" / "0.jsonl",)


@pytest.mark.parametrize(
    "names",
    [
        ["dev.jsonl", "test.jsonl"],
        ["more.jsonl", "train.jsonl"],
        ["latest.jsonl", "train.jsonl"],
        ["constraints.jsonl", "test.jsonl"],
    ],
)
def test_a_folder_without_both_sorts_of_files_is_read_whole(tmp_path, names):
    folder = make_folder(tmp_path, names)
    assert [row.text for row in read_rows(folder, "auto").rows] == names
    assert find_files(folder, held_out=True) == find_files(folder)


def test_parquet_is_read_and_only_the_columns_that_mean_something(tmp_path):
    columns = {
        "messages": [CHAT["messages"], None, CHAT["messages"]],
        "picture": [b"\xff\xd8", b"", b""],
        "score": [1.5, None, 2.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=1)
    found = read_rows(tmp_path / "a.parquet", "auto")
    assert found.format == "chat"
    assert [row.number for row in found.rows] == [1, 3]
    assert found.skipped[0].reason == "'messages' should be a list, but is null"


def test_a_byte_in_parquet_that_is_no_text_costs_its_row(tmp_path):
    texts = [f"row {i}".encode() for i in range(300)]
    texts[123] = texts[290] = b"ro\xff"
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    column = pa.StringArray.from_buffers(
        len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))
    )
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    found = read_rows(tmp_path / "a.parquet", "auto")
    assert len(found.rows) == 298
    assert found.rows[123].text == "row 124"
    assert [(item.row, item.reason) for item in found.skipped] == [
        (124, "byte 0xff is not UTF-8"),
        (291, "byte 0xff is not UTF-8"),
    ]


def test_of_a_large_row_group_only_a_part_is_in_memory(tmp_path, monkeypatch):
    # Unpacked at once it would not fit the memory of the process that reads it.
    monkeypatch.setattr(parquet_reader, "MEMORY_BYTES", 80 << 20)
    texts = [f"{i} " + "x" * 8000 for i in range(16_000)]
    table = pa.table({"text": texts})
    pq.write_table(table, tmp_path / "a.parquet", compression=None, use_dictionary=False)
    del table
    for number, value in files.read_file(tmp_path / "a.parquet"):
        assert value == {"text": texts[number - 1]}
    assert number == 16_000


def test_a_damaged_page_of_parquet_is_said(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one"] * 1000}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[10:40] = bytes(30)
    path.write_bytes(content)
    assert f"{path} is not a complete Parquet file: " in refuse(path)
    pq.write_table(pa.table({"text": ["one"], "other": ["two"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"other", b"oth\xab\xff"))
    assert f"{path} is not a complete Parquet file: " in refuse(path)


def test_parquet_without_a_known_column_is_refused(tmp_path):
    pq.write_table(pa.table({"picture": [b"x"]}), tmp_path / "a.parquet")
    assert "has no column to learn from; it has ['picture']" in refuse(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    assert "b.parquet is empty" in refuse(tmp_path / "b.parquet")


USER = {"role": "user", "content": "Hi"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
SYSTEM = {"role": "system", "content": "Be kind"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": GOOD, "rejected": "bad"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_pairs_of_every_shape_are_the_same(tmp_path, row):
    found = read_rows(write(tmp_path, "a.jsonl", json.dumps(row)), "auto", "dpo")
    assert found.format == "preference"
    (pair,) = found.rows
    assert [turn.content for turn in pair.turns] == ["Hi", "good"]
    assert [turn.content for turn in pair.rejected] == ["Hi", "bad"]
    assert pair.num_shared_turns == 1


@pytest.mark.parametrize(
    "row",
    [
        {"system": "Be kind", "prompt": "Hi", "chosen": "good", "rejected": "bad"},
        {"system": "Be kind", "prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"system": "Be kind", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Hi", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
        {"prompt": " Hi\n", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
        {"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]},
        {"system": "Be cruel", "prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]},
        {
            "system": "Be cruel",
            "prompt": "Hi ",
            "chosen": [SYSTEM, USER, GOOD],
            "rejected": [SYSTEM, USER, BAD],
        },
    ],
)
def test_neither_prompt_nor_system_turn_of_a_pair_is_doubled(tmp_path, row):
    (pair,) = read_rows(write(tmp_path, "a.jsonl", json.dumps(row)), "auto", "dpo").rows
    assert [turn.content for turn in pair.turns] == ["Be kind", "Hi", "good"]
    assert [turn.content for turn in pair.rejected] == ["Be kind", "Hi", "bad"]
    assert [turn.role for turn in pair.turns] == ["system", "user", "assistant"]
    assert pair.num_shared_turns == 2


def test_a_prompt_that_only_resembles_the_beginning_stays(tmp_path):
    row = {"prompt": "Hi", "chosen": "Hi", "rejected": [USER, BAD, USER]}
    (pair,) = read_rows(write(tmp_path, "a.jsonl", json.dumps(row)), "auto", "dpo").rows
    assert [turn.role for turn in pair.turns] == ["user", "assistant"]
    assert [turn.role for turn in pair.rejected] == ["user", "assistant", "user"]
    row = {"prompt": "Hi", "chosen": [SYSTEM, USER, GOOD], "rejected": "bad"}
    message = refuse(write(tmp_path, "a.jsonl", json.dumps(row)), objective="dpo")
    assert "row 1: 'chosen' and 'rejected' do not begin alike)" in message


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_system_text_beside_the_messages_begins_them(tmp_path, key):
    rows = [
        {key: [USER, GOOD], "system": "Be kind"},
        {key: [SYSTEM, USER, GOOD], "system": "Be cruel"},
        {key: [USER, GOOD], "system": ""},
    ]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for file in (path, tmp_path / "a.parquet"):
        found = [[turn.content for turn in row.turns] for row in read_rows(file, "auto").rows]
        assert found == [["Be kind", "Hi", "good"], ["Be kind", "Hi", "good"], ["Hi", "good"]]
    wrong = json.dumps({key: [USER, GOOD], "system": ["Be kind"]})
    assert "'system' should be a string, but is a list" in refuse(write(tmp_path, "b.jsonl", wrong))


MORE = {"role": "user", "content": "More"}


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"prompt": [USER], "completion": [GOOD]}, ["Hi", "good"]),
        ({"prompt": [SYSTEM, USER], "completion": GOOD}, ["Be kind", "Hi", "good"]),
        (
            {"prompt": [USER, BAD, MORE], "completion": [GOOD, MORE, GOOD]},
            ["Hi", "bad", "More", "good", "More", "good"],
        ),
        ({"prompt": [USER], "completion": "good", "system": "Be kind"}, ["Be kind", "Hi", "good"]),
        ({"prompt": [USER], "completion": [USER, GOOD]}, ["Hi", "good"]),
    ],
)
def test_a_prompt_and_a_completion_of_messages_are_one_conversation(tmp_path, row, contents):
    path = write(tmp_path, "a.jsonl", json.dumps(row))
    for data_format, name in (("auto", "chat"), ("chat", "chat"), ("alpaca", "alpaca")):
        found = read_rows(path, data_format)
        assert found.format == name
        assert [turn.content for turn in found.rows[0].turns] == contents
        assert (found.rows[0].rejected, found.rows[0].num_shared_turns) == ((), 0)
    rows = pa.Table.from_pylist([{"id": 1, **row}])
    pq.write_table(rows, tmp_path / "a.parquet")
    (read,) = read_rows(tmp_path / "a.parquet", "auto").rows
    assert [turn.content for turn in read.turns] == contents


def test_messages_of_a_prompt_are_read_from_csv_and_texts_stay_texts(tmp_path):
    fields = [json.dumps([USER]), json.dumps([GOOD]), json.dumps([{"role": "cook"}])]
    quoted = ['"' + field.replace('"', '""') + '"' for field in fields]
    lines = ["prompt,completion", f"{quoted[0]},{quoted[1]}", f"List them,{quoted[1]}"]
    lines += [f"{quoted[2]},{quoted[1]}"]
    found = read_rows(write(tmp_path, "a.csv", "\n".join(lines)), "auto")
    contents = [[turn.content for turn in row.turns] for row in found.rows]
    assert contents == [["Hi", "good"], ["List them", fields[1]], [fields[2], fields[1]]]


def test_a_completion_of_messages_without_an_answer_is_left_out(tmp_path):
    rows = [
        {"prompt": [USER], "completion": [GOOD]},
        {"prompt": [USER, BAD], "completion": []},
        {"prompt": [USER, BAD], "completion": [MORE]},
        {"prompt": "Hi", "completion": "Ho"},
    ]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    found = read_rows(path, "auto")
    assert [(item.row, item.reason) for item in found.skipped[:2]] == [
        (2, "'completion' has no answer of the assistant"),
        (3, "'completion' has no answer of the assistant"),
    ]
    assert found.skipped[2].reason.startswith("'messages' is missing; the row has the keys")


def test_pairs_that_teach_nothing_or_do_not_belong_together_are_left_out(tmp_path):
    rows = [
        {"prompt": "Hi", "chosen": "good", "rejected": "bad"},
        {"prompt": "Hi", "chosen": "good", "rejected": "good"},
        {"prompt": "Hi", "chosen": "good", "rejected": " "},
        {"chosen": [GOOD], "rejected": [BAD]},
    ]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    found = read_rows(path, "auto", "dpo")
    assert [(item.row, item.malformed) for item in found.skipped] == [
        (2, False),
        (3, False),
        (4, True),
    ]


def test_a_list_of_json_objects_is_read_as_a_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK_CHARS", 16)
    rows = [{"text": f"row {i} " + "[{]}" * i} for i in range(40)]
    for text in (json.dumps(rows), json.dumps(rows, indent=1), json.dumps(rows[0], indent=2)):
        found = read_rows(write(tmp_path, "a.json", text), "auto")
        assert [row.text for row in found.rows] == [row["text"] for row in rows][: len(found.rows)]
        assert len(found.rows) in (40, 1)
    assert "row 2: not valid JSON" in refuse(write(tmp_path, "a.json", '[{"text": "a"}, {"te'))
    assert "the list has no end" in refuse(write(tmp_path, "a.json", '[{"text": "a"}'))


@pytest.mark.parametrize("indent", [None, 2])
def test_rows_inside_of_an_object_are_read(tmp_path, indent):
    rows = [{"text": "one"}, {"text": ""}, {"text": "three"}]
    text = json.dumps({"version": [1, 2], "data": rows, "none": []}, indent=indent)
    found = read_rows(write(tmp_path, "a.json", text), "auto")
    assert [row.number for row in found.rows] == [1, 3]
    assert [item.row for item in found.skipped] == [2]
    two = json.dumps({"train": rows, "test": rows}, indent=indent)
    assert "'test', 'train'" in refuse(write(tmp_path, "a.json", two))
    chat = read_rows(write(tmp_path, "a.json", json.dumps(CHAT, indent=indent)), "auto")
    assert chat.format == "chat"
    assert len(chat.rows) == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_an_empty_file_is_refused(tmp_path, name):
    assert f"{name} is empty" in refuse(write(tmp_path, name, ""))


def test_a_file_of_empty_rows_is_refused(tmp_path):
    assert "a.jsonl is empty" in refuse(write(tmp_path, "a.jsonl", "\n\n"))
    message = refuse(write(tmp_path, "b.jsonl", '\n{"text": ""}\n'))
    assert "all 2 were left out (the first, row 1: the line is empty)" in message


def test_unknown_keys_and_preferences_are_refused(tmp_path):
    assert "have 'messages'" in refuse(write(tmp_path, "a.jsonl", '{"a": 1}'))
    row = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    assert "which need objective dpo" in refuse(write(tmp_path, "a.jsonl", row))
    path = write(tmp_path, "a.jsonl", '{"text": "a"}')
    assert "objective dpo needs preference rows" in refuse(path, objective="dpo")
