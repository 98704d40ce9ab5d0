"""Rows that a chat template has written already are taken as written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agents.contract.spec import DataSpec
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.fakes.site import DEMO

TOKENIZER = load_tokenizer(DEMO / "model")[0]


def read(path: Any, row: Any, objective: str = "sft", **options: Any) -> list[tuple[str, str]]:
    """Return text and learned text of each conversation of a row."""
    path.write_text(json.dumps(row) + "\n")
    reader = RowReader(find_files(path), DataSpec(train="-", **options), objective, Tally(name="a"))
    (found,) = tokenize_rows(TOKENIZER, list(reader), 512)
    assert not isinstance(found, Skipped), found
    return [
        (TOKENIZER.decode(one.ids), TOKENIZER.decode(one.ids[one.is_target]))
        for one in found.segments
    ]


PROMPTS = [
    "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "<s>[INST] q [/INST]",
    "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n",
    "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "Below is an instruction.\n\n### Instruction:\nq\n\n### Response:\n",
    "USER: q ASSISTANT:",
]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("names", [("prompt", "completion"), ("instruction", "output")])
def test_a_rendered_prompt_is_not_rendered_again(tmp_path, prompt, names):
    ((text, learned),) = read(tmp_path / "a.jsonl", dict(zip(names, (prompt, "a0"), strict=True)))
    assert text.removesuffix("<|end|>") == f"{prompt}a0"
    assert learned == "a0<|end|>"


def test_plain_prompts_are_rendered_unless_they_are_called_rendered(tmp_path):
    row = {"prompt": "The sky is", "completion": " blue."}
    ((text, _),) = read(tmp_path / "a.jsonl", row)
    assert text.startswith("<|begin|><|user|>")
    ((text, learned),) = read(tmp_path / "a.jsonl", row, rendered="yes")
    assert (text, learned) == ("The sky is blue.<|end|>", " blue.<|end|>")
    row = {"prompt": PROMPTS[0], "completion": "a0"}
    ((text, _),) = read(tmp_path / "a.jsonl", row, rendered="no")
    assert text.startswith("<|begin|><|user|><|im_start|>user")


@pytest.mark.parametrize(
    ("chosen", "rejected", "wanted"),
    [
        ("The sky is blue.", "The sky is green.", (" blue.<|end|>", " green.<|end|>")),
        (f"{PROMPTS[0]}good", f"{PROMPTS[0]}bad", ("good<|end|>", "bad<|end|>")),
    ],
)
def test_the_common_beginning_of_a_pair_is_its_prompt(tmp_path, chosen, rejected, wanted):
    row = {"chosen": chosen, "rejected": rejected}
    found = read(tmp_path / "a.jsonl", row, "dpo")
    assert [text.removesuffix("<|end|>") for text, _ in found] == [chosen, rejected]
    assert tuple(learned for _, learned in found) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na0<|im_end|>\n"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\na1<|im_end|>",
            "a0<|im_end|>a1<|im_end|><|end|>",
        ),
        ("### Human: q0### Assistant: a0", " a0<|end|>"),
        ("[INST] q [/INST] a0</s>[INST] r [/INST] a1</s>", " a0</s> a1</s><|end|>"),
    ],
)
def test_of_a_rendered_text_only_the_answers_are_learned(tmp_path, text, wanted):
    ((whole, learned),) = read(tmp_path / "a.jsonl", {"text": text}, rendered="yes")
    assert whole.removesuffix("<|end|>") == text
    assert learned == wanted
    # Unasked, a text is learned as a whole, and the control tokens are told.
    reader = RowReader(
        find_files(tmp_path / "a.jsonl"), DataSpec(train="-"), "sft", Tally(name="a")
    )
    (row,) = reader
    assert row.text == text
    told = {one.kind for one in reader.findings}
    assert told == ({"rendered"} if "<|" in text or "[" in text else set())


def test_control_tokens_in_rows_that_are_rendered_again_are_told(tmp_path):
    row = {"instruction": "<|im_start|>user\nq<|im_end|>", "output": "a"}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = RowReader(find_files(path), DataSpec(train="-"), "sft", Tally(name="a"))
    list(reader)
    (found,) = reader.findings
    assert (found.kind, found.consequence, found.column) == ("rendered", "warn", "<|im_start|>")


@pytest.mark.parametrize("name", ["system", "input"])
def test_a_column_that_a_rendered_prompt_lacks_is_named(tmp_path, name):
    row = {"prompt": PROMPTS[0], "completion": "a0", name: "q"}
    assert read(tmp_path / "a.jsonl", row)[0][1] == "a0<|end|>"
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({**row, name: "Be brief."}) + "\n")
    tally = Tally(name="b")
    assert list(RowReader(find_files(path), DataSpec(train="-"), "sft", tally)) == []
    reason = f"'{name}' is no part of the prompt, which is rendered already"
    assert [one.reason for one in tally.named] == [reason]
