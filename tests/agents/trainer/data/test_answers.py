"""Answers are learned behind what a chat shows, up to the token that ends them."""

from __future__ import annotations

import pytest

from agents.errors import ExpectedError
from agents.trainer.data.answers import (
    CONTINUED,
    DROPPED_TURN,
    EMPTY_THOUGHT,
    OTHER_PROMPT,
    OWN_THOUGHT,
    UNENDED,
    find_turn_end,
)
from agents.trainer.data.conversations import read_row
from agents.trainer.data.templates import choose, render_question
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.ranks import DEMO


@pytest.fixture(scope="module")
def tokenizer():
    found, _ = load_tokenizer(DEMO / "model")
    found.add_tokens(list(families.TOKENS), special_tokens=True)
    found.bos_token, found.eos_token = "<s>", "</s>"
    return found


def tokenize(tokenizer, template, *messages, rules=3):
    """Return a tokenized row; its messages are pairs of a letter of the role and a text."""
    tokenizer.chat_template = template
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    rows = [{"role": roles[role], "content": said, **dict(more)} for role, said, *more in messages]
    row = read_row(1, {"messages": rows}, "chat")
    (tokenized,) = tokenize_rows(tokenizer, [row], 500, rules)
    return tokenized


def mark(tokenizer, row):
    """Return the text of a row with marks around what is learned."""
    (segment,) = row.segments
    whole, before = "", False
    for token, is_target in zip(segment.ids, segment.is_target, strict=True):
        whole += "" if is_target == before else "[[" if is_target else "]]"
        whole, before = whole + tokenizer.decode([token]), is_target
    return f"{whole}]]" if before else whole


TWO = (("u", "Hi"), ("a", "Yes."), ("u", "And"), ("a", "No."))
QUESTION = TWO[:3]
THOUGHT = (("u", "Hi"), ("a", "<think>\nhm\n</think>\n\nYes."))
KEYED = (("u", "Hi"), ("a", "Yes.", ("reasoning_content", "hm")))
ANALYSED = (("u", "Hi"), ("a", "Yes.", ("thinking", "hm")))
TOOL = (("u", "Hi"), ("t", "42"), ("a", "No."))
# fmt: off
TABLE = [
    ("CHATML", TWO, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>\n]]"
     "<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n[[No.<|im_end|>\n]]", ()),
    ("CHATML", THOUGHT, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
     "[[<think>\nhm\n</think>\n\nYes.<|im_end|>\n]]", ()),
    ("LLAMA2", TWO, "<s>[INST] Hi [/INST][[ Yes. </s>]]<s>[INST] And [/INST][[ No. </s>]]", ()),
    ("LLAMA3", TWO, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n[[Yes.<|eot_id|>]]"
     "<|start_header_id|>user<|end_header_id|>\n\nAnd<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n[[No.<|eot_id|>]]", ()),
    ("GEMMA", TWO, "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
     "[[Yes.<end_of_turn>\n]]<start_of_turn>user\nAnd<end_of_turn>\n<start_of_turn>model\n"
     "[[No.<end_of_turn>\n]]", ()),
    ("MISTRAL", TWO, "<s>[INST] Hi[/INST][[ Yes.</s>]][INST] And[/INST][[ No.</s>]]", ()),
    ("PHI3", TWO, "<|user|>\nHi<|end|>\n<|assistant|>\n[[Yes.<|end|>\n]]<|user|>\nAnd<|end|>\n"
     "<|assistant|>\n[[No.<|end|>\n<|endoftext|>]]", ()),
    ("PHI3", QUESTION, "<|user|>\nHi<|end|>\n<|assistant|>\n[[Yes.<|end|>\n]]<|user|>\nAnd<|end|>\n"
     "<|endoftext|>", ()),
    ("PHI3", TOOL, "<|user|>\nHi<|end|>\n<|assistant|>\n[[No.<|end|>\n<|endoftext|>]]",
     ((DROPPED_TURN, "tool"),)),
    ("PHI4", TWO, "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>"
     "[[Yes.<|im_end|>]]<|im_start|>user<|im_sep|>And<|im_end|><|im_start|>assistant<|im_sep|>"
     "[[No.<|im_end|>]]", ()),
    ("QWEN3", TWO, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>\n]]"
     "<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
     "[[No.<|im_end|>\n]]", ((EMPTY_THOUGHT, "<think>"),)),
    ("QWEN3", THOUGHT, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
     "[[<think>\nhm\n</think>\n\nYes.<|im_end|>\n]]", ()),
    ("QWEN3_5", TWO, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>\n]]"
     "<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
     "[[No.<|im_end|>\n]]", ()),
    ("QWEN3_5", THOUGHT, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
     "[[<think>\nhm\n</think>\n\nYes.<|im_end|>\n]]", ((OWN_THOUGHT, "<think>"),)),
    ("QWEN3_5", KEYED, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
     "[[<think>\nhm\n</think>\n\nYes.<|im_end|>\n]]", ((OWN_THOUGHT, "<think>"),)),
    ("DEEPSEEK_R1", TWO, "<|begin_of_text|><|User|>Hi<|Assistant|>[[Yes.</s>]]<|User|>And"
     "<|Assistant|><think>\n[[\n</think>\n\nNo.</s>]]", ((CONTINUED, "<think>"),)),
    ("DEEPSEEK_R1", THOUGHT, "<|begin_of_text|><|User|>Hi<|Assistant|><think>\n"
     "[[hm\n</think>\n\nYes.</s>]]", ((CONTINUED, "<think>"),)),
    ("DEEPSEEK_R1", KEYED, "<|begin_of_text|><|User|>Hi<|Assistant|><think>\n"
     "[[hm\n</think>\n\nYes.</s>]]", ((CONTINUED, "<think>"),)),
    ("GLM4", TWO, "[gMASK]<sop><|user|>\nHi<|assistant|>[[\nYes.]]<|user|>\nAnd<|assistant|>"
     "[[\nNo.</s>]]", ((UNENDED, "</s>"),)),
    ("GLM4", QUESTION, "[gMASK]<sop><|user|>\nHi<|assistant|>[[\nYes.]]<|user|>\nAnd", ()),
    ("GLM4_5", TWO, "[gMASK]<sop><|user|>\nHi<|assistant|>\n<think></think>[[\nYes.]]<|user|>\nAnd"
     "<|assistant|>\n<think></think>[[\nNo.</s>]]",
     ((EMPTY_THOUGHT, "<think>"), (UNENDED, "</s>"))),
    ("GLM4_5", THOUGHT, "[gMASK]<sop><|user|>\nHi<|assistant|>[[\n<think>hm</think>\nYes.</s>]]",
     ((UNENDED, "</s>"),)),
    ("DEEPSEEK_V3_1", TWO, "<|begin_of_text|><|User|>Hi<|Assistant|></think>[[Yes.</s>]]<|User|>And"
     "<|Assistant|></think>[[No.</s>]]", ()),
    ("DEEPSEEK_V3_1", THOUGHT, "<|begin_of_text|><|User|>Hi<|Assistant|>"
     "[[<think>\nhm\n</think>\n\nYes.</s>]]", ((CONTINUED, "<think>"),)),
    ("NEMOTRON", TWO, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>"
     "[[Yes.<|im_end|>\n]]<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n<think></think>"
     "[[No.<|im_end|>\n]]", ((EMPTY_THOUGHT, "<think>"),)),
    ("NEMOTRON", THOUGHT, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
     "[[hm\n</think>Yes.<|im_end|>\n]]", ()),
    ("GPT_OSS", TWO, "<|start|>system<|message|>You are a model.<|end|><|start|>user<|message|>Hi"
     "<|end|><|start|>assistant[[<|channel|>final<|message|>Yes.<|end|>]]<|start|>user<|message|>"
     "And<|end|><|start|>assistant[[<|channel|>final<|message|>No.<|return|>]]", ()),
    ("GPT_OSS", ANALYSED, "<|start|>system<|message|>You are a model.<|end|><|start|>user"
     "<|message|>Hi<|end|><|start|>assistant[[<|channel|>analysis<|message|>hm<|end|><|start|>"
     "assistant<|channel|>final<|message|>Yes.<|return|>]]", ()),
    ("SMOLLM3", TWO, "<|im_start|>system\nReasoning mode: /think<|im_end|>\n<|im_start|>user\nHi"
     "<|im_end|>\n<|im_start|>assistant\n[[Yes.<|im_end|>\n]]<|im_start|>user\nAnd<|im_end|>\n"
     "<|im_start|>assistant\n[[No.<|im_end|>\n]]", ()),
    ("CLOSED_IF_FOLLOWED", TWO, "<|user|>Hi</s><|assistant|>[[Yes.</s>]]<|user|>And</s>"
     "<|assistant|>[[No.</s>]]", ((UNENDED, "</s>"),)),
]
# fmt: on


@pytest.mark.parametrize(("family", "messages", "expected", "notes"), TABLE)
def test_what_the_model_must_write_is_learned(tokenizer, family, messages, expected, notes):
    row = tokenize(tokenizer, getattr(families, family), *messages)
    assert mark(tokenizer, row) == expected
    assert row.notes == set(notes)


ENDS = {
    "CHATML": "<|im_end|>", "LLAMA2": "</s>", "LLAMA3": "<|eot_id|>", "GEMMA": "<end_of_turn>",
    "MISTRAL": "</s>", "PHI3": "<|end|>", "PHI4": "<|im_end|>", "QWEN3": "<|im_end|>",
    "QWEN3_5": "<|im_end|>", "DEEPSEEK_R1": "</s>", "GPT_OSS": "<|return|>",
    "SMOLLM3": "<|im_end|>",
}  # fmt: skip


@pytest.mark.parametrize(("family", "token"), ENDS.items())
def test_the_token_that_ends_an_answer_is_found(tokenizer, family, token):
    tokenizer.chat_template = getattr(families, family)
    end = find_turn_end(tokenizer)
    assert (end.token, end.is_added) == (tokenizer.convert_tokens_to_ids(token), False)


@pytest.mark.parametrize("family", ["GLM4", "CLOSED_IF_FOLLOWED"])
def test_where_a_template_ends_nothing_the_end_token_is_added(tokenizer, family):
    tokenizer.chat_template = getattr(families, family)
    end = find_turn_end(tokenizer)
    assert (end.token, end.is_added) == (tokenizer.eos_token_id, True)


@pytest.mark.parametrize("family", sorted({*ENDS, "GLM4", "CLOSED_IF_FOLLOWED"}))
@pytest.mark.parametrize("answer", ["Yes.", "<think>\nhm\n</think>\n\nYes."])
def test_the_last_answer_continues_what_a_chat_shows(tokenizer, family, answer):
    row = tokenize(tokenizer, getattr(families, family), ("u", "Hi"), ("a", answer))
    context = mark(tokenizer, row).partition("[[")[0]
    shown = render_question(tokenizer, [{"role": "user", "content": "Hi"}])
    # Hybrids: a row without a thought shows what a chat without thinking shows, a row with one
    # opens it itself.
    assert context in (shown, f"{shown}<think>\n\n</think>\n\n", shown.partition("<think>")[0])


@pytest.mark.parametrize("rules", [1, 2])
def test_earlier_rules_learn_the_finished_text(tokenizer, rules):
    row = tokenize(tokenizer, families.DEEPSEEK_R1, *TWO, rules=rules)
    assert mark(tokenizer, row).endswith("<|Assistant|>[[No.</s>]]")
    row = tokenize(tokenizer, families.GLM4, *TWO, rules=rules)
    assert mark(tokenizer, row).endswith("<|assistant|>[[\nNo.]]")
    row = tokenize(tokenizer, families.PHI3, *QUESTION, rules=rules)
    assert "[[Yes.]]<|end|>" in mark(tokenizer, row)
    assert row.notes == frozenset()


def test_a_thought_that_no_prompt_opens_is_learned_though_the_template_cuts_it(tokenizer):
    template = families.DEEPSEEK_R1.replace(
        "<|Assistant|><think>\n{% endif %}", "<|Assistant|>{% endif %}"
    )
    row = tokenize(tokenizer, template, *THOUGHT)
    assert mark(tokenizer, row).endswith("<|Assistant|>[[<think>\nhm\n</think>\n\nYes.</s>]]")
    assert row.notes == {(CONTINUED, "<think>")}


def test_an_answer_behind_another_header_than_that_of_a_chat_is_named(tokenizer):
    template = families.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>bot\n")
    row = tokenize(tokenizer, template, ("u", "Hi"), ("a", "Yes."))
    assert mark(tokenizer, row).endswith("<|im_start|>assistant\n[[Yes.<|im_end|>\n]]")
    assert row.notes == {(OTHER_PROMPT, "assistant")}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>\nhm\n</think>\n\nA. Yes.", "<think>\n[[hm\n</think>\n\nA.]] Yes.</s>"),
        ("A. Yes. No.", "<think>\n[[\n</think>\n\nA.]] Yes.[[ No.</s>]]"),
    ],
)
def test_a_mark_in_an_answer_behind_a_prompt_keeps_its_place(tokenizer, content, expected):
    first = content.index(" Yes.")
    detail = [{"begin_offset": first, "end_offset": first + 4, "train": False}]
    answer = ("a", content, ("train_detail", detail))
    row = tokenize(tokenizer, families.DEEPSEEK_R1, ("u", "Hi"), answer)
    assert mark(tokenizer, row).endswith(expected)


def test_an_answer_that_is_not_learned_gets_no_end(tokenizer):
    row = tokenize(tokenizer, families.GLM4, *TWO[:3], ("a", "No.", ("train", False)))
    assert mark(tokenizer, row).endswith("[[\nYes.]]<|user|>\nAnd<|assistant|>\nNo.")


def test_an_end_beyond_the_longest_sequence_is_counted_as_cut(tokenizer):
    tokenizer.chat_template = families.GLM4
    row = read_row(1, {"prompt": "Hi", "completion": "Yes. " * 30}, "alpaca")
    (whole,) = tokenize_rows(tokenizer, [row], 500)
    (cut,) = tokenize_rows(tokenizer, [row], 20)
    assert whole.segments[0].ids[-1] == tokenizer.eos_token_id
    assert (cut.num_tokens, len(cut.segments[0].ids)) == (whole.num_tokens, 20)
    assert cut.segments[0].ids[-1] != tokenizer.eos_token_id


def test_the_end_of_a_template_that_needs_a_system_prompt_is_found(tokenizer):
    needs = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = needs + families.CHATML
    assert find_turn_end(tokenizer).token == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_templates_without_a_default_are_named(tokenizer):
    tokenizer.chat_template = {"tool_use": families.CHATML, "rag": families.CHATML}
    # A model that was trained on plain text is merged all the same.
    assert find_turn_end(tokenizer).token == tokenizer.eos_token_id
    with pytest.raises(ExpectedError, match="'rag', 'tool_use'") as refused:
        choose(tokenizer)
    assert "rename one to default" in refused.value.hint
