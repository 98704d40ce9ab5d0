"""Texts from frames are those that the whole search for answers gives, for every template."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from agents.trainer.data import frames as source
from agents.trainer.data.answers import render_answers
from agents.trainer.data.conversations import ConversationTurn
from agents.trainer.data.frames import NUM_CHECKED, Frames
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.data.test_matrix import TEMPLATES, load

WORDS = (
    "Hi", "market", "valley", "/no_think", "<think>\nhm\n</think>\n\nYes.", "user",
    "\u6f22\U0001f600",
    " spaced ", "{{ x }}", "two\n\nlines", "<|im_end|>", "Qz1zQ", "tool",
)  # fmt: skip


def talk(draw, num_turns, *, ruled):
    roles = ["system"] * ruled + ["user", "assistant"] * num_turns
    return tuple(
        ConversationTurn(role=role, content=" ".join(draw.choices(WORDS, k=draw.randint(1, 3))))
        for role in roles[:num_turns]
    )


@pytest.mark.parametrize("learn", ["answers", "last_answer", "everything"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_frames_find_what_the_whole_search_finds(name, learn):
    tokenizer, draw = load(name), random.Random(7)
    frames = Frames(tokenizer, 3, learn)
    for number in range(40):
        turns = talk(draw, 2 + number % 4, ruled=number % 3 == 0)
        shared = number % 2
        try:
            expected = render_answers(tokenizer, turns, shared, 3, learn)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)[:20]):
                frames.render(turns, shared, is_pair=False)
            continue
        assert frames.render(turns, shared, is_pair=False) == expected


def count_searches(monkeypatch, tokenizer, rows):
    calls = []

    def search(*given):
        calls.append(given)
        return render_answers(*given)

    monkeypatch.setattr(source, "render_answers", search)
    frames = Frames(tokenizer, 3, "answers")
    for turns in rows:
        frames.render(turns, 0, is_pair=False)
    return len(calls)


def make_rows(count, **changes):
    turns = [
        ConversationTurn(role="user", content="Hi"),
        ConversationTurn(role="assistant", content="Yes."),
    ]
    return [
        tuple(replace(turn, content=f"{turn.content} {row}", **changes) for turn in turns)
        for row in range(count)
    ]


def test_rows_of_one_form_are_searched_a_few_times(monkeypatch):
    # Once more with stand-ins.
    assert count_searches(monkeypatch, load("qwen3"), make_rows(50)) == NUM_CHECKED + 1


def test_a_template_that_reads_the_contents_is_searched_each_time(monkeypatch):
    tokenizer = load("qwen3")
    # Longer contents get another text: the stand-ins do not show it.
    reads = families.CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
    monkeypatch.setattr(tokenizer, "chat_template", reads)
    assert count_searches(monkeypatch, tokenizer, make_rows(10)) >= 10
    decides = families.CHATML.replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if 'Hi' in messages[-1].content %}<think>\n{% endif %}"
        "{% endif %}",
    )
    monkeypatch.setattr(tokenizer, "chat_template", decides)
    assert count_searches(monkeypatch, tokenizer, make_rows(10)) >= 10


def test_rows_with_marks_are_searched(monkeypatch):
    rows = make_rows(10, masked=(range(0, 1),))
    assert count_searches(monkeypatch, load("qwen3"), rows) == 10
