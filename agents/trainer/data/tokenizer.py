"""Load a model's tokenizer without torch, which a data preview does not need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from agents.errors import ExpectedError, first_line
from agents.foreign_code import forbid
from agents.trainer.data.tokenizer_bounds import LOAD_BYTES, LOAD_S, bounded, refuse_growth
from agents.trainer.data.tokens import TEXT_RULES, choose_plain_template


def load_tokenizer(path: Path, rules: int = TEXT_RULES) -> tuple[Any, bool]:
    """Return the tokenizer, and whether it got the plain chat template.

    Args:
        path: folder of the model.
        rules: version of `tokens.TEXT_RULES` of the run.

    Raises:
        ExpectedError: the tokenizer is missing, or cannot map tokens to characters.
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
    if tokenizer.chat_template:
        return tokenizer, False
    tokenizer.chat_template = choose_plain_template(tokenizer, rules)
    return tokenizer, True
