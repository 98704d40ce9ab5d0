"""Prompts and answers are kept per project, the newest answers first, and not without end."""

from __future__ import annotations

from pathlib import Path

from agents.contract.requests.chats import ChatAnswer
from app.conversation import AnswerComparison, Compared, Project, to_markdown
from app.storage.database import open_database
from app.storage.prompts import MAX_COMPARISONS, PromptStore

PROJECT = Project(base="org/model", data="chats.jsonl")
ANSWER = ChatAnswer(
    text="By a miller.\nIn 1810.",
    num_tokens=9,
    first_token_s=0.04,
    tokens_per_s=51.0,
    runtime="x",
    cut=False,
)


def make_comparison(time_s: float) -> AnswerComparison:
    models = (
        Compared(title="poems, base, on alpha", answers=(None, ANSWER)),
        Compared(title="poems Q8_0, on beta", answers=(ANSWER, ANSWER)),
    )
    return AnswerComparison(
        time_s=time_s, prompts=("Who?", "When?"), models=models, system="Be short"
    )


def test_prompts_are_those_of_the_project(tmp_path: Path) -> None:
    store = PromptStore(open_database(tmp_path / "store.sqlite3"))
    assert store.prompts(PROJECT) == ()
    store.save_prompts(PROJECT, ("one", "two"))
    store.save_prompts(PROJECT, ("two",))
    assert store.prompts(PROJECT) == ("two",)
    assert store.prompts(Project(base="org/model", data="other")) == ()


def test_answers_are_kept_newest_first(tmp_path: Path) -> None:
    store = PromptStore(open_database(tmp_path / "store.sqlite3"))
    for time_s in range(MAX_COMPARISONS + 2):
        store.add_comparison(PROJECT, make_comparison(float(time_s)))
    found = store.comparisons(PROJECT)
    assert len(found) == MAX_COMPARISONS
    assert found[0] == make_comparison(MAX_COMPARISONS + 1.0)


def test_they_read_as_a_document() -> None:
    text = to_markdown(PROJECT, make_comparison(0.0))
    assert "- System prompt: Be short" in text
    assert "## 1. Who?\n\n**poems, base, on alpha**\n\nNo answer.\n" in text
    assert "> By a miller.\n> In 1810.\n\n_51.0 tokens/s, first after 40 ms, 9 tokens_\n" in text
