"""Ids and learned tokens of published templates and all spellings of conversations.

The expected mask is made without the code under test: ids are those of `apply_chat_template`, and
what is learned is each answer with the end that its family publishes.
"""

from __future__ import annotations

from functools import cache

import pytest
from jinja2 import TemplateError

from agents.contract.spec import DataSpec
from agents.shared.data.reshape import ColumnMapping
from agents.trainer.data.conversations import read_row
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.agents.trainer.data import chat_templates as families
from tests.agents.trainer.data import published
from tests.agents.trainer.data.test_answers import mark
from tests.agents.trainer.ranks import DEMO

IM, EOS = "<|im_end|>", "</s>"
DEEPSEEK = published.ENDS["deepseek"]
# Template, end token of the tokenizer, text behind an earlier answer and behind the last one, and
# text that a chat does not show before the last one.
# fmt: off
TEMPLATES = {
    "llama 2": (families.LLAMA2, EOS, " </s>", " </s>", " "),
    "llama 3": ("llama3", "<|eot_id|>", "<|eot_id|>", "<|eot_id|>", ""),
    "llama 3.1": ("llama3_1", "<|eot_id|>", "<|eot_id|>", "<|eot_id|>", ""),
    "llama 3.2": ("llama3_2", "<|eot_id|>", "<|eot_id|>", "<|eot_id|>", ""),
    "llama 4": (families.LLAMA4, "<|eot|>", "<|eot|>", "<|eot|>", ""),
    "qwen2.5": ("qwen2_5", IM, f"{IM}\n", f"{IM}\n", ""),
    "qwen3": ("qwen3", IM, f"{IM}\n", f"{IM}\n", ""),
    "qwen3.5": ("qwen3_5_nothink", IM, f"{IM}\n", f"{IM}\n", ""),
    "gemma 3": ("gemma3", "<end_of_turn>", "<end_of_turn>\n", "<end_of_turn>\n", ""),
    "mistral v0.3": (families.MISTRAL, EOS, EOS, EOS, " "),
    "tekken": (families.TEKKEN, EOS, EOS, EOS, ""),
    "phi-3": ("phi3", "<|endoftext|>", "<|end|>\n", "<|end|>\n<|endoftext|>", ""),
    "phi-4": (families.PHI4, IM, IM, IM, ""),
    "glm-4": (families.GLM4, EOS, "", EOS, "\n"),
    "glm-4.5": ("glm4moe", "<|endoftext|>", "", "<|endoftext|>", "\n"),
    "gpt-oss": ("gptoss", "<|return|>", "<|end|>", "<|return|>", "<|channel|>final<|message|>"),
    "deepseek-v3": ("deepseekv3", DEEPSEEK, DEEPSEEK, DEEPSEEK, "\n</think>\n\n"),
    "deepseek-r1": ("deepseek_r1_distill", DEEPSEEK, DEEPSEEK, DEEPSEEK, "\n</think>\n\n"),
    "smollm3": (families.SMOLLM3, IM, f"{IM}\n", f"{IM}\n", ""),
    "none": (None, "<|end|>", "<|end|>", "<|end|>", ""),
}
# fmt: on
# Written behind the generation prompt, where a finished conversation begins the answer otherwise.
CONTINUED = {"deepseek-v3", "deepseek-r1"}
# Earlier answers that the template begins like the last one.
BEGUN = {"llama 2", "mistral v0.3", "glm-4", "glm-4.5", "gpt-oss"}
SYSTEM = "Be kind."


def chat(*said, system=""):
    roles = ("user", "assistant")
    turns = [{"role": roles[place % 2], "content": one} for place, one in enumerate(said)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


def share(turns):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[one["role"]], "value": one["content"]} for one in turns]


def part(turns):
    return [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in turns]


ONE, TWO = chat("Hi there", "Yes."), chat("Hi there", "Yes.", "And now", "No way.")
RULED, OPEN = chat("Hi there", "Yes.", system=SYSTEM), TWO[:3]
FORMATS = {
    "messages": ("chat", {"messages": TWO}, TWO),
    "system": ("chat", {"messages": RULED}, RULED),
    "developer": ("chat", {"messages": [{**RULED[0], "role": "developer"}, *ONE]}, RULED),
    "system next to it": ("chat", {"messages": ONE, "system": SYSTEM}, RULED),
    "sharegpt": ("chat", {"conversations": share(TWO)}, TWO),
    "parts": ("chat", {"messages": part(TWO)}, TWO),
    "prompt and completion": ("chat", {"prompt": ONE[:1], "completion": ONE[1:]}, ONE),
    "an open question": ("chat", {"messages": OPEN}, OPEN),
    "alpaca": ("alpaca", {"instruction": "Hi there", "input": "", "output": "Yes."}, ONE),
    "alpaca with a system": (
        "alpaca", {"system": SYSTEM, "instruction": "Hi there", "output": "Yes."}, RULED,
    ),
    "alpaca with a history": (
        "alpaca",
        {"instruction": "And now", "output": "No way.", "history": [["Hi there", "Yes."]]},
        TWO,
    ),
    "question and answer": ("alpaca", {"question": "Hi there", "answer": "Yes."}, ONE),
}  # fmt: skip


@cache
def load(name):
    template, end, *_ = TEMPLATES[name]
    if template is None:
        tokenizer, _ = load_tokenizer(
            DEMO / "model", data=DataSpec(train="t", chat_template="alpaca")
        )
        return tokenizer
    text = template if "{" in template else published.read(template)
    tokenizer = published.make_tokenizer(f"{text}<think></think>", end)
    tokenizer.chat_template = text
    return tokenizer


def stop_clock(template):
    """Return a template with the day on which every template is rendered."""
    for sign, day in (("%Y-%m-%d", "2024-07-26"), ("%d %b %Y", "26 Jul 2024")):
        for quote in "\"'":
            template = template.replace(f"strftime_now({quote}{sign}{quote})", f"'{day}'")
    assert "strftime_now(" not in template
    return template


def render(tokenizer, turns, *, asks=False):
    """Return the text of Transformers."""
    try:
        return tokenizer.apply_chat_template(
            turns,
            chat_template=stop_clock(tokenizer.chat_template),
            tokenize=False,
            add_generation_prompt=asks,
        )
    except (TemplateError, TypeError):
        assert turns[0]["role"] == "system"
        return ""


def fold(tokenizer, turns):
    """Return the turns with a system turn that the template does not take in the question."""
    if turns[0]["role"] != "system" or SYSTEM in render(tokenizer, turns):
        return turns
    first = {**turns[1], "content": f"{SYSTEM}\n\n{turns[1]['content']}"}
    return [first, *turns[2:]]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("form", FORMATS)
def test_ids_are_those_of_transformers_and_each_answer_is_learned_with_its_end(name, form):
    _, end, earlier, last, begin = TEMPLATES[name]
    data_format, row, turns = FORMATS[form]
    tokenizer = load(name)
    shaped = read_row(1, ColumnMapping().apply(row), data_format)
    (found,) = tokenize_rows(tokenizer, [shaped], 2000)
    turns = fold(tokenizer, turns)
    finished = render(tokenizer, turns)
    is_answered = turns[-1]["role"] == "assistant"
    learned = [one["content"] for one in turns if one["role"] == "assistant"]
    expected = [f"{begin if name in BEGUN else ''}{said}{earlier}" for said in learned]
    if is_answered:
        expected[-1] = f"{begin}{learned[-1]}{last}"
        if name in CONTINUED:
            finished = f"{render(tokenizer, turns[:-1], asks=True)}{expected[-1]}"
        elif not finished.endswith(end) and earlier == "" and name != "none":
            finished += end
    (segment,) = found.segments
    assert segment.ids.tolist() == tokenizer(finished, add_special_tokens=False)["input_ids"]
    shown = mark(tokenizer, found)
    assert [part.partition("]]")[0] for part in shown.split("[[")[1:]] == expected


# ------------------------------------------------------------------- TRL's own masks

# Reasons in docs/templates.md.
SHOWN = "a chat shows the beginning of the answer"
THOUGHT = "a chat shows the thought's beginning, or the empty thought"
BEHIND = "white space behind an end token"
NEXT_ROLE = "the next role ends a turn"
DIFFERENCES = {
    "deepseek_r1_distill": {SHOWN, THOUGHT},
    "deepseekv3": {SHOWN, THOUGHT},
    "glm4moe": {NEXT_ROLE, THOUGHT},
    "gptoss": {SHOWN},
    "llava_next": {BEHIND},
    "muse_glimmer": {SHOWN},
    "nemotron_3_5_lightning": {THOUGHT},
    "nemotron_3_nano": {THOUGHT},
    "nemotron_3_super": {THOUGHT},
    "nemotron_3_ultra": {THOUGHT},
    "qwen2_5": {SHOWN},
    "qwen3": {THOUGHT},
    "qwen3_5_nothink": {THOUGHT},
    "qwen3_5_think": {THOUGHT},
    "qwen3_6": {THOUGHT},
    "qwen3_8": {THOUGHT},
}
# A thought in the content is given to these in the key that they write it from.
MOVED = ("diffusion_gemma", "gptoss", "muse_glimmer")
VISION = ("idefics3", "llava_next", "smolvlm")
TRAINED = sorted(
    path.name.removesuffix("_training.jinja") for path in published.folder().glob("*_training.*")
)
ROWS = {
    "one": ONE,
    "two": TWO,
    "system": chat("Hi there", "Yes.", "And now", "No way.", system=SYSTEM),
    "open": OPEN,
    "thought": chat("Hi", "<think>\nhm\n</think>\n\nYes."),
    "thought by key": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"},
    ],
}


def explain(name, tokenizer, turns, theirs, ours):
    """Return the reasons by which two masked texts differ; None: another difference."""
    known = DIFFERENCES.get(name, set())
    answers = [one["content"] for one in turns if one["role"] == "assistant"]
    if NEXT_ROLE in known:
        theirs = theirs.replace("<|user|>]]", "]]<|user|>")
        theirs = (
            theirs.removesuffix("<|user|>") if answers and turns[-1]["role"] != "user" else theirs
        )
        ours = ours.replace("<|endoftext|>]]", "]]")
    if BEHIND in known:
        ours = ours.replace("</s> ]]", "</s>]] ")
    if SHOWN in known:  # the header of the answer
        asked = render(tokenizer, turns[:1])
        header = render(tokenizer, turns[:1], asks=True).removeprefix(asked)
        assert header
        for begun in (header, "\n"):
            theirs = theirs.replace(f"[[{begun}", f"{begun}[[")
        if "<think>" in header:
            bare = header.partition("<think>")[0]
            theirs = theirs.replace(f"[[{bare}", f"{bare}[[")
    if THOUGHT in known:
        # Everything up to the answer's own text is left out of the comparison, on both sides, where
        # it is thought alone.
        own = answers[-1].rpartition("</think>")[2].strip()
        return (
            theirs.rpartition(own)[2].replace("[[", "") == ours.rpartition(own)[2].replace("[[", "")
            and own in ours.rpartition("[[")[2]
            and own in theirs.rpartition("[[")[2]
        )
    return theirs == ours


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("row", ROWS)
def test_masks_are_those_of_trl_or_differ_for_a_documented_reason(name, row):
    turns = ROWS[row]
    training, plain = published.read(f"{name}_training"), published.read(name)
    tokenizer = published.make_tokenizer(f"{plain}{training}", published.find_end(name))
    tokenizer.chat_template = plain
    (found,) = tokenize_rows(tokenizer, [read_row(1, {"messages": turns}, "chat")], 5000)
    ours = mark(tokenizer, found)
    turns = part(turns) if name in VISION else turns
    turns = fold(tokenizer, turns)
    if row == "thought" and name in MOVED:
        turns = ROWS["thought by key"]
    tokenizer.chat_template = stop_clock(training)
    their = tokenizer.apply_chat_template(
        turns, return_dict=True, return_assistant_tokens_mask=True
    )
    theirs, before = "", False
    for token, is_target in zip(their["input_ids"], their["assistant_masks"], strict=True):
        theirs += "" if bool(is_target) == before else "[[" if is_target else "]]"
        theirs, before = theirs + tokenizer.decode([token]), bool(is_target)
    theirs += "]]" if before else ""
    tokenizer.chat_template = plain
    if name not in DIFFERENCES:
        assert ours == theirs
    elif ours != theirs:
        assert explain(name, tokenizer, turns, theirs, ours), (ours, theirs)
