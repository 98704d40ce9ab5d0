"""Rows with other columns, other shapes and marks are read as their authors mean them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.conversations import ConversationRow, read_row
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import TEXT_RULES, tokenize_rows
from app.errors import UserError
from app.library.data import check_form
from tests.fakes.site import DEMO

QA = [("q1", "a1"), ("q2", "a2")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO / "model")[0]


def write(folder: Path, rows: Any, name: str = "a.jsonl") -> Path:
    path = folder / name
    is_lines = path.suffix == ".jsonl"
    lines = "".join(json.dumps(row) + "\n" for row in rows) if is_lines else json.dumps(rows)
    path.write_text(lines)
    return path


def read(path: Path, objective: str = "sft", **options: Any) -> tuple[list[ConversationRow], Tally]:
    tally = Tally(name=path.name)
    rules = options.pop("rules", TEXT_RULES)
    data = DataSpec(train="-", **options)
    return list(RowReader(find_files(path), data, objective, tally, rules=rules)), tally


def turns_of(row: ConversationRow) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in row.turns]


def learned(tokenizer: Any, row: ConversationRow) -> str:
    (found,) = tokenize_rows(tokenizer, [row], 512)
    assert not isinstance(found, Skipped), found
    segment = found.segments[0]
    return tokenizer.decode(segment.ids[segment.is_target])


def ask(*answers: Any) -> dict[str, Any]:
    """Return a conversation with these answers; a question has the mark of its answer, too."""
    messages = []
    for answer in answers:
        marks = {key: value for key, value in answer.items() if key != "content"}
        messages += [{"role": "user", "content": "q", **marks}, {"role": "assistant", **answer}]
    return {"messages": messages}


# --------------------------------------------------------------------------- marks


@pytest.mark.parametrize(
    "mark",
    [
        {"train": False}, {"train": "no"}, {"weight": 0}, {"weight": "0.0"}, {"loss_weight": 0.0},
        {"loss": False}, {"masked": True}, {"mask": 1}, {"no_train": "yes"},
    ],
)  # fmt: skip
def test_a_marked_answer_is_not_learned_and_the_row_is_kept(tmp_path, tokenizer, mark):
    path = write(tmp_path, [ask({"content": "wrong", **mark}, {"content": "right"})])
    (row,), _ = read(path)
    assert learned(tokenizer, row) == "right<|end|>"
    check_form(path, data=DataSpec(train=str(path)))


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([("wrong", {"train": False}), (" right", {})], " right<|end|>"),
        ([("right", {}), (" wrong", {"weight": 0})], "right"),
        ([("one", {}), (" wrong", {"loss": False}), (" two", {})], "one two<|end|>"),
        ([("  wrong", {"masked": True}), (" right  ", {"train": True})], " right  <|end|>"),
    ],
)
def test_a_marked_part_is_not_learned(tmp_path, tokenizer, parts, wanted):
    content = [{"type": "text", "text": text, **mark} for text, mark in parts]
    (row,), _ = read(write(tmp_path, [ask({"content": content})]))
    assert learned(tokenizer, row) == wanted


def test_marked_offsets_are_not_learned(tmp_path, tokenizer):
    details = [
        {"begin_offset": 4, "end_offset": 9, "train": False},
        {"begin_offset": 10, "end_offset": 14, "train": True},
    ]
    answer = {"from": "gpt", "value": "one wrong two", "train_detail": details}
    (row,), _ = read(
        write(tmp_path, [{"conversations": [{"from": "human", "value": "q"}, answer]}])
    )
    assert "wrong" not in learned(tokenizer, row)
    assert learned(tokenizer, row).startswith("one")


@given(st.lists(st.tuples(st.sampled_from(["aa ", "bb ", " cc", "d"]), st.booleans()), min_size=1))
def test_no_token_of_a_masked_part_is_learned(parts):
    tokenizer = load_tokenizer(DEMO / "model")[0]
    content = [{"text": text, "train": is_learned} for text, is_learned in parts]
    if not any(text.strip() and is_learned for text, is_learned in parts):
        return
    row = read_row(1, ask({"content": content}), "chat")
    if isinstance(row, str):
        return
    (found,) = tokenize_rows(tokenizer, [row], 512)
    if isinstance(found, Skipped):
        return
    segment = found.segments[0]
    said = tokenizer.decode(segment.ids[segment.is_target]).replace("<|end|>", "")
    wanted = "".join(text for text, is_learned in parts if is_learned)
    # A token that spans a mark is left out, so fewer characters may be learned, never more.
    rest = iter(wanted)
    assert all(character in rest for character in said)


def test_an_answer_that_is_masked_as_a_whole_leaves_nothing_to_learn(tmp_path):
    rows, tally = read(write(tmp_path, [ask({"content": "a", "train": False})]))
    assert not rows
    assert "no answer" in tally.named[0].reason


def test_runs_that_began_before_keep_their_rows(tmp_path):
    weighted = ask({"content": "wrong", "weight": 0}, {"content": "right"})
    marked = ask({"content": [{"text": "a", "train": False}, {"text": "b"}]})
    rows, tally = read(write(tmp_path, [weighted, marked]), rules=2)
    assert tally.num_malformed == 1
    assert rows[0].turns[1].masked == ()


# --------------------------------------------------------------------------- shapes


def messages(pairs: Any, role: str = "role", text: str = "content") -> list[dict[str, str]]:
    names = {"role": ("user", "assistant"), "from": ("human", "gpt")}[role]
    return [{role: names[i], text: pair[i]} for pair in pairs for i in (0, 1)]


WANTED = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]


@pytest.mark.parametrize(
    "row",
    [
        {"id": 1, "conversation": messages(QA)},
        {"items": messages(QA, "from", "value"), "doc": "story"},
        {"conversation": [{"instruction": q, "output": a} for q, a in QA]},
        {"turns": [{"question": q, "answer": a} for q, a in QA]},
        {"dialogue": [{"User": q, "Assistant": a} for q, a in QA]},
        {"messages": [{"prompt": q, "response": a} for q, a in QA]},
        {"instruction": "q2", "output": "a2", "history": [["q1", "a1"]]},
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_conversation_is_one_row_under_any_name(tmp_path, row, name):
    path = write(tmp_path, [row, row], name)
    rows, _ = read(path)
    assert [turns_of(one) for one in rows] == [WANTED, WANTED]
    check_form(path, data=DataSpec(train=str(path)))


def test_only_an_object_around_the_whole_file_is_unfolded(tmp_path):
    inside = [{"instruction": q, "output": a} for q, a in QA]
    rows, _ = read(write(tmp_path, {"version": 1, "data": inside}, "a.json"))
    assert len(rows) == 2
    path = write(tmp_path, [{"id": 1, "parts": inside}], "b.json")
    assert not read(path)[0]
    with pytest.raises(UserError, match="no usable row"):
        check_form(path, data=DataSpec(train=str(path)))


@pytest.mark.parametrize(
    "row", [{"id": 1, "candidates": [{"text": "good", "score": 1}, {"text": "BAD", "score": 0}]}]
)
def test_candidates_are_no_rows(tmp_path, row):
    assert not read(write(tmp_path, [row, row], "a.json"))[0]


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "q", "chosen_response": "g", "rejected_response": "b"}, "q", "g", "b"),
        ({"prompt": "q", "accepted": "g", "rejected": "b"}, "q", "g", "b"),
        ({"instruction": "q", "input": "i", "chosen": "g", "rejected": "b"}, "q\n\ni", "g", "b"),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: g", "rejected": "\n\nHuman: q\n\nAssistant: b"},
            "q", "g", "b",
        ),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "g"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            "q", "g", "b",
        ),
    ],
)  # fmt: skip
def test_pairs_are_found_with_their_prompt(tmp_path, row, prompt, chosen, rejected):
    path = write(tmp_path, [row])
    (found,), _ = read(path, "dpo")
    assert turns_of(found) == [("user", prompt), ("assistant", chosen)]
    assert found.rejected[-1].content == rejected
    assert found.num_shared_turns == 1
    check_form(path, data=DataSpec(train=str(path)))


# --------------------------------------------------------------------------- mappings


@pytest.mark.parametrize(
    ("row", "offer"),
    [
        ({"input": "q1", "output": "a1"}, "instruction=input, output=output"),
        ({"INSTRUCTION": "q1", "RESPONSE": "a1"}, "instruction=INSTRUCTION, output=RESPONSE"),
        ({"message_1": "q1", "message_2": "a1"}, "instruction=message_1, output=message_2"),
        ({"article": "q1", "highlights": "a1"}, "instruction=article, output=highlights"),
        (
            {"translation": {"en": "q1", "de": "a1"}},
            "instruction=translation.en, output=translation.de",
        ),
        (["q1", "a1"], "instruction=0, output=1"),
        ({"dialog": ["q1", "a1"]}, "messages=dialog"),
        ({"id": "0", "data": ["q1", "a1", "q", "b"]}, "messages=data"),
    ],
)  # fmt: skip
def test_the_offered_mapping_reads_the_rows(tmp_path, row, offer):
    path = write(tmp_path, [row])
    with pytest.raises(UserError) as refused:
        check_form(path, data=DataSpec(train=str(path)))
    assert f"data.columns: [{offer}]" in (refused.value.hint or "")
    rows, tally = read(path)
    with pytest.raises(ExpectedError) as unusable:
        tally.check_usable(len(rows))
    assert f"data.columns: [{offer}]" in (unusable.value.hint or "")
    columns = tuple(offer.split(", "))
    (found,), _ = read(path, columns=columns)
    assert turns_of(found)[:2] == [("user", "q1"), ("assistant", "a1")]
    check_form(path, data=DataSpec(train=str(path), columns=columns))


def test_a_role_of_the_data_is_mapped(tmp_path):
    row = {"messages": [{"role": "customer", "content": "q1"}, {"role": "bing", "content": "a1"}]}
    columns = ("roles.user=customer", "roles.assistant=bing")
    (found,), _ = read(write(tmp_path, [row]), columns=columns)
    assert turns_of(found) == [("user", "q1"), ("assistant", "a1")]


def test_developer_is_system_and_parts_have_a_value(tmp_path):
    row = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "value": "s"}]},
            *messages(QA[:1]),
        ]
    }
    (found,), _ = read(write(tmp_path, [row]))
    assert turns_of(found)[0] == ("system", "s")
