"""Thoughts are learned as the template has them, kept as context, or left out, as the key asks."""

from __future__ import annotations

import json
import re

import pytest

from agents.contract.spec import DataSpec
from agents.trainer.data.cache import make_key, tokenize_kept
from agents.trainer.data.conversations import read_row
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.turns.thoughts import without_thought
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.data.test_answers import mark
from tests.agents.trainer.ranks import DEMO, make_spec

ASKED = {"role": "user", "content": "Hi"}
INLINE = {"messages": [ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}]}


def keyed(key):
    return {"messages": [ASKED, {"role": "assistant", "content": "Yes.", key: "hm"}]}


SPELLINGS = {
    "inline": INLINE,
    **{key: keyed(key) for key in ("reasoning_content", "reasoning", "thinking")},
    "column": {"question": "Hi", "reasoning": "hm", "answer": "Yes."},
}
TWICE = {
    "messages": [
        *INLINE["messages"],
        {"role": "user", "content": "And"},
        {"role": "assistant", "content": "<think>\nah\n</think>\n\nNo."},
    ]
}


@pytest.fixture(scope="module")
def tokenizer():
    found, _ = load_tokenizer(DEMO / "model")
    found.add_tokens(list(families.TOKENS), special_tokens=True)
    found.bos_token, found.eos_token = "<s>", "</s>"
    return found


def read(tokenizer, tmp_path, family, row, reasoning="learn", **changes):
    """Return the marked texts of a file with one row, its findings, and the first reason."""
    tokenizer.chat_template = getattr(families, family)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    tally = Tally("x")
    data = DataSpec(train="-", reasoning=reasoning, **changes)
    objective = "dpo" if "chosen" in row else "sft"
    reader = RowReader(find_files(path), data, objective, tally)
    found = [
        mark(tokenizer, type(one)((segment,)))
        for one in tokenize_kept(iter(reader), reader, tally, tokenizer, 500, data)
        for segment in one.segments
    ]
    told = {(one.kind, one.column, one.consequence) for one in reader.findings}
    return found, told, next((one.reason for one in tally.named), "")


LEARNED = {
    "QWEN3": "[[<think>\nhm\n</think>\n\nYes.<|im_end|>\n]]",
    "QWEN3_5": "[[<think>\nhm\n</think>\n\nYes.<|im_end|>\n]]",
    "DEEPSEEK_R1": "<think>\n[[hm\n</think>\n\nYes.</s>]]",
    "GLM4_5": "[[\n<think>hm</think>\nYes.</s>]]",
    "NEMOTRON": "<think>\n[[hm\n</think>Yes.<|im_end|>\n]]",
    "GPT_OSS": "assistant[[<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>"
    "final<|message|>Yes.<|return|>]]",
}
KEPT = {
    "QWEN3": "<think>\nhm\n</think>\n\n[[Yes.<|im_end|>\n]]",
    "QWEN3_5": "<think>\nhm\n</think>\n\n[[Yes.<|im_end|>\n]]",
    "DEEPSEEK_R1": "<think>\nhm\n</think>\n\n[[Yes.</s>]]",
    "GLM4_5": "\n<think>hm</think>\n[[Yes.</s>]]",
    "NEMOTRON": "<think>\nhm\n</think>[[Yes.<|im_end|>\n]]",
    "GPT_OSS": "<|channel|>analysis<|message|>hm[[<|end|><|start|>assistant<|channel|>final"
    "<|message|>Yes.<|return|>]]",
}


@pytest.mark.parametrize("family", LEARNED)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("reasoning", ["learn", "keep"])
def test_a_thought_of_every_spelling_is_where_the_template_has_it(
    tokenizer, tmp_path, family, spelling, reasoning
):
    (text,), told, _ = read(tokenizer, tmp_path, family, SPELLINGS[spelling], reasoning)
    expected = (LEARNED if reasoning == "learn" else KEPT)[family]
    assert text.endswith(expected)
    assert text.count("hm") == 1
    assert not {kind for kind, *_ in told} & {"template", "reasoning", "thought"}


@pytest.mark.parametrize("family", LEARNED)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_dropped_thought_leaves_a_row_without_one(tokenizer, tmp_path, family, spelling):
    (text,), _, _ = read(tokenizer, tmp_path, family, SPELLINGS[spelling], "drop")
    plain = {"messages": [ASKED, {"role": "assistant", "content": "Yes."}]}
    assert [text] == read(tokenizer, tmp_path, family, plain)[0]


@pytest.mark.parametrize("spelling", [*SPELLINGS])
def test_a_template_without_a_place_learns_marks_and_names_keys(tokenizer, tmp_path, spelling):
    (text,), told, _ = read(tokenizer, tmp_path, "CHATML", SPELLINGS[spelling])
    column = "reasoning" if spelling == "column" else f"messages[].{spelling}"
    if spelling == "inline":
        assert text.endswith("[[<think>\nhm\n</think>\n\nYes.<|im_end|>\n]]")
        assert not told
    else:
        assert text.endswith("[[Yes.<|im_end|>\n]]")
        assert told == {("template", column, "warn")}


@pytest.mark.parametrize("family", ["QWEN3", "DEEPSEEK_R1", "GPT_OSS"])
def test_earlier_thoughts_that_the_template_leaves_out_are_counted(tokenizer, tmp_path, family):
    (text,), told, _ = read(tokenizer, tmp_path, family, TWICE)
    assert "hm" not in text
    assert "ah" in "".join(re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL))
    key = "reasoning_content" if family == "GPT_OSS" else "<think>"
    assert ("dropped_thought", key, "note") in told


def test_an_answer_that_is_only_a_thought_is_left_out_if_thoughts_are_dropped(tokenizer, tmp_path):
    row = {"messages": [ASKED, {"role": "assistant", "content": "<think>hm</think>"}]}
    found, _, reason = read(tokenizer, tmp_path, "QWEN3", row, "drop")
    assert not found
    assert reason == "the answer is only a thought, which data.reasoning drops"
    thoughts = [f"<think>{one}</think>Yes." for one in ("a", "b")]
    pair = {"prompt": "Hi", "chosen": thoughts[0], "rejected": thoughts[1]}
    assert len(read(tokenizer, tmp_path, "QWEN3", pair)[0]) == 2
    found, _, reason = read(tokenizer, tmp_path, "QWEN3", pair, "drop")
    assert not found
    assert "differ only in thoughts" in reason


def test_marks_keep_their_place_without_the_thought(tokenizer, tmp_path):
    parts = [
        {"type": "text", "text": "<think>\nhm\n</think>\n\nA. "},
        {"type": "text", "text": "Bad.", "train": False},
        {"type": "text", "text": " C."},
    ]
    row = {"messages": [ASKED, {"role": "assistant", "content": parts}]}
    (text,), _, _ = read(tokenizer, tmp_path, "CHATML", row, "drop")
    assert re.search(r"assistant\n\[\[A\. ?\]\] ?Bad\.\[\[ C\.<\|im_end\|>\n\]\]$", text)


def test_weights_keep_their_place_without_the_thought(tokenizer, tmp_path):
    parts = [
        {"type": "text", "text": "<think>\nhm\n</think>\n\nA. ", "weight": 0.5},
        {"type": "text", "text": "Half.", "weight": 0.25},
        {"type": "text", "text": " C."},
    ]
    message = {"role": "assistant", "content": parts, "weight": 0.5}
    turn = without_thought(read_row(1, {"messages": [ASKED, message]}, "chat").turns[1])
    said = turn.content
    assert said == "A. Half. C."
    found = {said[part.start : part.stop]: weight for part, weight in turn.weighted[1:]}
    assert turn.weighted[0] == (range(len(said)), 0.5)
    assert found == {"A. ": 0.25, "Half.": 0.125, " C.": 0.5}


def test_the_key_is_part_of_the_name_of_cached_tokens(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(INLINE) + "\n")
    names = {
        make_key(
            find_files(path), "0" * 64,
            make_spec(data=DataSpec(train=str(path), reasoning=one)), tokenizer,
        )
        for one in ("learn", "keep", "drop")
    }  # fmt: skip
    assert len(names) == 3
