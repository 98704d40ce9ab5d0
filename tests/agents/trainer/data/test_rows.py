"""Data files: what is read, what is left out, and what ends the run before it begins."""

from __future__ import annotations

import json

import pytest

from agents.errors import UserError
from agents.trainer.data.conversations import Turn
from agents.trainer.data.rows import read_rows

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def refuse(path, data_format="auto"):
    with pytest.raises(UserError) as caught:
        read_rows(path, data_format)
    assert caught.value.hint
    return caught.value.message


def test_chat_lines_become_turns(tmp_path):
    found = read_rows(write(tmp_path, "a.jsonl", json.dumps(CHAT) + "\n"), "auto")
    assert found.format == "chat"
    turns = (Turn(role="user", content="Hi"), Turn(role="assistant", content="Ho"))
    assert found.rows[0].turns == turns


def test_sharegpt_names_and_text_parts_are_understood(tmp_path):
    row = {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": [{"type": "text", "text": "Ho"}]},
        ]
    }
    found = read_rows(write(tmp_path, "a.jsonl", json.dumps(row)), "auto")
    assert [turn.role for turn in found.rows[0].turns] == ["user", "assistant"]
    assert found.rows[0].turns[1].content == "Ho"


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
        ("a.txt", "one\ntwo\n"),
        ("a.data", '{"text": "one"}\n{"text": "two"}'),
    ],
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name, content):
    found = read_rows(write(tmp_path, name, content), "auto")
    assert [row.text for row in found.rows] == ["one", "two"]


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    found = read_rows(write(tmp_path, "a.jsonl", '{"text": "one\u2028two"}\n'), "auto")
    assert found.rows[0].text == "one\u2028two"


def test_a_csv_field_may_hold_line_breaks_and_the_error_after_it_its_line(tmp_path):
    path = write(tmp_path, "a.csv", 'text,id\n"one\ntwo",1\nthree\n')
    assert "line 4: 1 fields, but the first line names 2 columns" in refuse(path)


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
def test_a_broken_line_is_named_with_its_reason(tmp_path, line, reason):
    path = write(tmp_path, "a.jsonl", f'{{"text": "one"}}\n{line}\n{{"text": "three"}}\n')
    message = refuse(path)
    assert f"{path}, line 2: " in message
    assert reason in message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "oracle", "content": "x"}, "message 2 has the role 'oracle'"),
        ({"role": "assistant", "content": None}, "message 2 has no text: 'content' is null"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "has a part without text"),
        ("hello", "message 2 should be an object, but is a string"),
    ],
)
def test_a_broken_message_is_named(tmp_path, message, reason):
    row = {"messages": [{"role": "user", "content": "Hi"}, message]}
    assert reason in refuse(write(tmp_path, "a.jsonl", json.dumps(row)), "chat")


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    path = write(tmp_path, "a.txt", b"one\ntwo \xff\nthree")
    assert "line 2: byte 0xff is not UTF-8" in refuse(path)
    path = write(tmp_path, "b.txt", "one".encode("utf-16"))
    assert "UTF-16" in refuse(path)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    assert "does not exist" in refuse(tmp_path / "none.jsonl")
    assert "is a folder" in refuse(tmp_path)
    assert "Parquet" in refuse(write(tmp_path, "a.parquet", b"PAR1"))
    assert "'.xlsx' is not a kind" in refuse(write(tmp_path, "a.xlsx", b"PK"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_an_empty_file_is_refused(tmp_path, name):
    assert f"{name} is empty" in refuse(write(tmp_path, name, ""))


def test_a_file_of_empty_rows_is_refused(tmp_path):
    message = refuse(write(tmp_path, "a.jsonl", "\n\n"))
    assert "all 2 were left out (the first, row 1: the line is empty)" in message


def test_unknown_keys_and_preferences_are_refused(tmp_path):
    assert "have 'messages'" in refuse(write(tmp_path, "a.jsonl", '{"a": 1}'))
    row = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    assert "objective dpo" in refuse(write(tmp_path, "a.jsonl", row))
