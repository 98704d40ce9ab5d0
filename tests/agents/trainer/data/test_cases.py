"""Files of many makers: each is read as its authors mean it, or refused in one clear sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from app.library.data import check_form
from tests.fakes.site import DEMO

CHARS = 60
CASES = Path(__file__).parent / "cases"
# File, format, number of rows, and what the first one teaches; of a pair both sides.
READ = (
    ("alp_empty_instruction.json", "alpaca", 30, "a0<|end|>"),
    ("alp_null_input.json", "alpaca", 30, "a0<|end|>"),
    ("ax_part_train.jsonl", "chat", 30, " a0<|end|>"),
    ("ax_part_weight.jsonl", "chat", 30, " a0<|end|>"),
    ("ax_train_detail.jsonl", "chat", 30, " 0 here<|end|>"),
    ("ax_train_flags.jsonl", "chat", 30, "b0<|end|>"),
    ("bom.csv", "alpaca", 30, "a0<|end|>"),
    ("book.txt", "text", 1, "hapter 1\n\nword word word word word word word word word word "),
    ("chosen_response.jsonl", "preference", 30, "g0<|end|> || b0<|end|>"),
    ("crlf.jsonl", "alpaca", 30, "a0<|end|>"),
    ("dpo_history_lf.jsonl", "preference", 30, "g0<|end|> || b0<|end|>"),
    ("empty_some.jsonl", "chat", 30, "b<|end|>"),
    ("guanaco_text.jsonl", "text", 30, "## Human: q0### Assistant: a0<|end|>"),
    ("hh_rlhf.jsonl", "preference", 30, "good0<|end|> || bad0<|end|>"),
    ("intel_orca.jsonl", "preference", 30, "good0<|end|> || bad0<|end|>"),
    ("keyed.json", "alpaca", 30, "a0<|end|>"),
    ("m11_train_str.jsonl", "chat", 30, "good0<|end|>"),
    ("m2_train_false_both.jsonl", "chat", 30, "b0<|end|>"),
    ("m3_loss_weight_lf_v1.jsonl", "chat", 30, "b0<|end|>"),
    ("m4_loss_weight_answer_only.jsonl", "chat", 30, "b0<|end|>"),
    ("m6_part_loss.jsonl", "chat", 30, " a0<|end|>"),
    ("mdfolder", "text", 3, " Read me\n\nThis repository.<|end|>"),
    ("n1_turn_objects.json", "chat", 30, "Hi.<|end|>Bo0<|end|>"),
    ("n1_turn_objects.jsonl", "chat", 30, "Hi.<|end|>Bo0<|end|>"),
    ("n2_turns_qa.json", "chat", 30, "Bo<|end|>x<|end|>"),
    (
        "n5_unsloth_text_eos.jsonl",
        "text",
        30,
        "elow is an instruction.\n\n### Instruction:\nq0\n\n### Response:\n",
    ),
    ("n7_alpaca_pre.jsonl", "alpaca", 30, "a0<|end|>"),
    ("n9_candidates.jsonl", "alpaca", 30, "a0<|end|>"),
    ("nested.parquet", "chat", 30, "a0<|end|>"),
    ("oa_developer.jsonl", "chat", 30, "a0<|end|>"),
    ("oa_name.jsonl", "chat", 30, "a0<|end|>"),
    ("oa_refusal.jsonl", "chat", 30, "I cannot.<|end|>"),
    ("oa_weight.jsonl", "chat", 30, "right0.<|end|>"),
    ("p1_tool_role_plain.jsonl", "chat", 30, "Let me look.<|end|>It is 0 degrees.<|end|>"),
    ("prerendered_instr.jsonl", "alpaca", 30, "a0<|im_end|><|end|>"),
    ("prompt_only_conv.jsonl", "chat", 30, "42<|end|>"),
    ("rlaif_accept.jsonl", "preference", 30, "g0<|end|> || b0<|end|>"),
    ("semicolon.csv", "alpaca", 30, "a0<|end|>"),
    ("sg_conversation_key.json", "chat", 30, "a0<|end|>"),
    ("sg_ends_human.json", "chat", 30, "a0<|end|>"),
    ("sg_items.json", "chat", 30, "a0<|end|>"),
    ("sg_system.json", "chat", 30, "a0<|end|>"),
    ("sg_two_gpt.json", "chat", 30, "a0<|end|>b0<|end|>"),
    ("spaces.csv", "alpaca", 30, "a0<|end|>"),
    ("splitfolder", "alpaca", 30, "a0<|end|>"),
    ("text_plus_label.jsonl", "text", 30, "ilm 0<|end|>"),
    ("tp_conv_implicit.jsonl", "preference", 30, "good0<|end|> || bad0<|end|>"),
    ("tp_implicit.jsonl", "preference", 30, " blue.<|end|> ||  green.<|end|>"),
    ("tp_std.jsonl", "preference", 30, " blue.<|end|> ||  green.<|end|>"),
    ("wrapped.json", "alpaca", 30, "a0<|end|>"),
)
# File, what the refusal says, what its advice says, and what the first row teaches by that advice.
REFUSED = (
    (
        "alp_output_list.json",
        "'output' should be a text or messages, but is a list of texts",
        "Give data with at least one row",
        "",
    ),
    (
        "ax_camel.jsonl",
        "the row has the keys ['message_1', 'message_2']",
        "data.columns: [instruction=message_1, output=message_2]",
        "a0<|end|>",
    ),
    (
        "ax_io.jsonl",
        "the row has the keys ['input', 'output']",
        "data.columns: [instruction=input, output=output]",
        "a0<|end|>",
    ),
    (
        "ax_oasst.jsonl",
        "the row has the keys ['INSTRUCTION', 'RESPONSE']",
        "data.columns: [instruction=INSTRUCTION, output=RESPONSE]",
        "a0<|end|>",
    ),
    (
        "ax_reflection.jsonl",
        "'corrected' holds a better answer than the one that would be learned",
        "data.columns: [output=corrected]",
        "good0<|end|>",
    ),
    (
        "ax_stepwise.jsonl",
        "the row has the keys ['completions', 'labels', 'prompt']",
        "Give data with at least one row",
        "",
    ),
    (
        "ax_tokenized.jsonl",
        "the row is tokenized already ('input_ids'); only texts are trained",
        "Give data with at least one row",
        "",
    ),
    (
        "columns.json",
        "'instruction' should be a text or messages, but is a list of texts",
        "Give data with at least one row",
        "",
    ),
    (
        "dialogue_list.jsonl",
        "the row has the keys ['dialog']",
        "data.columns: [messages=dialog]",
        "hello<|end|>fine<|end|>",
    ),
    (
        "dolly.jsonl",
        "'context' holds what the question is about, which would be left out",
        "data.columns: [input=context]",
        "a0<|end|>",
    ),
    (
        "dpo_system_prompt.jsonl",
        "'system_prompt' holds a system prompt, which would be left out",
        "data.columns: [system=system_prompt]",
        "g<|end|> || bad0<|end|>",
    ),
    (
        "first_row_odd.jsonl",
        ": 30 of 31 rows are malformed, the first in row 2: 'text' is missing",
        "Correct them, or name the right data.for",
        "",
    ),
    (
        "grpo_gsm.jsonl",
        "the conversation has no answer of the assistant",
        "Give data with at least one row",
        "",
    ),
    (
        "kto_tag.jsonl",
        "'kto_tag' calls rows bad examples, and they would be learned as good ones",
        "Take these rows out, pair them with good",
        "",
    ),
    (
        "latin1.csv",
        "byte 0xf6 in 'instruction' is not UTF-8",
        "data.encoding: cp1252",
        "Antwort gr\xf6\xdfer 0<|end|>",
    ),
    (
        "m10_feedback_both.jsonl",
        "'messages[].feedback' calls rows bad examples, and they would be learned as good ones",
        "Take these rows out, pair them with good",
        "",
    ),
    (
        "m8_verdict_both.jsonl",
        "'messages[].liked' calls rows bad examples, and they would be learned as good ones",
        "Take these rows out, pair them with good",
        "",
    ),
    (
        "mixed_formats.jsonl",
        ": 15 of 30 rows are malformed, the first in row 2: 'instruction' is missing",
        "Correct them, or name the right data.for",
        "",
    ),
    (
        "mmlu.jsonl",
        "'choices' holds what the question is about, which would be left out",
        "data.columns: [input=choices, output=choices.answer]",
        "a<|end|>",
    ),
    (
        "n10_candidates.json",
        "the row has the keys ['candidates', 'id']",
        "Give data with at least one row",
        "",
    ),
    (
        "n3_squad_orig.json",
        "the row has the keys ['paragraphs', 'title']",
        "Give data with at least one row",
        "",
    ),
    ("nul.jsonl", "'output' holds a NUL byte", "Give data with at least one row", ""),
    (
        "oa_vision.jsonl",
        "message 1 has a part without text ('image_url'); only text is trained",
        "Give data with at least one row",
        "",
    ),
    (
        "pairs_list.jsonl",
        "expected an object {...}, found a list",
        "data.columns: [instruction=0, output=1]",
        "a0<|end|>",
    ),
    (
        "pq_img.parquet",
        ": in 30 of 30 rows (100 %) 'image' holds pictures, sound or video, which are not trained",
        "Take these rows out, or set data.ignore_",
        "",
    ),
    (
        "pretty.jsonl",
        "not valid JSON: Expecting property name enclosed in double quotes at character 2",
        "Give data with at least one row",
        "",
    ),
    (
        "qa.csv",
        "'label' calls rows bad examples, and they would be learned as good ones",
        "Take these rows out, pair them with good",
        "",
    ),
    (
        "sg_bing.json",
        "message 2 has the role 'bing'; it must be one of ['system', 'user', 'assistant', 'tool']",
        "data.columns: [roles.assistant=bing]",
        "a0<|end|>",
    ),
    (
        "squad.jsonl",
        "the row has the keys ['answers', 'context', 'id', 'question', 'title']",
        "data.columns: [instruction=question, output=answers.text, input=context]",
        "a0<|end|>",
    ),
    (
        "surrogate.jsonl",
        "'output' holds half a character (a lone surrogate)",
        "Give data with at least one row",
        "",
    ),
    (
        "translation.jsonl",
        "the row has the keys ['translation']",
        "data.columns: [instruction=translation.en, output=translation.de]",
        "hallo0<|end|>",
    ),
    (
        "ultrachat_data.jsonl",
        "the row has the keys ['data', 'id']",
        "data.columns: [messages=data]",
        "a0<|end|>b<|end|>",
    ),
    (
        "utf16.txt",
        "is UTF-16, not text in UTF-8",
        "data.encoding: utf-16",
        "r\xfc\xdfe" + 4 * " an alle\nGr\xfc\xdfe",
    ),
    (
        "utf16le_nobom.jsonl",
        "is UTF-16-LE, not text in UTF-8",
        "data.encoding: utf-16-le",
        "a0<|end|>",
    ),
    (
        "xml.xml",
        ": '.xml' is not a kind of data file that Rackless reads",
        "Use .jsonl, .json, .csv, .tsv, .txt, .md, .html, ",
        "",
    ),
)
WITH_TOOLS = ("oa_tools", "oa_functions", "sg_functioncall", "dpo_tools", "pq_tools", "rs_")
"""Beginnings of the names of files that other tests read."""
ADVISED = tuple(row for row in REFUSED if row[3])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO / "model")[0]


def read(name: str, tokenizer: Any, data: DataSpec) -> tuple[str, int, str]:
    """Return format, number of rows, and what the first teaches, by the objective that fits."""
    for objective in ("sft", "dpo"):
        tally = Tally(name=name)
        reader = RowReader(find_files(CASES / name), data, objective, tally, enforce=True)
        try:
            rows = list(reader)
            tally.check_usable(len(rows))
        except ExpectedError as error:
            if objective == "sft" and "need objective dpo" in error.message:
                continue
            raise
        found = next(iter(tokenize_rows(tokenizer, rows[:1], 1 << 14)))
        assert not isinstance(found, Skipped)
        texts = [tokenizer.decode(one.ids[one.is_target]) for one in found.segments]
        return reader.format, len(rows), " || ".join(texts)
    raise AssertionError(name)


def check(name: str, data: DataSpec) -> None:
    """Check a case on this PC, as before a start."""
    check_form(*find_files(CASES / name).paths, data=data)


@pytest.mark.parametrize(("name", "data_format", "count", "learned"), READ)
def test_reads(tokenizer: Any, name: str, data_format: str, count: int, learned: str) -> None:
    found = read(name, tokenizer, DataSpec(train="-"))
    assert found[:2] == (data_format, count)
    assert found[2][:CHARS] == learned
    check(name, DataSpec(train="-"))


@pytest.mark.parametrize(("name", "says", "advice", "_"), REFUSED)
def test_refuses(tokenizer: Any, name: str, says: str, advice: str, _: str) -> None:
    with pytest.raises(ExpectedError) as refused:
        read(name, tokenizer, DataSpec(train="-"))
    assert says in refused.value.message
    assert advice in refused.value.hint


@pytest.mark.parametrize(("name", "_", "advice", "learned"), ADVISED)
def test_advice_works(tokenizer: Any, name: str, _: str, advice: str, learned: str) -> None:
    key, _, value = advice.removeprefix("data.").partition(": ")
    entries = tuple(one.strip() for one in value.strip("[]").split(","))
    options: Any = {key: entries if value.startswith("[") else value}
    data = DataSpec(train="-", **options)
    assert read(name, tokenizer, data)[2][:CHARS] == learned
    check(name, data)


def test_only_row_is_not_taken_for_rows_by_key(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"question": {"text": "q"}, "answer": {"text": "a"}}')
    tally = Tally(name="a")
    assert list(RowReader(find_files(path), DataSpec(train="-"), "sft", tally)) == []
    assert tally.num_rows == 1


def test_every_case_has_a_row() -> None:
    known = {row[0] for row in READ} | {row[0] for row in REFUSED}
    others = {path.name for path in CASES.iterdir()} - known
    assert {name for name in others if not name.startswith(WITH_TOOLS)} == set()
