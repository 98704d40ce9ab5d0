"""Another template, its options, new tokens, and the part that is learned."""

from __future__ import annotations

import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.shared.data.known_templates import BEGIN, KNOWN
from agents.trainer.data.conversations import read_row
from agents.trainer.data.templates import render_question
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.data.chat_templates import make_model
from tests.agents.trainer.data.test_answers import mark
from tests.agents.trainer.ranks import DEMO

TWO = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And"},
    {"role": "assistant", "content": "No."},
]


def show(tokenizer, messages=TWO, *, learn="answers", name="messages", data_format="chat"):
    """Return the text of a row with marks around what is learned."""
    row = read_row(1, {name: messages} if isinstance(messages, list) else messages, data_format)
    (found,) = tokenize_rows(tokenizer, [row], 500, learn=learn)
    return mark(tokenizer, found)


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model", families.QWEN3, families.TOKENS)


def load(folder, **keys):
    return load_tokenizer(folder, data=DataSpec(train="t", **keys))[0]


@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        ("answers", "{s}{u}[[Yes.<|im_end|>\n]]{v}[[No.<|im_end|>\n]]"),
        ("last_answer", "{s}{u}Yes.<|im_end|>\n{v}[[No.<|im_end|>\n]]"),
    ],
)
def test_the_learned_part_is_a_choice(model, learn, expected):
    parts = {
        "s": "<|im_start|>system\nBe kind.<|im_end|>\n",
        "u": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "v": "<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n",
    }
    tokenizer = load(model, chat_template="chatml")
    assert show(tokenizer, learn=learn) == expected.format(**parts)


def test_everything_is_learned_but_what_the_data_excludes(model):
    tokenizer = load(model, chat_template="chatml")
    whole = show(tokenizer, learn="everything")
    # No token precedes the first one to predict it.
    assert whole.startswith("<|im_start|>[[system\nBe kind.")
    assert whole.count("[[") == 1
    asked = [{**one, "train": one["content"] not in ("Hi", "No.")} for one in TWO]
    assert show(tokenizer, asked, learn="everything") == (
        "<|im_start|>[[system\nBe kind.<|im_end|>\n<|im_start|>user\n]]Hi[[<|im_end|>\n<|im_start|>"
        "assistant\nYes.<|im_end|>\n<|im_start|>user\nAnd<|im_end|>\n<|im_start|>assistant\n]]"
        "No.<|im_end|>\n"
    )


def test_everything_of_a_template_without_an_end_still_ends(model):
    tokenizer = load(model, chat_template=families.GLM4)
    assert show(tokenizer, TWO[1:3], learn="everything").endswith("Yes.<|end|>]]")


def test_alpaca_rows_follow_the_key_and_pairs_do_not(model):
    tokenizer = load(model, chat_template="chatml")
    asked = {"instruction": "Hi", "output": "Yes."}
    assert show(tokenizer, asked, learn="everything", data_format="alpaca").count("[[") == 1
    pair = {"prompt": "Hi", "chosen": "Yes.", "rejected": "No."}
    row = read_row(1, pair, "preference")
    found = [
        next(tokenize_rows(tokenizer, [row], 500, learn=learn))
        for learn in ("answers", "everything")
    ]
    masks = [[one.is_target.tolist() for one in row.segments] for row in found]
    assert masks[0] == masks[1]


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_template_teaches_each_answer_and_its_end(model, name):
    tokenizer = load(model, chat_template=name)
    tokenizer.eos_token = "</s>"
    shown = show(tokenizer)
    learned = [part.partition("]]")[0] for part in shown.split("[[")[1:]]
    ends = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "gemma": "<end_of_turn>"}
    assert [one.strip() for one in learned] == [
        f"{said}{ends.get(name, '</s>')}" for said in ("Yes.", "No.")
    ]
    assert shown.count("Be kind.") == 1
    assert KNOWN[name].startswith(BEGIN)
    # The demo's tokenizer begins no text with its BOS.
    assert not shown.startswith("<|begin|>")


def test_the_option_of_a_template_holds_in_training_and_in_a_chat(model):
    question = [{"role": "user", "content": "Hi"}]
    plain, off, on = (
        load(model, template_options=options)
        for options in ((), ("enable_thinking=false",), ("enable_thinking=true",))
    )
    assert render_question(plain, question).endswith("assistant\n")
    assert render_question(off, question).endswith("assistant\n<think>\n\n</think>\n\n")
    rows = [show(tokenizer, TWO[1:3]) for tokenizer in (plain, off, on)]
    context = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    silent = f"{context}<think>\n\n</think>\n\n[[Yes.<|im_end|>\n]]"
    # A chat that thinks does not show the empty thought, so the model has to write it.
    written = f"{context}[[<think>\n\n</think>\n\nYes.<|im_end|>\n]]"
    assert rows == [silent, silent, written]


def test_options_of_all_kinds_are_values(model):
    template = "{{ depth + 1 }}{{ name }}{{ 'on' if flag else 'off' }}\n" + families.CHATML
    options = ("depth=2", 'name=a"b\u00e4', "flag=false")
    tokenizer = load(model, chat_template=template, template_options=options)
    question = [{"role": "user", "content": "Hi"}]
    assert render_question(tokenizer, question).startswith('3a"b\u00e4off\n<|im_start|>')


def test_what_a_template_lacks_is_refused(model):
    with pytest.raises(ExpectedError, match="no option enable_thinking"):
        load(model, chat_template="chatml", template_options=("enable_thinking=false",))
    with pytest.raises(ExpectedError, match="which is no template"):
        load(model, chat_template="chatlm")


@pytest.mark.parametrize(
    "keys",
    [
        {"template_options": ("enable_thinking",)},
        {"template_options": ("messages=1",)},
        {"template_options": ("a=1", "a=2")},
        {"template_options": ("a-b=1",)},
        {"chat_template": " "},
        {"new_tokens": ("<a>", "<a>")},
    ],
)
def test_keys_that_make_no_sense_are_refused(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        DataSpec(train="t", **keys)


def test_new_tokens_follow_those_of_the_tokenizer(model):
    before = load_tokenizer(model)[0]
    tokenizer = load(model, new_tokens=("<a>", "<|im_end|>", "<b>"))
    assert tokenizer("x<a>y<b>", add_special_tokens=False)["input_ids"][1::2] == [
        len(before), len(before) + 1,
    ]  # fmt: skip
    end = "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids(end) == before.convert_tokens_to_ids(end)
    assert tokenizer.decode([len(before)], skip_special_tokens=True) == "<a>"


def test_new_tokens_of_the_template_are_control_tokens_and_others_are_shown():
    tokens = ("<|im_start|>", "<|im_end|>", "<think>", "<tool_call>")
    data = DataSpec(train="t", chat_template=families.QWEN3_5, new_tokens=tokens)
    tokenizer = load_tokenizer(DEMO / "model", data=data)[0]
    shown = tokenizer.decode(
        tokenizer.convert_tokens_to_ids(list(tokens)), skip_special_tokens=True
    )
    assert shown == "<think><tool_call>"


def test_a_model_without_a_template_gets_the_named_one():
    tokenizer, is_plain = load_tokenizer(
        DEMO / "model", data=DataSpec(train="t", chat_template="alpaca")
    )
    assert not is_plain
    assert "### Response:" in show(tokenizer)
