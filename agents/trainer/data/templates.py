"""Bounded rendering of a conversation with a model's chat template, an untrusted program."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from agents.errors import ExpectedError
from agents.shared.files import bounded_work

MAX_CHARS = 1 << 26
"""Maximum number of characters that a template may make of one conversation."""


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    template: str | None = None,
    *,
    add_generation_prompt: bool,
    tools: list[Any] | None = None,
    **options: bool,
) -> str:
    """Return the text of a conversation.

    Args:
        tokenizer: tokenizer with its chat template.
        messages: role, content and other keys of each message.
        template: replacement for the tokenizer's own template.
        add_generation_prompt: True if the text ends with the beginning of an answer.
        tools: definitions of the tools that it offers.
        options: other variables of the template.

    Raises:
        ValueError: the template rejects the conversation.
        LimitReached: the text is too long. The caller bounds time and memory.
        MemoryError: it needs too much memory.
    """
    written = template if template is not None else choose(tokenizer)
    if _wants_parts(written):
        messages = [_in_parts(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
    except MemoryError:
        raise
    except Exception as error:
        reason = str(error)[:300] or type(error).__name__
        raise ValueError(f"the chat template of this model refuses it: {reason}") from error
    if not isinstance(text, str):
        raise ValueError("the chat template of this model makes no text of it")
    if len(text) > MAX_CHARS:
        raise bounded_work.LimitReached(f"{MAX_CHARS:,} characters")
    return text


_PROBE = "probe-of-content"


@lru_cache(maxsize=16)
def _wants_parts(template: str) -> bool:
    """Return whether a template drops content that is a text, as those of vision models do."""
    parts = [{"type": "text", "text": _PROBE}]
    return _PROBE not in _try(template, _PROBE) and _PROBE in _try(template, parts)


def _try(template: str, content: Any) -> str:
    # Imported on use: reading rows without a tokenizer takes no second of imports.
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": content}]
    try:
        return str(render_jinja_template([messages], chat_template=template)[0][0])
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a template may raise anything
        return ""


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def choose(tokenizer: Any) -> str:
    """Return the chat template of a tokenizer.

    Raises:
        ExpectedError: it has several, and all have other names than `default`.
        ValueError: it is no text.
    """
    own = tokenizer.chat_template
    if isinstance(own, dict) and "default" not in own:
        raise ExpectedError(
            f"The model has the chat templates {', '.join(map(repr, sorted(own)))}, and its files "
            "do not say which of them is the default.",
            "Copy the model's folder, and rename one to default in tokenizer_config.json",
        )
    template = tokenizer.get_chat_template()
    if not isinstance(template, str):
        raise ValueError("the chat template of this model is no text")
    return template


def render_question(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Return the text of a chat, up to the beginning of the answer.

    Raises:
        ExpectedError: the template rejects the conversation, or does not end.
    """
    try:
        with bounded_work.limited_memory():
            return bounded_work.within_limits(
                lambda: render(tokenizer, messages, add_generation_prompt=True)
            )
    except bounded_work.LimitReached as error:
        raise ExpectedError(
            f"The model's chat template needs more than {error} for this conversation.",
            bounded_work.KILLED_HINT,
        ) from None
    except ValueError as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise ExpectedError(
            f"The model's chat template refuses this conversation: {reason}.",
            "Leave the system prompt out",
        ) from error
