"""Layouts of public data sets: what is harmless passes calmly, what is not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.contract.data import DataFinding
from agents.contract.spec import DataSpec
from agents.shared.data.findings import MAX_COLUMNS
from app.errors import UserError
from app.library.data import check_form
from app.library.data_judge import RowJudge

ASKED, ANSWERED = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Oren."}
CHAT = {"messages": [ASKED, ANSWERED]}
QA = {"prompt": "Who?", "completion": "Oren."}
PAIR = {"prompt": "Who?", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, {**ANSWERED}]}
TEXT = {"text": "Brenford lies at the river."}


def judge(*rows: dict[str, Any]) -> tuple[DataFinding, ...]:
    judged = RowJudge(DataSpec(train="-"))
    judged.begin(Path("a.jsonl"))
    for row in rows:
        judged.add(row)
    return judged.find()


def gravest(*rows: dict[str, Any]) -> str:
    return next((one.consequence for one in judge(*rows)), "nothing")


HARMLESS: dict[str, dict[str, Any]] = {
    "ultrafeedback": {
        **PAIR,
        "messages": [ASKED, ANSWERED],
        "score_chosen": 8,
        "score_rejected": 5,
    },
    "orca pairs": {**PAIR, "rating": [9.0, 8.0], "in_gsm8k_train": False, "chosen_score": 9.0},
    "magpie": {
        **CHAT,
        "quality_explanation": "Clear.",
        "reward_model": "org/RM",
        "repeat_count": 1,
    },
    "reasoning switch": {**CHAT, "reasoning": "off", "is_reasoning_complete": [True]},
    "place in a split": {**QA, "train_idx": 5, "train_id": 7},
    "weights of things": {**QA, "molecular_weight": 18.0, "weight_kg": 70.5},
    "loss when it was made": {**QA, "training_loss": 1.7},
    "tokens of another model": {**TEXT, "input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]},
    "topics": {**TEXT, "label": 3},
    "topic 0 of many": {**TEXT, "label": 0},
    "recorded text": {**TEXT, "path": "clips/1.wav"},
    "face of the writer": {**CHAT, "avatar": "faces/1.png"},
    "all verified": {**CHAT, "correctness": True},
}


@pytest.mark.parametrize("layout", sorted(HARMLESS))
def test_an_ordinary_public_layout_passes_with_its_columns_listed(layout: str) -> None:
    row = HARMLESS[layout]
    others = [{**TEXT, "label": 7}] if "label" in row else []
    assert gravest(row, *others) == "note"


NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "bad answer of a chat": (
        {"messages": [ASKED, {**ANSWERED, "feedback": "thumbs_down"}]},
        "refuse",
    ),
    "bad label of an answer": ({"messages": [ASKED, {**ANSWERED, "label": "bad"}]}, "refuse"),
    "stars of an answer": ({"messages": [ASKED, {**ANSWERED, "rating": 1}]}, "warn"),
    "weight of an answer": ({"messages": [ASKED, {**ANSWERED, "weight": 0.5}]}, "note"),
    "huge weight of an answer": ({"messages": [ASKED, {**ANSWERED, "weight": 101}]}, "refuse"),
    "weight in a pair": (
        {
            "prompt": [ASKED],
            "chosen": [{**ANSWERED, "weight": 0.5}],
            "rejected": [{**ANSWERED, "content": "no"}],
        },
        "refuse",
    ),
    "offered tools by another name": ({**CHAT, "available_tools": [{"name": "f"}]}, "refuse"),
    "picture in a question": (
        {"messages": [{**ASKED, "content": [{"type": "image_url", "image_url": "x"}]}, ANSWERED]},
        "warn",
    ),
    "candidates, some wrong": ({**CHAT, "correctness_math_verify": [True, False]}, "warn"),
    "candidates, all wrong": ({**CHAT, "correctness_math_verify": [False, False]}, "refuse"),
    "picture beside a text": ({**TEXT, "image": "coco/1.jpg"}, "warn"),
    "picture in a text's row": ({**TEXT, "image": {"bytes": "AA", "path": None}}, "refuse"),
    "flag for training": ({**QA, "use_for_training": False}, "refuse"),
    "weight of a sample": ({**QA, "sample_weight": 0.2}, "refuse"),
}


@pytest.mark.parametrize("layout", sorted(NAMED))
def test_what_changes_the_meaning_is_named_by_a_plan(layout: str) -> None:
    row, consequence = NAMED[layout]
    assert gravest(row) == consequence


def test_a_column_is_listed_once_with_its_gravest_meaning() -> None:
    found = judge({**CHAT, "split": "train"}, {**CHAT, "split": "test"})
    assert [(one.column, one.consequence, one.count) for one in found] == [("split", "warn", 1)]


def test_many_columns_do_not_hide_the_one_that_means_something() -> None:
    junk = {f"c{number}": 1 for number in range(MAX_COLUMNS + 50)}
    assert gravest({**QA, **junk}, {**QA, "label": False}) == "refuse"


def test_rows_without_a_known_form_are_refused_on_this_pc(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"human": "Who?", "bot": "Oren."}) + "\n")
    with pytest.raises(UserError, match="no usable row: row 1: the row has the keys"):
        check_form(path, data=DataSpec(train=str(path)))
