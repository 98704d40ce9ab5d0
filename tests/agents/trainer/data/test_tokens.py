"""Rows become tokens, and only what has to be learned counts."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from agents.errors import ExpectedError
from agents.shared.data.known_templates import PLAIN_TEMPLATE
from agents.trainer.data import tokens
from agents.trainer.data.conversations import ConversationRow, ConversationTurn
from agents.trainer.data.tally import Skipped
from agents.trainer.data.tokens import TEXT_RULES, mark_targets, tokenize_rows
from agents.trainer.model.model import load_tokenizer
from tests.agents.trainer.ranks import DEMO


@pytest.fixture
def tokenizer():
    return load_tokenizer(DEMO / "model")[0]


def chat(*contents, number=1, system=None):
    roles = ["user", "assistant"] * len(contents)
    turns = [ConversationTurn(role=r, content=c) for r, c in zip(roles, contents, strict=False)]
    first = [ConversationTurn(role="system", content=system)] if system else []
    return ConversationRow(number=number, turns=(*first, *turns))


def learned(tokenizer, row, max_tokens=500, rules=TEXT_RULES):
    (tokenized,) = tokenize_rows(tokenizer, [row], max_tokens, rules)
    (sample,) = tokenized.segments
    return tokenizer.decode(sample.ids[sample.is_target]), tokenizer.decode(sample.ids)


def marked(tokenizer, row, rules=TEXT_RULES):
    """Return what is learned, and the whole with marks around it."""
    part, _ = learned(tokenizer, row, rules=rules)
    (tokenized,) = tokenize_rows(tokenizer, [row], 500, rules)
    (sample,) = tokenized.segments
    whole, before = "", False
    for token, is_target in zip(sample.ids, sample.is_target, strict=True):
        whole += "" if is_target == before else "[[" if is_target else "]]"
        whole, before = whole + tokenizer.decode([token]), is_target
    return part, f"{whole}]]" if before else whole


def test_only_answers_and_their_ends_are_learned(tokenizer):
    row = chat("Hi there", "Hello you", "And now?", "Bye.", system="Be kind")
    part, whole = learned(tokenizer, row)
    assert part == "Hello you<|end|>Bye.<|end|>"
    assert whole == (
        "<|begin|><|system|>Be kind<|end|><|user|>Hi there<|end|><|assistant|>Hello you<|end|>"
        "<|user|>And now?<|end|><|assistant|>Bye.<|end|>"
    )


def test_plain_text_is_learned_wholly_but_for_its_first_token(tokenizer):
    part, whole = learned(tokenizer, ConversationRow(number=1, text="The river."))
    assert whole == "The river.<|end|>"
    assert part == " river.<|end|>"


def test_text_that_was_rendered_before_keeps_one_begin_and_end(tokenizer):
    for text in ("<|begin|>The river.<|end|>", "<|begin|>The river.", "The river.<|end|>"):
        assert (
            learned(tokenizer, ConversationRow(number=1, text=text))[1]
            == f"{text.removesuffix('<|end|>')}<|end|>"
        )


def test_without_a_template_the_plain_one_serves(tokenizer):
    tokenizer.chat_template = PLAIN_TEMPLATE
    part, whole = learned(tokenizer, chat("Add", "Three", "More", "Four", system="Be kind"))
    assert part == "Three<|end|>Four<|end|>"
    assert whole.startswith("<|begin|>Be kind\n\n### Instruction:\nAdd\n\n### Response:\nThree")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_damaged_tokenizer_is_said(tmp_path, name, content):
    folder = shutil.copytree(DEMO / "model", tmp_path / "m")
    (folder / name).write_text(content)
    with pytest.raises(ExpectedError, match=r"The tokenizer in .* cannot be loaded"):
        load_tokenizer(folder)


def test_without_an_end_token_the_plain_template_serves_all_the_same(tokenizer):
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.bos_token = tokenizer.eos_token = None
    part, whole = learned(tokenizer, chat("Add", "Three"))
    assert (part, whole) == ("Three", "### Instruction:\nAdd\n\n### Response:\nThree")


def test_an_answer_that_a_template_writes_otherwise_is_still_found(tokenizer):
    # As Qwen3 does: the last answer gets an empty thought, the earlier ones none.
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}"
        "<think></think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    part, whole = marked(tokenizer, chat("Say Yes", "Yes", "Really, No", "No"))
    assert part == "Yes<|end|><think></think>No<|end|>"
    assert whole == (
        "<|user|>Say Yes<|end|><|assistant|>[[Yes<|end|>]]<|user|>Really, No<|end|>"
        "<|assistant|>[[<think></think>No<|end|>]]"
    )


def test_an_answer_whose_thoughts_a_template_leaves_out_is_learned_without_them(tokenizer):
    # As DeepSeek-R1's distillates do, and open another thought than is in the data.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
        "<|assistant|>{{ m.content.split('</think>')[-1] | trim }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    row = chat("Is it yes or no?", "<think>hm, yes</think>\n\nyes", "Really no?", "no")
    _, whole = marked(tokenizer, row, rules=2)
    assert whole == (
        "<|user|>Is it yes or no?<|assistant|>[[yes<|end|>]]"
        "<|user|>Really no?<|assistant|>[[no<|end|>]]"
    )
    # New runs continue the thought that a chat opens.
    _, whole = marked(tokenizer, row)
    assert whole == (
        "<|user|>Is it yes or no?<|assistant|>[[yes<|end|>]]"
        "<|user|>Really no?<|assistant|><think>[[</think>no<|end|>]]"
    )


HEADED = (
    "{{ bos_token }}<|system|>Be kind<|end|>{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen2.5's and Llama 3.1's: says by itself what kind of assistant it is."""
ASKING = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
)
"""As Qwen3.6's, which takes no conversation without a question."""


@pytest.mark.parametrize("template", [HEADED, ASKING + HEADED], ids=["headed", "asking"])
@pytest.mark.parametrize("system", [None, "Be short"])
def test_of_a_greeting_only_what_was_said_is_learned(tokenizer, template, system):
    tokenizer.chat_template = template
    row = chat("Hi there", "Hello", "How?", "So.", system=system)
    first = 1 if system else 0
    row = replace(
        row,
        turns=(
            *row.turns[:first],
            ConversationTurn(role="assistant", content="Yes?"),
            *row.turns[first:],
        ),
    )
    part, whole = marked(tokenizer, row)
    assert part == "Yes?<|end|>Hello<|end|>So.<|end|>"
    said = f"<|system|>{system}<|end|>" if system else ""
    assert whole.startswith(f"<|begin|><|system|>Be kind<|end|>{said}<|assistant|>[[Yes?<|end|>]]")


def test_a_greeting_is_not_learned_with_the_mark_in_front_of_it(tokenizer):
    turns = [ConversationTurn(role="assistant", content="Yes?"), *chat("Hi", "Ho").turns]
    _, whole = marked(tokenizer, ConversationRow(number=1, turns=tuple(turns)))
    assert whole == (
        "<|begin|><|assistant|>[[Yes?<|end|>]]<|user|>Hi<|end|><|assistant|>[[Ho<|end|>]]"
    )


def test_pairs_that_are_the_same_within_the_limit_or_to_the_template_are_left_out(tokenizer):
    def pair(good, bad):
        asked = ConversationTurn(role="user", content="Hi")
        sides = [(asked, ConversationTurn(role="assistant", content=text)) for text in (good, bad)]
        return ConversationRow(number=1, turns=sides[0], rejected=sides[1], num_shared_turns=1)

    long = "river " * 200
    (found,) = tokenize_rows(tokenizer, [pair(f"{long} yes", f"{long} no")], 100)
    assert isinstance(found, Skipped)
    assert not found.malformed
    assert found.reason.startswith("'chosen' and 'rejected' are the same within 100 of their ")
    asked = pair("yes", "no")
    question = ConversationTurn(role="user", content=long)
    both = (question, asked.turns[1]), (question, asked.rejected[1])
    (found,) = tokenize_rows(tokenizer, [replace(asked, turns=both[0], rejected=both[1])], 100)
    assert found.reason.startswith("nothing to learn is left within 100 of its ")
    tokenizer.chat_template = HEADED
    (found,) = tokenize_rows(tokenizer, [pair("yes", "yes\n")], 100)
    assert found.reason == "'chosen' and 'rejected' are the same"
    (kept,) = tokenize_rows(tokenizer, [pair("yes", "no")], 100)
    assert len(kept.segments) == 2


class Watched:
    """A tokenizer that notes how much its library is given at once."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.backend_tokenizer = self
        self.sizes = []

    def __getattr__(self, name):
        known = self._tokenizer
        return getattr(known, name, None) or getattr(known.backend_tokenizer, name)

    def __call__(self, texts, **options):
        return self._tokenizer(texts, **options)

    def encode_batch(self, texts, **options):
        self.sizes.append(sum(map(len, texts)))
        return self._tokenizer.backend_tokenizer.encode_batch(texts, **options)


def test_long_rows_are_tokenized_few_at_a_time(tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "_CHARS_AT_ONCE", 1000)
    rows = [ConversationRow(number=i, text="river " * (100 if i % 2 else 1)) for i in range(1, 41)]
    rows += [chat("river " * 100, "river " * 100)]
    watched = Watched(tokenizer)
    found = list(tokenize_rows(watched, rows, 10_000))
    assert max(watched.sizes) < 3000
    assert len(watched.sizes) > 10
    monkeypatch.undo()
    whole = list(tokenize_rows(tokenizer, rows, 10_000))
    assert [one.segments[0].ids.tolist() for one in found] == [
        one.segments[0].ids.tolist() for one in whole
    ]


def test_an_answer_that_a_template_drops_is_named(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (found,) = tokenize_rows(tokenizer, [chat("yes", "yes")], 100)
    assert isinstance(found, Skipped)
    assert "changes the assistant's answer" in found.reason


def test_a_system_turn_that_a_template_drops_begins_the_question(tokenizer):
    # As Mistral's does, which writes it with a last question, never in front of an answer.
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST] {% if loop.last and s is defined %}{{ s }}\n\n{% endif %}"
        "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    row = chat("Red or Blue", "Blue", "Again Red or Blue", "Red", system="Classify")
    _, whole = marked(tokenizer, row)
    assert whole == (
        "<|begin|>[INST] Classify\n\nRed or Blue[/INST][[ Blue<|end|>]]"
        "[INST] Again Red or Blue[/INST][[ Red<|end|>]]"
    )


def test_a_template_that_writes_the_date_writes_the_same_every_day(tokenizer):
    tokenizer.chat_template = (
        "{{ strftime_now('%d %b %Y, %A, %-m/%y') }}|" + tokenizer.chat_template
    )
    _, whole = learned(tokenizer, chat("Hi", "Ho"))
    assert whole.startswith("26 Jul 2024, Friday, 7/24|<|begin|>")


@pytest.mark.parametrize("wrong", ["m.content + 1", "'{x}'.format(m)", "1 // 0", "m.content."])
def test_a_template_that_fails_on_a_row_names_it(tokenizer, wrong):
    tokenizer.chat_template = "{% for m in messages %}{{ " + wrong + " }}{% endfor %}"
    (found,) = tokenize_rows(tokenizer, [chat("Hi", "Ho")], 100)
    assert isinstance(found, Skipped)
    assert found.reason.startswith("the chat template of this model refuses it: ")


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
    (found,) = tokenize_rows(tokenizer, [ConversationRow(number=1, text="river " * 200_000)], 2048)
    assert found.cut_from >= 200_000
    assert len(found.segments[0].ids) == 2048


def test_a_tool_speaks_in_its_own_role_and_is_not_learned(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    roles = ("user", "assistant", "tool", "assistant")
    turns = tuple(
        ConversationTurn(role=role, content=f"{role} {i}") for i, role in enumerate(roles)
    )
    part, whole = learned(tokenizer, ConversationRow(number=1, turns=turns))
    assert part == "assistant 1<|end|>assistant 3<|end|>"
    assert "<|tool|>tool 2<|end|>" in whole


def test_text_of_every_plane_comes_back_whole(tokenizer):
    text = "".join(chr((plane << 16) + 0x1F600 % 0x10000) for plane in range(17))
    text += "".join(chr((plane << 16) + 0x0391) for plane in range(17))
    _, whole = learned(tokenizer, ConversationRow(number=1, text=text))
    assert whole == f"{text}<|end|>"


def test_a_token_that_touches_a_range_counts():
    offsets = [(0, 3), (3, 5), (5, 5), (5, 9), (9, 9)]
    assert mark_targets(offsets, [range(4, 6)]).tolist() == [False, True, True, True, False]
    assert mark_targets(offsets, [range(0, 9)]).tolist()[0] is False
    assert mark_targets([], []).tolist() == []
