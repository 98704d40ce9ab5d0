"""Load a model's tokenizer without torch, which a data preview does not need."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from agents.contract.data import parse_options
from agents.contract.spec import DataSpec
from agents.errors import ExpectedError, first_line
from agents.foreign_code import forbid
from agents.shared.data.columns import THOUGHT_MARKS
from agents.shared.data.known_templates import KNOWN, PLAIN_TEMPLATE, is_template
from agents.state import read_json
from agents.trainer.data import templates
from agents.trainer.data.tokenizer_bounds import LOAD_BYTES, LOAD_S, bounded, refuse_growth
from agents.trainer.data.tokens import TEXT_RULES, begin_template

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
_ADDED_FILE = "added_tokens.json"


def load_tokenizer(
    path: Path, rules: int = TEXT_RULES, data: DataSpec | None = None
) -> tuple[Any, bool]:
    """Return the tokenizer, and whether it got the plain chat template.

    Args:
        path: folder of the model.
        rules: version of `tokens.TEXT_RULES` of the run.
        data: source of another template, its options and new tokens; None for the model's own.

    Raises:
        ExpectedError: the tokenizer is missing, or cannot map tokens to characters, or a template
            is unknown or lacks an option.
    """
    forbid(path)
    try:
        with bounded(LOAD_S, LOAD_BYTES):
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
    except ExpectedError:
        raise
    except Exception as error:
        known = (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError)
        if not isinstance(error, (*known, RecursionError, IndexError)):
            raise
        raise ExpectedError(
            f"The tokenizer in {path} cannot be loaded: {first_line(error)}.",
            "The model's folder needs tokenizer.json and tokenizer_config.json",
        ) from error
    if not tokenizer.is_fast:
        raise ExpectedError(
            f"The tokenizer in {path} has no fast form (tokenizer.json).",
            "Save it once with AutoTokenizer.from_pretrained(..., use_fast=True)",
        )
    refuse_growth(tokenizer)
    tokenizer.model_max_length = int(1e30)  # `tokens` truncates rows itself and counts them
    is_plain = not tokenizer.chat_template and (data is None or data.chat_template is None)
    if is_plain:
        tokenizer.chat_template = begin_template(tokenizer, PLAIN_TEMPLATE, rules)
    if data is not None:
        _set_template(tokenizer, data, rules)
    _add_tokens(tokenizer, data.new_tokens if data is not None else ())
    return tokenizer, is_plain


def changes_template(data: DataSpec) -> bool:
    """Return whether a run's chat template is another one than its model's."""
    return bool(data.chat_template or data.template_options)


def _add_tokens(tokenizer: Any, tokens: tuple[str, ...]) -> None:
    """Add tokens behind those of a tokenizer; those that it has keep their ids.

    The ids of the others are `tokenizer.new_token_ids`.
    """
    known = tokenizer.get_vocab() if tokens else {}
    new = [token for token in tokens if token not in known]
    # A decoded answer shows all but those that the template puts around turns.
    frame = _render_frame(tokenizer) if new else ""
    for token in new:
        is_control = token in frame and not any(token in pair for pair in THOUGHT_MARKS)
        # Not normalized: a token is found as it is written.
        added = AddedToken(token, normalized=False, special=is_control)
        tokenizer.add_tokens([added], special_tokens=is_control)
    tokenizer.new_token_ids = tuple(tokenizer.convert_tokens_to_ids(new))


def _render_frame(tokenizer: Any) -> str:
    """Return what the chat template puts around two questions and an answer, or nothing."""
    asked = {"role": "user", "content": "a"}
    with contextlib.suppress(ExpectedError):  # the data shows whether it can be rendered
        said = [asked, {"role": "assistant", "content": "a"}, asked]
        return templates.render_question(tokenizer, said)
    return ""


def _set_template(tokenizer: Any, data: DataSpec, rules: int) -> None:
    own = data.chat_template
    if own is not None and own not in KNOWN and not is_template(own):
        raise ExpectedError(
            f"data.chat_template is {own[:80]!r}, which is no template.",
            f"Give the text of a Jinja template, or one of {', '.join(KNOWN)}",
        )
    if own is not None:
        tokenizer.chat_template = (
            begin_template(tokenizer, KNOWN[own], rules) if own in KNOWN else own
        )
    if options := parse_options(data.template_options):
        template = templates.choose(tokenizer)
        _require_options(template, list(options))
        tokenizer.chat_template = fix_options(template, options)


def fix_options(template: str, options: dict[str, Any]) -> str:
    """Return a chat template in which variables have fixed values.

    They are part of the text, so that they hold in every program that renders it.

    >>> fix_options("{{ depth }}", {"depth": 2})
    '{% set depth = 2 %}\\n{{ depth }}'
    """
    # Templates are rendered with `trim_blocks`, which removes the line end behind a block.
    sets = (
        f"{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}\n"
        for name, value in options.items()
    )
    return "".join((*sets, template))


def _require_options(template: str, names: list[str]) -> None:
    for name in names:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ExpectedError(
                f"The chat template has no option {name}.",
                "Correct data.template_options: the template's text names its options",
            )


def write_template(folder: Path, template: str) -> None:
    """Give a model's folder a chat template, which every program reads first.

    Raises:
        OSError: the disk is full.
    """
    (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    settings = read_json(folder / SETTINGS_FILE)
    # Some programs prefer the copy in the settings.
    if isinstance(settings, dict) and settings.pop("chat_template", None) is not None:
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2), encoding="ascii")


def write_tokens(folder: Path, tokenizer: Any) -> None:
    """Write a tokenizer with its new tokens to a model's folder, which may have its settings.

    Raises:
        OSError: the disk is full.
    """
    new = {str(tokenizer.convert_ids_to_tokens(one)): one for one in tokenizer.new_token_ids}
    text = tokenizer.backend_tokenizer.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    # Converters of models with a tokenizer.model read these instead.
    added = read_json(folder / _ADDED_FILE)
    (folder / _ADDED_FILE).write_text(
        json.dumps({**(added if isinstance(added, dict) else {}), **new}), encoding="ascii"
    )
    settings = read_json(folder / SETTINGS_FILE)
    if isinstance(settings, dict) and isinstance(settings.get("added_tokens_decoder"), dict):
        decoder = tokenizer.added_tokens_decoder
        known = settings["added_tokens_decoder"]
        known |= {str(one): decoder[one].__getstate__() for one in new.values()}
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2), encoding="ascii")
