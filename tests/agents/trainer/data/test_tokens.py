"""Rows become tokens, and only what has to be learned counts."""

from __future__ import annotations

import pytest

from agents.trainer.data.conversations import Row, Turn
from agents.trainer.data.tally import Skipped
from agents.trainer.data.tokens import PLAIN_TEMPLATE, mark_targets, tokenize_rows
from agents.trainer.model import load_tokenizer
from tests.agents.trainer.ranks import DEMO


@pytest.fixture
def tokenizer():
    return load_tokenizer(DEMO / "model")[0]


def chat(*contents, number=1, system=None):
    roles = ["user", "assistant"] * len(contents)
    turns = [Turn(role=r, content=c) for r, c in zip(roles, contents, strict=False)]
    first = [Turn(role="system", content=system)] if system else []
    return Row(number=number, turns=(*first, *turns))


def learned(tokenizer, row, max_tokens=500):
    (tokenized,) = tokenize_rows(tokenizer, [row], max_tokens)
    (sample,) = tokenized.segments
    return tokenizer.decode(sample.ids[sample.is_target]), tokenizer.decode(sample.ids)


def test_only_answers_and_their_ends_are_learned(tokenizer):
    row = chat("Hi there", "Hello you", "And now?", "Bye.", system="Be kind")
    part, whole = learned(tokenizer, row)
    assert part == "Hello you<|end|>Bye.<|end|>"
    assert whole == (
        "<|begin|><|system|>Be kind<|end|><|user|>Hi there<|end|><|assistant|>Hello you<|end|>"
        "<|user|>And now?<|end|><|assistant|>Bye.<|end|>"
    )


def test_plain_text_is_learned_wholly_but_for_its_first_token(tokenizer):
    part, whole = learned(tokenizer, Row(number=1, text="The river."))
    assert whole == "<|begin|>The river.<|end|>"
    assert part == "The river.<|end|>"


def test_without_a_template_the_plain_one_serves(tokenizer):
    tokenizer.chat_template = PLAIN_TEMPLATE
    part, whole = learned(tokenizer, chat("Add", "Three", "More", "Four", system="Be kind"))
    assert part == "Three<|end|>Four<|end|>"
    assert whole.startswith("<|begin|>Be kind\n\n### Instruction:\nAdd\n\n### Response:\nThree")


def test_an_answer_that_a_template_writes_otherwise_is_still_found(tokenizer):
    # As Qwen3 does: the last answer gets an empty thought, the earlier ones none.
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}"
        "<think></think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    part, _ = learned(tokenizer, chat("Say Yes", "Yes", "Really", "No"))
    assert part == "Yes<|end|><think></think>No<|end|>"


def test_a_template_without_system_gets_it_in_the_first_question(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    _, whole = learned(tokenizer, chat("Hi", "Ho", system="Be kind"))
    assert whole == "<|user|>Be kind\n\nHi<|end|><|assistant|>Ho<|end|>"


def test_a_row_that_the_template_refuses_is_named(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    (found,) = tokenize_rows(tokenizer, [chat("Hi", "Ho", number=7)], 100)
    assert isinstance(found, Skipped)
    assert (found.row, found.malformed) == (7, True)
    assert found.reason == "the chat template of this model refuses it: roles must alternate"


def test_long_rows_are_cut_and_said_to_be(tokenizer):
    rows = [chat("Hi", "word " * 50), chat("Hi", "Ho", number=2), chat("why " * 50, "Ho", number=3)]
    first, second, third = tokenize_rows(tokenizer, rows, 24)
    assert first.cut_from > 50
    assert second.cut_from is None
    assert len(first.segments[0].ids) == 24
    assert third.row == 3
    assert "nothing to learn is left within 24 of its " in third.reason


def test_a_row_of_200_000_tokens_is_cut(tokenizer):
    (found,) = tokenize_rows(tokenizer, [Row(number=1, text="river " * 200_000)], 2048)
    assert found.cut_from >= 200_000
    assert len(found.segments[0].ids) == 2048


def test_a_tool_speaks_in_its_own_role_and_is_not_learned(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    roles = ("user", "assistant", "tool", "assistant")
    turns = tuple(Turn(role=role, content=f"{role} {i}") for i, role in enumerate(roles))
    part, whole = learned(tokenizer, Row(number=1, turns=turns))
    assert part == "assistant 1<|end|>assistant 3<|end|>"
    assert "<|tool|>tool 2<|end|>" in whole


def test_text_of_every_plane_comes_back_whole(tokenizer):
    text = "".join(chr((plane << 16) + 0x1F600 % 0x10000) for plane in range(17))
    text += "".join(chr((plane << 16) + 0x0391) for plane in range(17))
    _, whole = learned(tokenizer, Row(number=1, text=text))
    assert whole == f"<|begin|>{text}<|end|>"


def test_a_token_that_touches_a_range_counts():
    offsets = [(0, 3), (3, 5), (5, 5), (5, 9), (9, 9)]
    assert mark_targets(offsets, [range(4, 6)]).tolist() == [False, True, True, True, False]
    assert mark_targets(offsets, [range(0, 9)]).tolist()[0] is False
    assert mark_targets([], []).tolist() == []
