"""Tool calls of every spelling are rendered by the template's own tools, and learned as written."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.trainer.data.cache import load_examples, tokenize_kept
from agents.trainer.data.conversations import read_row
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.data.test_answers import mark
from tests.agents.trainer.ranks import DEMO, make_spec

TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]


def call(city, number=1, arguments=None):
    arguments = {"city": city} if arguments is None else arguments
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"abc12345{number}", "type": "function", "function": function}


ASKED = {"role": "user", "content": "Weather in Oslo?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [call("Oslo")]}
TOLD = {"role": "tool", "tool_call_id": "abc123451", "name": "get_weather", "content": "3"}
ANSWERED = {"role": "assistant", "content": "3 degrees."}
CHAT = [ASKED, CALLED, TOLD, ANSWERED]
LOOP = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    *CHAT,
    {"role": "user", "content": "And Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [call("Rome", 2)]},
    {**TOLD, "tool_call_id": "abc123452", "content": "9"},
    {"role": "assistant", "content": "9 degrees."},
]
SEVERAL = [
    {"role": "user", "content": "Weather in Oslo and Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [call("Oslo"), call("Rome", 2)]},
    TOLD,
    {**TOLD, "tool_call_id": "abc123452", "content": "9"},
    {"role": "assistant", "content": "3 and 9."},
]


@pytest.fixture(scope="module")
def tokenizer():
    found, _ = load_tokenizer(DEMO / "model")
    found.add_tokens(list(families.TOKENS), special_tokens=True)
    found.bos_token, found.eos_token = "<s>", "</s>"
    return found


def tokenize(tokenizer, template, row, data_format="chat"):
    tokenizer.chat_template = template
    (found,) = tokenize_rows(tokenizer, [read_row(1, row, data_format)], 2000)
    return found


def learned(tokenizer, found):
    return re.findall(r"\[\[(.*?)\]\](?!</s>)", mark(tokenizer, found), re.DOTALL)


def hermes(city):
    arguments = json.dumps({"city": city})
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


def gpt_oss(city):
    return (
        " to=functions.get_weather<|channel|>commentary json<|message|>"
        f'{{"city": "{city}"}}<|call|>'
    )


GLM = "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
# fmt: off
TABLE = {
    "QWEN2_5_TOOLS": (f"{hermes('Oslo')}<|im_end|>\n", "3 degrees.<|im_end|>\n"),
    "QWEN3_TOOLS": (f"{hermes('Oslo')}<|im_end|>\n", "3 degrees.<|im_end|>\n"),
    "HERMES_TOOLS": (f"{hermes('Oslo')}<|im_end|>\n", "3 degrees.<|im_end|>\n"),
    "LLAMA3_TOOLS": ('{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eot_id|>',
                     "3 degrees.<|eot_id|>"),
    "MISTRAL_TOOLS": ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, '
                      '"id": "abc123451"}]</s>', " 3 degrees.</s>"),
    "GLM4_TOOLS": ('get_weather\n{"city": "Oslo"}<|observation|>', "\n3 degrees.</s>"),
    "GLM4_5_TOOLS": (f"{GLM}<|observation|>", "\n3 degrees.</s>"),
    "GPT_OSS_TOOLS": (gpt_oss("Oslo"), "<|channel|>final<|message|>3 degrees.<|return|>"),
    "ARGUMENTS_AS_TEXT": ('<tool_call>get_weather\n```json\n{"city": "Oslo"}\n```</tool_call></s>',
                          "3 degrees.</s>"),
}
# fmt: on


@pytest.mark.parametrize("family", TABLE)
def test_a_call_is_learned_as_the_template_writes_it(tokenizer, family):
    found = tokenize(tokenizer, getattr(families, family), {"messages": CHAT, "tools": TOOLS})
    whole = mark(tokenizer, found)
    assert (
        tuple(re.findall(r"\[\[((?:\[TOOL_CALLS\] \[.*?\]</s>|.*?))\]\]", whole, re.DOTALL))
        == (TABLE[family])
    )
    messages = [dict(message) for message in CHAT]
    if family == "ARGUMENTS_AS_TEXT":
        messages[1]["tool_calls"] = [call("Oslo", arguments='{"city": "Oslo"}')]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    is_added = not text.endswith("</s>") and TABLE[family][-1].endswith("</s>")
    assert list(found.segments[0].ids) == [*ids, *[tokenizer.eos_token_id] * is_added]


@pytest.mark.parametrize("family", TABLE)
def test_tools_are_called_again_and_again(tokenizer, family):
    found = tokenize(tokenizer, getattr(families, family), {"messages": LOOP, "tools": TOOLS})
    whole = mark(tokenizer, found)
    assert whole.count("[[") == 5
    parts = whole.split("[[")[1:]
    heads = [part.partition("]]")[0] for part in parts]
    for part, said in zip(
        heads, ("Hello.", "Oslo", "3 degrees.", "Rome", "9 degrees."), strict=True
    ):
        assert said in part
    for context in [whole.split("[[")[0], *(part.partition("]]")[2] for part in parts)]:
        assert not any(one in context for one in ("Hello.", "degrees.", '"Oslo"', '"Rome"'))


SAME = {
    "text": {"messages": [ASKED, {**CALLED, "tool_calls": [call("Oslo", 1, '{"city": "Oslo"}')]},
                          TOLD, ANSWERED], "tools": TOOLS},
    "null content": {"messages": [ASKED, {**CALLED, "content": None}, TOLD, ANSWERED],
                     "tools": TOOLS},
    "functions": {"messages": [ASKED, {"role": "assistant", "content": None, "function_call": {
        "name": "get_weather", "arguments": '{"city": "Oslo"}'}},
        {"role": "function", "name": "get_weather", "content": "3"}, ANSWERED],
        "functions": [TOOL]},
    "ShareGPT": {"conversations": [
        {"from": "human", "value": "Weather in Oslo?"},
        {"from": "function_call", "value": json.dumps(call("Oslo")["function"])},
        {"from": "observation", "value": "3"}, {"from": "gpt", "value": "3 degrees."}],
        "tools": json.dumps([TOOL])},
    "tagged": {"messages": [ASKED, {"role": "tool_call", "content": hermes("Oslo")},
                            {"role": "tool_response", "content": "3"}, ANSWERED],
               "tools": json.dumps(TOOLS)},
    "texts in lists": {"messages": [ASKED, {**CALLED, "tool_calls": [json.dumps(call("Oslo"))]},
                                    TOLD, ANSWERED], "tools": [json.dumps(TOOL)]},
    "bare calls": {"messages": [ASKED, {"role": "assistant", "tool_calls": json.dumps(
        {"name": "get_weather", "parameters": {"city": "Oslo"}})}, {**TOLD, "content": 3},
        ANSWERED], "tools": {"name": "get_weather", **TOOL}},
    "prompt and completion": {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": TOOLS},
    "messages in a text": {"messages": json.dumps(CHAT), "tools": json.dumps(TOOLS)},
    "tools of a message": {"messages": [{**ASKED, "tools": TOOLS}, *CHAT[1:]]},
}  # fmt: skip


@pytest.mark.parametrize("spelling", SAME)
def test_all_spellings_are_one_conversation(tokenizer, spelling):
    row = {"messages": CHAT, "tools": TOOLS}
    expected = mark(tokenizer, tokenize(tokenizer, families.QWEN2_5_TOOLS, row))
    found = tokenize(tokenizer, families.QWEN2_5_TOOLS, SAME[spelling])
    assert mark(tokenizer, found) == expected


def test_several_calls_of_one_turn_are_learned_together(tokenizer):
    found = tokenize(tokenizer, families.QWEN2_5_TOOLS, {"messages": SEVERAL, "tools": TOOLS})
    both = f"{hermes('Oslo')}\n{hermes('Rome')}<|im_end|>\n"
    assert learned(tokenizer, found) == [both, "3 and 9.<|im_end|>\n"]
    calls = [json.dumps(one["function"]) for one in SEVERAL[1]["tool_calls"]]
    each = [{"role": "function_call", "content": said} for said in calls]
    one = [{"role": "function_call", "content": f"[{', '.join(calls)}]"}]
    for turns in (each, one):
        row = {"messages": [SEVERAL[0], *turns, *SEVERAL[2:]], "tools": TOOLS}
        other = tokenize(tokenizer, families.QWEN2_5_TOOLS, row)
        assert mark(tokenizer, other) == mark(tokenizer, found)


@pytest.mark.parametrize("family", ["LLAMA3_TOOLS", "GPT_OSS_TOOLS"])
def test_a_row_of_which_the_template_leaves_out_a_call_is_left_out(tokenizer, family):
    found = tokenize(tokenizer, getattr(families, family), {"messages": SEVERAL, "tools": TOOLS})
    assert isinstance(found, Skipped)
    assert re.search("leaves out some of its tool calls|only supports single", found.reason)


def test_ids_are_made_for_a_template_that_needs_them(tokenizer):
    found = tokenize(tokenizer, families.MISTRAL_TOOLS, SAME["ShareGPT"])
    whole = mark(tokenizer, found)
    assert whole.count('"id": "call00001"') == whole.count('"call_id": "call00001"') == 1
    longer = [{**message} for message in CHAT]
    longer[1] = {**CALLED, "tool_calls": [{**call("Oslo"), "id": "call_of_24_characters"}]}
    longer[2]["tool_call_id"] = "call_of_24_characters"
    other = tokenize(tokenizer, families.MISTRAL_TOOLS, {"messages": longer, "tools": TOOLS})
    assert mark(tokenizer, other) == whole


def test_pairs_share_their_tools(tokenizer):
    wrong = {"role": "assistant", "content": "", "tool_calls": [call("Rome")]}
    row = {"prompt": [ASKED], "chosen": [CALLED], "rejected": [wrong], "tools": TOOLS}
    found = tokenize(tokenizer, families.QWEN2_5_TOOLS, row, "preference")
    chosen, rejected = (mark(tokenizer, type(found)((segment,))) for segment in found.segments)
    assert chosen.endswith(f"assistant\n[[{hermes('Oslo')}<|im_end|>\n]]")
    assert rejected.endswith(f"assistant\n[[{hermes('Rome')}<|im_end|>\n]]")
    assert all("<tools>\n" in side for side in (chosen, rejected))


def test_a_text_before_a_call_and_its_mark(tokenizer):
    said = [{"type": "text", "text": "Wait. ", "train": False}]
    for content, expected in (("Wait. ", f"[[Wait. \n{hermes('Oslo')}"),
                              ([*said, {"type": "text", "text": "I look."}],
                               f"Wait. [[I look.\n{hermes('Oslo')}")):  # fmt: skip
        messages = [ASKED, {**CALLED, "content": content}, TOLD, ANSWERED]
        found = tokenize(tokenizer, families.QWEN2_5_TOOLS, {"messages": messages, "tools": TOOLS})
        assert f"assistant\n{expected}<|im_end|>" in mark(tokenizer, found)
    messages = [ASKED, {**CALLED, "train": False}, TOLD, ANSWERED]
    found = tokenize(tokenizer, families.QWEN2_5_TOOLS, {"messages": messages, "tools": TOOLS})
    assert learned(tokenizer, found) == ["3 degrees.<|im_end|>\n"]


def test_a_text_that_a_template_leaves_out_before_a_call_is_named(tokenizer):
    messages = [ASKED, {**CALLED, "content": "I look."}, TOLD, ANSWERED]
    found = tokenize(tokenizer, families.HERMES_TOOLS, {"messages": messages, "tools": TOOLS})
    assert ("template", "messages[].content") in found.notes


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("QWEN3_TOOLS", "<think>\nI look.\n</think>\n\n", "<think>\nCold.\n</think>\n\n"),
        ("GLM4_5_TOOLS", "\n<think>I look.</think>\n", "\n<think>Cold.</think>\n"),
        ("GPT_OSS_TOOLS", "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=",
         "<|channel|>analysis<|message|>Cold.<|end|><|start|>assistant<|channel|>final"),
    ],
)  # fmt: skip
def test_thoughts_of_a_call_are_learned_where_a_chat_shows_them(tokenizer, family, first, second):
    messages = [
        ASKED,
        {**CALLED, "reasoning_content": "I look."},
        TOLD,
        {**ANSWERED, "reasoning_content": "Cold."},
    ]
    found = tokenize(tokenizer, getattr(families, family), {"messages": messages, "tools": TOOLS})
    parts = learned(tokenizer, found)
    assert len(parts) == 2
    assert parts[0].startswith(first)
    assert parts[1].startswith(second)


@pytest.mark.parametrize("family", ["QWEN3_5", "DEEPSEEK_R1"])
def test_a_last_call_continues_the_thought_of_the_prompt(tokenizer, family):
    call_text = (
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
        "{% endfor %}"
    )
    template = getattr(families, family)
    for end in ("<|im_end|>\n{% else %}", "</s>"):
        template = template.replace(end, call_text + end)
    template = "{{ tools | tojson if tools }}" + template
    row = {"messages": [ASKED, {**CALLED, "reasoning_content": "I look."}], "tools": TOOLS}
    parts = learned(tokenizer, tokenize(tokenizer, template, row))
    assert len(parts) == 1
    assert re.fullmatch(
        r"(<think>\n)?I look\.\n</think>\n\n<tool_call>.*</tool_call>(<\|im_end\|>\n|</s>)",
        parts[0], re.DOTALL,
    )  # fmt: skip


WRONG = {
    "message 2 calls a tool without a name": {"tool_calls": [{"function": {"arguments": {}}}]},
    "the arguments of 'f' in message 2 should be JSON, but is '{city'": {
        "tool_calls": [{"name": "f", "arguments": "{city"}]},
    "the arguments of 'f' in message 2 should be an object, but are a list": {
        "tool_calls": [{"name": "f", "arguments": "[1]"}]},
    "'tool_calls' of message 2 should be JSON, but is 'f()'": {"tool_calls": "f()"},
}  # fmt: skip


@pytest.mark.parametrize("reason", WRONG)
def test_calls_that_cannot_be_read_are_named(reason):
    answer = {"role": "assistant", "content": "", **WRONG[reason]}
    for row, kind in (
        ({"messages": [ASKED, answer], "tools": TOOLS}, "chat"),
        ({"prompt": "Hi", "chosen": json.dumps([answer]), "rejected": "No"}, "preference"),
    ):
        said = reason if kind == "chat" else reason.replace("message 2", "message 1")
        with pytest.raises(ValueError, match=re.escape(said)):
            read_row(1, row, kind)
    with pytest.raises(ValueError, match="a tool in 'tools' has no name"):
        read_row(1, {"messages": CHAT, "tools": [{"description": "?"}]}, "chat")
    called = {"messages": [ASKED, {"role": "function_call", "content": "Hello"}]}
    with pytest.raises(ValueError, match="message 2, the call of a tool, should be JSON"):
        read_row(1, called, "chat")


def load(path, tokenizer, tmp_path, **data):
    spec = make_spec(data=DataSpec(train=str(path), format="auto", **data))
    return load_examples(find_files(path), "0" * 64, spec, tokenizer, tmp_path / "cache")


def test_a_template_without_tools_refuses_them_before_the_start(tokenizer, tmp_path):
    tokenizer.chat_template = families.CHATML
    path = tmp_path / "a.jsonl"
    rows = [{"messages": CHAT, "tools": TOOLS}, {"messages": LOOP[:2]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ExpectedError, match="has no place") as refused:
        load(path, tokenizer, tmp_path)
    assert "in 1 of 2 rows (50 %) 'messages[].tool_calls'" in refused.value.message
    assert "it also has 'tools'" in refused.value.message
    assert "Use a model whose chat template has tools" in refused.value.hint
    # Tools that are only offered can be ignored.
    path.write_text(json.dumps({"messages": LOOP[:2], "tools": TOOLS}) + "\n")
    with pytest.raises(ExpectedError, match="'tools' offers or calls tools"):
        load(path, tokenizer, tmp_path)
    found = load(path, tokenizer, tmp_path, ignore_columns=("tools",))
    assert len(found) == 1


def test_a_template_that_refuses_other_roles_has_no_place_for_tools(tokenizer):
    template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    found = tokenize(tokenizer, template + families.GEMMA, {"messages": CHAT, "tools": TOOLS})
    assert isinstance(found, Skipped)
    assert found.reason == (
        "the chat template of this model has no place for tool calls: roles must alternate"
    )


def test_tables_have_no_fields_of_other_tools(tokenizer, tmp_path):
    zone = {"type": "object", "properties": {"zone": {"type": "string", "enum": ["UTC"]}}}
    other = {"type": "function", "function": {"name": "get_time", "parameters": zone}}
    calls = [call("Oslo"), call("", 2, {"zone": "UTC"})]
    rows = [
        {"messages": [ASKED, {**CALLED, "tool_calls": [one]}, TOLD, ANSWERED], "tools": tools}
        for one, tools in zip(calls, (TOOLS, [other]), strict=True)
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    tally = Tally("x")
    data = DataSpec(train="-")
    reader = RowReader(find_files(path), data, "sft", tally)
    tokenizer.chat_template = families.QWEN2_5_TOOLS
    found = list(tokenize_kept(iter(reader), reader, tally, tokenizer, 2000, data))
    expected = [tokenize(tokenizer, families.QWEN2_5_TOOLS, row) for row in rows]
    marked = [mark(tokenizer, one) for one in found]
    assert [" ".join(text.split()) for text in marked] == [
        " ".join(mark(tokenizer, one).split()) for one in expected
    ]
    assert not any("null" in text for text in marked)


@pytest.mark.parametrize("name", ["qwen3_instruct_2507", "qwen3_vl", "lfm2_v2"])
@pytest.mark.parametrize("messages", [CHAT, LOOP, SEVERAL])
def test_learned_tokens_are_those_of_trl(name, messages):
    tokenizer, _ = load_tokenizer(DEMO / "model")
    folder = files("trl").joinpath("chat_templates")
    template, training = (
        folder.joinpath(f"{name}{kind}.jinja").read_text(encoding="utf-8")
        for kind in ("", "_training")
    )
    tokenizer.add_tokens(sorted(set(re.findall(r"<\|\w+\|>", template))), special_tokens=True)
    found = tokenize(tokenizer, template, {"messages": messages, "tools": TOOLS})
    theirs = tokenizer.apply_chat_template(
        messages, tools=TOOLS, chat_template=training, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    assert list(found.segments[0].ids) == theirs["input_ids"]
    assert found.segments[0].is_target.astype(int).tolist() == theirs["assistant_masks"]
