"""Rows that strangers write: each part is learned, shown or named, and none is lost silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.contract.spec import DataSpec
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.agents.trainer.data import chat_templates

TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "sky", "arguments": {}}}


def user(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def answer(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


MARKED = ("no_loss", "ignore", "skip", "exclude", "exclude_from_loss", "is_ignored", "masked")
THOUGHT = {"type": "thinking", "thinking": "Hm."}
# Row, what the demo model's template shows, and what is learned of it.
ROWS = (
    *(
        ({"messages": [user("q"), answer("bad", **{key: True}), user("r"), answer("b")]}, "", "b$")
        for key in MARKED
    ),
    ({"instruction": "Double it.", "input": 0, "output": "0"}, "Double it.\n\n0$", "0$"),
    ({"instruction": "Double it.", "input": 4.5, "output": "9"}, "Double it.\n\n4.5$", "9$"),
    ({"messages": None, "instruction": "q", "output": "a"}, "q$", "a$"),
    ({"chosen": None, "rejected": None, "messages": [user("q"), answer("a")]}, "q$", "a$"),
    ([user("q"), answer("a")], "q$", "a$"),
    ({"messages": [user("q"), answer([THOUGHT, {"type": "text", "text": "a"}])]}, "q$", "a$"),
)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def load(template: str) -> Any:
        folder = tmp_path_factory.mktemp("model") / "model"
        path = chat_templates.make_model(folder, template, chat_templates.TOKENS)
        return load_tokenizer(path)[0]

    return load


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_tokenizer(chat_templates.DEMO / "model")[0]


def read(folder: Path, row: Any, tokenizer: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the whole text, what is learned of it, and the findings that warn."""
    path = folder / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    reader = RowReader(find_files(path), DataSpec(train="-"), "sft", Tally(name="a"), enforce=True)
    (found,) = tokenize_rows(tokenizer, list(reader), 4096)
    assert not isinstance(found, Skipped), found
    (segment,) = found.segments
    texts = [tokenizer.decode(ids) for ids in (segment.ids, segment.ids[segment.is_target])]
    warned = [(one.kind, one.column) for one in reader.findings if one.consequence == "warn"]
    return texts[0].replace("<|end|>", "$"), texts[1].replace("<|end|>", "$"), warned


@pytest.mark.parametrize(("row", "shown", "learned"), ROWS)
def test_is_read(tmp_path: Path, demo: Any, row: Any, shown: str, learned: str) -> None:
    whole, found, warned = read(tmp_path, row, demo)
    assert (shown in whole, found, warned) == (True, learned, [])


def test_thoughts_in_parts_are_those_of_a_key(tmp_path: Path, make: Any) -> None:
    parts = [THOUGHT, {"type": "text", "text": "a"}]
    texts = [
        read(tmp_path, {"messages": [user("q"), message]}, make(chat_templates.QWEN3))
        for message in (answer(parts), answer("a", reasoning_content="Hm."))
    ]
    assert texts[0] == texts[1]
    assert "Hm." in texts[0][1]


@pytest.mark.parametrize("inner", ["Be brief.", "Be kind."])
def test_another_system_prompt_is_named(tmp_path: Path, demo: Any, inner: str) -> None:
    row = {"system": "Be brief.", "messages": [{"role": "system", "content": inner}, user("q")]}
    row["messages"].append(answer("a"))  # type: ignore[attr-defined] # a list
    whole, _, warned = read(tmp_path, row, demo)
    assert f"{inner}$" in whole
    assert warned == ([] if inner == row["system"] else [("other_system", "system")])


def test_the_thought_of_a_call_behind_a_text_is_kept(tmp_path: Path, make: Any) -> None:
    called = {"from": "function_call", "value": json.dumps(CALL["function"])}
    turns = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "Let me look."},
        {**called, "reasoning_content": "Which sky?"},
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "Blue."},
    ]
    row = {"conversations": turns, "tools": json.dumps(TOOLS)}
    _, learned, _ = read(tmp_path, row, make(chat_templates.QWEN3_TOOLS))
    assert "Which sky?" in learned
    assert "Let me look." in learned


def test_the_header_of_an_answer_behind_a_call_is_learned(tmp_path: Path, make: Any) -> None:
    # The thought of the call is left out once an answer follows, so the text is not a chat's.
    turns = [
        user("q"),
        answer("", tool_calls=[CALL], thinking="Look."),
        {"role": "tool", "content": "blue"},
        answer("Blue."),
        user("Thanks."),
    ]
    row = {"messages": turns, "tools": TOOLS}
    _, learned, _ = read(tmp_path, row, make(chat_templates.GPT_OSS_TOOLS))
    assert learned.endswith("<|channel|>final<|message|>Blue.$")


def test_a_masked_call_may_have_a_text_that_the_template_leaves_out(
    tmp_path: Path, make: Any
) -> None:
    called = answer("Let me look.", tool_calls=[CALL], weight=0)
    turns = [user("q"), called, {"role": "tool", "content": "blue"}, answer("Blue.")]
    row = {"messages": turns, "tools": TOOLS}
    _, learned, _ = read(tmp_path, row, make(chat_templates.HERMES_TOOLS))
    assert learned == "Blue.<|im_end|>\n"
