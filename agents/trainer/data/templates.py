"""Render a conversation with a model's chat template, a stranger's program, within bounds."""

from __future__ import annotations

from typing import Any

from agents.errors import ExpectedError
from agents.shared.files.bounded_work import (
    KILLED_HINT,
    LimitReached,
    limited_memory,
    within_limits,
)

MAX_CHARS = 1 << 26
"""Length of the longest text that a template may make of one conversation."""


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    template: str | None = None,
    *,
    add_generation_prompt: bool,
) -> str:
    """Return the text of a conversation.

    Args:
        tokenizer: With its chat template.
        messages: Role, content and other keys of each message.
        template: Instead of the tokenizer's own.
        add_generation_prompt: Whether the text ends with the beginning of an answer.

    Raises:
        ValueError: The template refuses the conversation.
        LimitReached: It makes too much. Time and memory are bounded by the caller.
        MemoryError: It needs too much.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except MemoryError:
        raise
    except Exception as error:
        said = str(error)[:300] or type(error).__name__
        raise ValueError(f"the chat template of this model refuses it: {said}") from error
    if not isinstance(text, str):
        raise ValueError("the chat template of this model makes no text of it")
    if len(text) > MAX_CHARS:
        raise LimitReached(f"{MAX_CHARS:,} characters")
    return text


def render_question(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Return the text of a chat, up to the beginning of the answer.

    Raises:
        ExpectedError: The template refuses the conversation, or does not end.
    """
    try:
        with limited_memory():
            return within_limits(lambda: render(tokenizer, messages, add_generation_prompt=True))
    except LimitReached as error:
        raise ExpectedError(
            f"The model's chat template needs more than {error} for this conversation.",
            KILLED_HINT,
        ) from None
    except ValueError as error:
        said = str(error).partition(": ")[2] or str(error)
        raise ExpectedError(
            f"The model's chat template refuses this conversation: {said}.",
            "Leave the system prompt out",
        ) from error
