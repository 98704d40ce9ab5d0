"""Try the chat template of a GGUF file before llama.cpp runs it, which does so without any bounds.

llama.cpp renders a few conversations when it loads a model, and one for each answer. A template is
a stranger's program: one that loops or doubles a text would keep llama.cpp busy for ever. So the
same conversations are rendered here first, within bounds of time and memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents.errors import ExpectedError
from agents.shared.files.bounded_work import (
    KILLED_HINT,
    LimitReached,
    bound_operators,
    limited_memory,
    within_limits,
)
from agents.shared.models.gguf_file import UnknownVersion, read_metadata

_USER, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
_TRIALS: tuple[dict[str, Any], ...] = (
    {"messages": [_USER]},
    {"messages": [{"role": "system", "content": "s"}, _USER, _ANSWER, _USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [_USER], "tools": [_TOOL]},
)
"""Kinds of conversations that llama.cpp renders to find out what a template can do."""


class GgufTemplate:
    """The chat template of a file.

    Args:
        path: of the file.

    Raises:
        ExpectedError: the file is damaged, or its template is none or does not end.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        about: dict[str, Any] = {}
        try:
            # Another version's keys are not found by llama.cpp either, which says so itself.
            with contextlib.suppress(UnknownVersion):
                about = read_metadata(path)
        except (OSError, ValueError) as error:
            raise ExpectedError(
                f"{path.name} cannot be loaded: {error}.", "Export it again, or copy it again"
            ) from error
        template = about.get("tokenizer.chat_template")
        self._tokens = {name: _token(about, name) for name in ("bos", "eos")}
        self._template = None
        if isinstance(template, str) and template:
            self._template = self._bounded(lambda: _compile(template))
        for trial in _TRIALS:
            self.refuse_endless(**trial)

    def refuse_endless(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Render a conversation.

        Raises:
            ExpectedError: it does not end, or fills the memory.
        """
        if self._template is not None:
            self._bounded(lambda: self._render(messages, tools))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        assert self._template is not None
        try:
            self._template.render(
                messages=[dict(one) for one in messages],
                tools=[dict(one) for one in tools] or None,
                add_generation_prompt=True,
                bos_token=self._tokens["bos"],
                eos_token=self._tokens["eos"],
            )
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - what a template does not take, llama.cpp reports
            return

    def _bounded(self, work: Any) -> Any:
        try:
            with limited_memory():
                return within_limits(work)
        except (LimitReached, MemoryError) as error:
            reason = str(error) or "the memory that it may use"
            raise ExpectedError(
                f"The chat template in {self._name} needs more than {reason}.", KILLED_HINT
            ) from None


def _token(about: Mapping[str, Any], name: str) -> str:
    tokens = about.get("tokenizer.ggml.tokens")
    number = about.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(tokens, list) or not isinstance(number, int):
        return ""
    return str(tokens[number]) if 0 <= number < len(tokens) else ""


def _compile(template: str) -> Any:
    """Return the template as Transformers compiles it.

    Raises:
        ExpectedError: it is no template.
    """
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

    class Generation(Extension):
        """Blocks that mark answers, as templates for training have."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    bound_operators(SandboxedEnvironment)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except MemoryError:
        raise
    except Exception as error:
        raise ExpectedError(
            f"Its chat template cannot be read: {str(error)[:300]}", KILLED_HINT
        ) from error
