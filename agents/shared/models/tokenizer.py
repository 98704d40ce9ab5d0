"""Check the tokenizer files of a model's folder, without loading a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.shared.files.folder_files import open_regular, read_regular, require_own

MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of tokenizer.json; that of a vocabulary of 262,000 tokens has 33 MB."""
MAX_JSON_BYTES = 64 << 20
"""Maximum size of every other JSON file of a tokenizer."""
MAX_TEMPLATE_BYTES = 4 << 20
"""Maximum size of a chat template; the longest known have some ten thousand bytes."""
# Larger ones are parsed only where the time does not matter: a plan must answer at once.
_QUICK_BYTES = 1 << 20
_SOURCES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v3",
            "tekken.json", "tiktoken.model", "vocab.txt")  # fmt: skip
_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_NO_SOURCE = (b"<!DOCTYPE", b"<html", b"version https://git-lfs")
_ROUGH = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


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


def read_tokenizer(folder: Path, *, whole: bool) -> TokenizerFiles:
    """Check the tokenizer in a folder.

    Args:
        folder: the model's.
        whole: also parse a large tokenizer.json, which takes up to half a second.
    """
    problems: list[tuple[str, str]] = []
    found: dict[str, dict[str, Any] | None] = {}
    for name, limit in (
        ("tokenizer.json", MAX_TOKENIZER_BYTES),
        *((n, MAX_JSON_BYTES) for n in _ROUGH),
    ):
        try:
            found[name] = _read_object(folder / name, limit, whole=whole)
        except FileNotFoundError:
            continue
        except ValueError as error:
            problems.append((name, str(error)))
        except OSError as error:
            problems.append((name, f"cannot be used: it {error.strerror}"))
    problems += _find_template_problems(folder)
    tokenizer = found.get("tokenizer.json")
    if tokenizer is not None:
        problems += [("tokenizer.json", text) for text in _find_model_problems(tokenizer)]
    settings = found.get("tokenizer_config.json") or {}
    problems += [("tokenizer_config.json", text) for text in _find_setting_problems(settings)]
    if "tokenizer.json" not in found and not problems:
        problems += _find_source_problems(folder)
    templates = ("chat_template.jinja", "chat_template.json")
    return TokenizerFiles(
        problems=tuple(problems),
        is_there=_is_there(folder),
        has_template=bool(settings.get("chat_template"))
        or any((folder / name).exists() for name in templates),
        highest=_find_highest(tokenizer or {}),
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


def _find_source_problems(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the files from which a tokenizer would be made."""
    for name in (*_SOURCES, "vocab.json", "merges.txt"):
        try:
            with open_regular(folder / name, folder) as file:
                start = file.read(64).lstrip()
        except FileNotFoundError:
            continue
        except OSError as error:
            yield name, f"cannot be used: it {error.strerror}"
            continue
        if not start:
            yield name, "is empty"
        elif start.startswith(_NO_SOURCE):
            yield name, "is a page or a pointer, not the file itself"
    try:
        _read_object(folder / "vocab.json", MAX_JSON_BYTES, whole=True)
    except FileNotFoundError:
        pass
    except ValueError as error:
        yield "vocab.json", str(error)
    except OSError:
        pass  # named above


def _is_there(folder: Path) -> bool:
    if any((folder / name).exists() for name in ("tokenizer.json", *_SOURCES)):
        return True
    if any(folder.glob("*.tiktoken")):
        return True
    return (folder / "vocab.json").exists() and (folder / "merges.txt").exists()


def _read_object(path: Path, limit: int, *, whole: bool) -> dict[str, Any] | None:
    """Return the object in a JSON file; None: it is too large to be parsed now.

    Raises:
        ValueError: it is none; the text begins with a verb.
    """
    require_own(path, path.parent)
    if _QUICK_BYTES < path.stat().st_size <= limit and not whole:
        _check_ends(path)
        return None
    data = read_regular(path, path.parent, limit)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {str(error)[:80]}") from error
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    return value


def _check_ends(path: Path) -> None:
    """Check that a large file looks like a whole JSON object."""
    with open_regular(path, path.parent) as file:
        start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        file.seek(-64, 2)
        end = file.read().rstrip()[-1:]
    if start != b"{" or end != b"}":
        raise ValueError("is cut off, or no JSON object")


def _find_template_problems(folder: Path) -> Iterator[tuple[str, str]]:
    for path in (folder / "chat_template.jinja", folder / "chat_template.json"):
        try:
            read_regular(path, folder, MAX_TEMPLATE_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield path.name, f"cannot be used: it {error.strerror}"


def _find_highest(tokenizer: dict[str, Any]) -> tuple[str, int] | None:
    added = tokenizer.get("added_tokens")
    entries = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    numbered = [
        (str(one.get("content", ""))[:60], one["id"])
        for one in entries
        if type(one.get("id")) is int
    ]
    return max(numbered, key=lambda pair: pair[1], default=None)
