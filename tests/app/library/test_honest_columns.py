"""Columns about a row are listed, those that hold a part of it are refused, by their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import DataSpec
from app.library.data import check_form
from tests.agents.shared.data.test_findings import ANSWERED, ASKED, judge

ALPACA = {"instruction": "Who founded Brenford?", "input": "", "output": "Oren Dale."}
ROWS: dict[str, dict[str, Any]] = {
    "alpaca": ALPACA,
    "chat": {"messages": [ASKED, ANSWERED]},
    "text": {"text": "Brenford lies at the river."},
    "preference": {"prompt": "Who?", "chosen": "Oren.", "rejected": "Nobody."},
}
# Column: values that are no part of what is learned.
HONEST: dict[str, tuple[Any, ...]] = {
    "document_id": (17, "17", "doc-17", "D00017", "9f86d081884c7d659a2feaa0c55ad015"),
    "article_id": (1, "nyt://article/1d2e", "en.wikipedia/Brenford"),
    "story_id": (0, "story_0", "story 12"),
    "context_id": ("3f2b8c1e-54a7-4d0e-9b7a-2f0c8d9e1a11",),
    "passage_ids": ([3, 14], ["p-3", "p-14"]),
    "prompt_id": ("f0e37e9f7800261167ce91143f98f511f768847236f133f2d0aed60b444ebe57",),
    "question_id": (81, "q_81"),
    "answer_id": (81, "a_81"),
    "source_id": ("oasst-2", 5),
    "conversation_id": ("c-99",),
    "dialogue_id": (4, "PMUL0698.json"),
    "history_id": ("h/4",),
    "system_id": (2,),
    "tool_id": ("tool-7",),
    "label_id": (0, 1),
    "review_id": (0, "R2RGDEKBAO2ZK8"),
    "uuid": ("3f2b8c1e-54a7-4d0e-9b7a-2f0c8d9e1a11",),
    "hash": ("sha256:9f86d081884c7d65",),
    "md5": ("d41d8cd98f00b204e9800998ecf8427e",),
    "context_length": (512, "512", 512.0),
    "context_tokens": (512,),
    "context_window": (4096,),
    "document_length": (9001,),
    "story_words": (120,),
    "passage_index": (0, 3),
    "paragraph_number": ("7",),
    "num_turns": (2, 0),
    "num_documents": (3, 0),
    "numChoices": (4,),
    "n_options": (4,),
    "history_length": (0, 3),
    "votes_count": (0,),
    "vote_count": (0, 1),
    "num_votes": (0, 1),
    "good_count": (0,),
    "pass_rate": (0.0, 0.5, 1),
    "score_model": ("org/judge-8b",),
    "difficulty": (3, "hard"),
    "doc_url": ("https://a.example/doc/1?page=2#top", "http://a.example"),
    "document_url": ("https://a.example/doc/1",),
    "context_url": ("www.a.example/1",),
    "article": ("https://a.example/article/1", "A-1234"),
    "story": ("s3://stories/17.txt",),
    "document": ("reports/2023/annual.pdf", "Annual report 2023.pdf", "C:\\docs\\a.docx", 17),
    "background": ("#ffffff",),
    "context": (
        17,
        0.5,
        True,
        "none",
        "N/A",
        "-",
        "1,024",
        "en",
        "pt-BR",
        "2024-05-01",
        "ctx_17",
        ["d-1", "d-2"],
    ),
    "passage": ("2024-05-01T12:30:00Z", "2024-05-01 12:30:00.123+00:00", "2024/5/1"),
    "knowledge": ("May 1st, 2024", "1 May 2024", "Wed, 01 May 2024 12:30:00 GMT"),
    "knowledge_cutoff": ("2023-10",),
    "created_at": ("2024-05-01", 1714521600, "Wed May  1 12:30:00 2024"),
    "accepted_at": ("2024-05-01", 0),
    "document_date": ("1 May 2024",),
    "article_date": ("yesterday evening",),
    "story_year": (1899,),
    "time": ("12:30", "12:30:05 PM"),
    "lang": ("en", "eng", "zh_Hans"),
    "language": ("English",),
    "context_language": ("Brazilian Portuguese",),
    "document_title": ("The founding of Brenford",),
    "article_title": ("How Oren Dale founded a town: a story",),
    "story_genre": ("crime fiction",),
    "dialogue_topic": ("ordering a pizza",),
    "context_type": ("long form",),
    "document_type": ("annual report",),
    "background_color": ("light grey",),
    "reasoning_effort": ("high",),
    "reasoning": (False, "off"),
    "operating_system": ("Debian 12",),
    "file_name": ("rows.jsonl", "My notes.txt"),
    "path": ("data/train/0001.parquet",),
    "email": ("a.dale@a.example",),
    "model": ("org/model-7b",),
    "license": ("CC BY 4.0",),
    "author": ("Oren Dale",),
    "category": ("closed_qa",),
    "tags": (["history", "towns"],),
    "metadata": ({"id": 5, "url": "https://a.example", "title": "The founding"},),
    "molecular_weight": (18.0,),
    "package_weight": (2.5,),
    "weight_kg": (70,),
    "attention_mask": ([1, 1, 0],),
    "train_loss": (1.7,),
}


@pytest.mark.parametrize("form", sorted(ROWS))
@pytest.mark.parametrize("column", sorted(HONEST))
def test_a_column_about_a_row_is_listed_as_not_used(form: str, column: str) -> None:
    for value in HONEST[column]:
        (found,) = judge({**ROWS[form], column: value})
        assert (found.kind, found.consequence) == ("unknown", "note"), value


@pytest.mark.parametrize(
    ("column", "value"),
    [("document_id", 17), ("article_id", "A-17"), ("story_id", "17"), ("context_length", 512)],
)
def test_a_file_with_such_a_column_is_usable(tmp_path: Path, column: str, value: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({**ALPACA, column: value}) + "\n" for _ in range(60)))
    check_form(path, data=DataSpec(train=str(path)))


PROSE = "Brenford was founded by Oren Dale in 1899."
HELD: dict[str, tuple[Any, ...]] = {
    "context": (PROSE, "Brenford", "c1", [PROSE], {"title": "Brenford", "text": PROSE}),
    "contexts": ([PROSE, PROSE], json.dumps([PROSE])),
    "document": (PROSE, "<p>Brenford</p>", {"id": 5, "text": PROSE}),
    "documents": ([{"id": 5, "text": PROSE}],),
    "source_document": (PROSE,),
    "document_text": (PROSE,),
    "document_excerpt": (PROSE,),
    "passage": (PROSE, "\u5e03\u4f26\u798f\u5fb7"),
    "context_description": (PROSE,),
    "retrieved_passages": ([PROSE],),
    "article": (PROSE,),
    "articleBody": (PROSE,),
    "story": (PROSE, "On 2024-05-01 it rained."),
    "background": (PROSE,),
    "knowledge": (PROSE,),
    "premise": (PROSE, "3*x+2=11"),
    "choices": (
        ["Ann", "Oren"],
        ["yes", "no"],
        ["12", "14"],
        [3, 5],
        {"A": 3, "B": 5},
        "A) 1 B) 2",
    ),
    "options": ({"A": "Ann", "B": "Oren"},),
    "question": ("And who lives there?",),
}
CHANGED: dict[str, tuple[Any, ...]] = {
    "history": ("Ann asked who founded it.", ["Hi"]),
    "previous_messages": ([ASKED], json.dumps([ASKED])),
    "system_prompt": ("Answer as a pirate.", "s"),
    "available_tools": ([{"name": "f"}], ["web_search"], '[{"name": "f"}]'),
    "function_call": ({"name": "f", "arguments": "{}"},),
    "image": ("coco/1.jpg", "COCO_17", "https://a.example/1.png", {"bytes": "AA", "path": None}),
    "image_url": ("https://a.example/1.png",),
    "label": (False, 0, "bad"),
    "is_correct": (False, "no"),
    "feedback_type": ("thumbs_down",),
    "weight": (0, 0.5, "0"),
    "loss": (False, 0),
    "no_train": (True,),
    "domain_weight": (0.3,),
}


@pytest.mark.parametrize("form", ["alpaca", "preference"])
@pytest.mark.parametrize("column", sorted(HELD))
def test_a_column_that_holds_what_is_asked_about_is_refused(form: str, column: str) -> None:
    for value in HELD[column]:
        (found,) = judge({**ROWS[form], column: value})
        assert (found.column, found.consequence) == (column, "refuse"), value


@pytest.mark.parametrize("form", ["alpaca", "chat", "preference"])
@pytest.mark.parametrize("column", sorted(CHANGED))
def test_a_column_that_changes_what_a_row_means_is_refused(form: str, column: str) -> None:
    for value in CHANGED[column]:
        (found,) = judge({**ROWS[form], column: value})
        assert (found.column, found.consequence) == (column, "refuse"), value


def test_a_text_among_identifiers_decides() -> None:
    (found,) = judge({**ALPACA, "context": "c-1"}, {**ALPACA, "context": PROSE})
    assert (found.consequence, found.count, found.row) == ("refuse", 1, 2)


def test_one_word_of_a_longer_name_is_named_only() -> None:
    (found,) = judge({**ALPACA, "context_window": "small"})
    assert (found.kind, found.consequence) == ("context", "warn")


@pytest.mark.parametrize(
    ("column", "value"),
    [("image_id", "COCO_17"), ("video_url", "https://a.example/watch?v=1"), ("image_width", 512)],
)
def test_what_is_said_about_a_picture_is_named_only(column: str, value: Any) -> None:
    (found,) = judge({**ALPACA, column: value})
    assert (found.kind, found.consequence) == ("media", "warn")


@pytest.mark.parametrize(
    ("mark", "kind", "consequence"),
    [
        ({"train": 0.5}, "weighted", "note"),
        ({"feedback": "bad"}, "verdict", "refuse"),
        ({"liked": False}, "verdict", "refuse"),
    ],
)
def test_a_mark_on_a_question_does_not_hide_the_one_on_an_answer(
    mark: dict[str, Any], kind: str, consequence: str
) -> None:
    (found,) = judge({"messages": [{**ASKED, **mark}, {**ANSWERED, **mark}]})
    assert (found.kind, found.consequence, found.count) == (kind, consequence, 1)
