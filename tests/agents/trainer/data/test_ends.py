"""Plain text begins and ends as the model's own tokenizer has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import processors

from agents.trainer.checkpoint.folder import read_checkpoint
from agents.trainer.checkpoint.state import read_resume_point
from agents.trainer.data.conversations import ConversationRow, ConversationTurn
from agents.trainer.data.tokenizer import load_tokenizer
from agents.trainer.data.tokens import tokenize_rows
from tests.agents.trainer.ranks import DEMO

PLAIN = [
    ConversationTurn(role="user", content="Who?"),
    ConversationTurn(role="assistant", content="Oren."),
]


def make_tokenizer(*, single=None, bos="<|begin|>", eos="<|end|>"):
    """Return the demo's tokenizer with other ends; `single` is what it makes of a text."""
    tokenizer = load_tokenizer(DEMO / "model")[0]
    if single is not None:
        names = [name for name in ("<|begin|>", "<|end|>") if name in single]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names],
        )
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    return tokenizer


STYLES = {
    "llama 3, gemma, mistral": ({"single": "<|begin|> $A"}, "<|begin|>", "<|end|>"),
    "smollm2": ({"bos": "<|user|>"}, "", "<|end|>"),
    "gpt-2": ({"bos": "<|end|>"}, "", "<|end|>"),
    "qwen": ({"bos": None}, "", "<|end|>"),
    "closes by itself": ({"single": "<|begin|> $A <|end|>"}, "<|begin|>", "<|end|>"),
    "without an end": ({"eos": None}, "", ""),
}


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("text", ["The river.", "The river.<|end|>", " a\n", "\u00e4\u6f22"])
def test_a_text_has_the_beginning_that_the_tokenizer_adds_and_one_end(style, text):
    changes, begin, end = STYLES[style]
    tokenizer = make_tokenizer(**changes)
    (row,) = tokenize_rows(tokenizer, [ConversationRow(number=1, text=text)], 500)
    (segment,) = row.segments
    bare = text.removesuffix("<|end|>") if end else text
    assert tokenizer.decode(segment.ids) == f"{begin}{bare}{end}"
    assert segment.is_target.tolist() == [False, *[True] * (len(segment.ids) - 1)]
    assert row.num_tokens == len(segment.ids)


def test_a_text_that_brings_its_beginning_keeps_one():
    tokenizer = make_tokenizer(single="<|begin|> $A")
    row = ConversationRow(number=1, text="<|begin|>The river.")
    (found,) = tokenize_rows(tokenizer, [row], 500)
    assert tokenizer.decode(found.segments[0].ids) == "<|begin|>The river.<|end|>"


def test_a_chat_whose_template_writes_its_beginning_keeps_one():
    tokenizer = make_tokenizer(single="<|begin|> $A")
    (found,) = tokenize_rows(tokenizer, [ConversationRow(number=1, turns=tuple(PLAIN))], 500)
    assert tokenizer.decode(found.segments[0].ids).count("<|begin|>") == 1


@pytest.mark.parametrize(("single", "begins"), [("<|begin|> $A", True), (None, False)])
def test_the_plain_template_begins_as_the_tokenizer_does(tmp_path, single, begins):
    tokenizer = make_tokenizer(single=single)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    again, plain = load_tokenizer(tmp_path)
    assert plain
    (found,) = tokenize_rows(again, [ConversationRow(number=1, turns=tuple(PLAIN))], 500)
    assert again.decode(found.segments[0].ids).startswith("<|begin|>") == begins


def test_a_run_that_an_earlier_version_began_goes_on_with_its_tokens():
    tokenizer = make_tokenizer(bos="<|user|>")
    turns = (PLAIN[0], ConversationTurn(role="assistant", content="Oren.", extra=(("name", "x"),)))
    tokenizer.chat_template = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    rows = [ConversationRow(number=1, text="The river."), ConversationRow(number=2, turns=turns)]
    texts = [
        tokenizer.decode(found.segments[0].ids)
        for found in tokenize_rows(tokenizer, rows, 500, rules=1)
    ]
    assert texts == ["<|user|>The river.<|end|>", "Who?Oren."]


def test_a_checkpoint_of_an_earlier_version_names_its_rules():
    recorded = Path(__file__).parents[3] / "recorded" / "node" / "runs" / "r1" / "checkpoints"
    (folder,) = recorded.iterdir()
    assert read_resume_point(read_checkpoint(folder)).text_rules == 1
