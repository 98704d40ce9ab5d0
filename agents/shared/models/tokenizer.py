"""Judge the tokenizer files of a model's folder, without loading a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agents.shared.models.model_files import TEMPLATES, TOKENIZER_SOURCES, ModelFiles

_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_NO_SOURCE = (b"<!DOCTYPE", b"<html", b"version https://git-lfs")
# Files that cannot be read, in the order in which they are named.
_READ = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    *TEMPLATES,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """What the files of a tokenizer say."""

    problems: tuple[tuple[str, str], ...] = ()
    """File, and what is wrong with it: a text that begins with a verb."""
    is_there: bool = True
    """Whether there is any file from which a tokenizer can be made."""
    has_template: bool = False
    """Whether there is a chat template."""
    highest: tuple[str, int] | None = None
    """Added token with the highest number; None: none, or the file was not parsed."""


def judge_tokenizer(files: ModelFiles) -> TokenizerFiles:
    """Return what the tokenizer files of a folder say, and what is wrong with them."""
    problems = [(name, files.problems[name]) for name in _READ if name in files.problems]
    tokenizer = files.config("tokenizer.json")
    if files.objects.get("tokenizer.json") is not None:
        problems += [("tokenizer.json", text) for text in _find_model_problems(tokenizer)]
    settings = files.config("tokenizer_config.json")
    problems += [("tokenizer_config.json", text) for text in _find_setting_problems(settings)]
    if "tokenizer.json" not in files.names and not problems:
        problems += _find_source_problems(files)
    return TokenizerFiles(
        problems=tuple(problems),
        is_there=_is_there(files.names),
        has_template=bool(settings.get("chat_template")) or not files.names.isdisjoint(TEMPLATES),
        highest=_find_highest(tokenizer),
    )


def _find_model_problems(tokenizer: dict[str, Any]) -> Iterator[str]:
    """Yield what keeps the library of the tokenizers from reading tokenizer.json."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    if not isinstance(model, dict):
        yield "has no object named model"
        return
    kind = model.get("type")
    if kind is not None and kind not in _MODELS:
        yield f"has a model of the unknown type {ascii(kind)[:40]}"
    elif not isinstance(model.get("vocab"), (dict, list)) or not model["vocab"]:
        yield "has no vocabulary"
    if added is not None and not (
        isinstance(added, list) and all(isinstance(one, dict) for one in added)
    ):
        yield "has added_tokens that are no list of objects"


def _find_setting_problems(settings: dict[str, Any]) -> Iterator[str]:
    for name in _SPECIAL:
        if not isinstance(settings.get(name), (str, dict, type(None))):
            yield f"has an {name} that is no text"
    # Some models have several templates, each with a name.
    if not isinstance(settings.get("chat_template"), (str, list, dict, type(None))):
        yield "has a chat_template that is no text"


def _find_source_problems(files: ModelFiles) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the files from which a tokenizer would be made."""
    for name in (*TOKENIZER_SOURCES, "vocab.json", "merges.txt"):
        start = files.starts.get(name)
        if start is None and name in files.problems:
            yield name, files.problems[name]
        elif start == b"":
            yield name, "is empty"
        elif start is not None and start.startswith(_NO_SOURCE):
            yield name, "is a page or a pointer, not the file itself"
    if "vocab.json" in files.starts and "vocab.json" in files.problems:
        yield "vocab.json", files.problems["vocab.json"]


def _is_there(names: frozenset[str]) -> bool:
    if not names.isdisjoint(("tokenizer.json", *TOKENIZER_SOURCES)):
        return True
    return any(n.endswith(".tiktoken") for n in names) or {"vocab.json", "merges.txt"} <= names


def _find_highest(tokenizer: dict[str, Any]) -> tuple[str, int] | None:
    added = tokenizer.get("added_tokens")
    entries = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    numbered = [
        (str(one.get("content", ""))[:60], one["id"])
        for one in entries
        if type(one.get("id")) is int
    ]
    return max(numbered, key=lambda pair: pair[1], default=None)
