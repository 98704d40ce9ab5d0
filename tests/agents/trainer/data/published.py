"""Published chat templates, as TRL ships them, and tokenizers with their control tokens."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agents.trainer.data.tokenizer import load_tokenizer
from tests.agents.trainer.ranks import DEMO

_CONTROL = re.compile(
    r"<\|[^|>\s']{1,40}\|>|</?(?:think|s|bos|eos|start_of_turn|end_of_turn|tool_call)>"
    r"|\[/?(?:INST|gMASK|SYSTEM_PROMPT)\]|<sop>|<\uff5c[^\uff5c]*\uff5c>|<end_of_utterance>"
    r"|<\|turn>|<turn\|>"
)
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics": "<end_of_utterance>",
    "lfm": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "muse": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|endoftext|>",
    "qwen": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}
"""End token of each family's tokenizer; others have `</s>`."""


def folder() -> Path:
    """Return the folder of TRL's templates."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "chat_templates"


def read(name: str) -> str:
    """Return a template."""
    return (folder() / f"{name}.jinja").read_text(encoding="utf-8")


def list_families() -> list[str]:
    """Return the names of all templates for chats."""
    names = (path.stem for path in folder().glob("*.jinja"))
    return sorted(name for name in names if not name.endswith("_training"))


def find_end(name: str) -> str:
    """Return the end token of a family's tokenizer."""
    known = [start for start in ENDS if name.startswith(start)]
    return ENDS[max(known, key=len)] if known else "</s>"


def find_tokens(text: str, end: str) -> list[str]:
    """Return the control tokens that a tokenizer needs for a template."""
    return sorted({*_CONTROL.findall(text), end, "<s>"})


def make_tokenizer(text: str, end: str) -> Any:
    """Return the demo's tokenizer with the control tokens of a template."""
    tokenizer, _ = load_tokenizer(DEMO / "model")
    tokenizer.add_tokens(find_tokens(text, end), special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", end
    tokenizer.chat_template = text
    return tokenizer
