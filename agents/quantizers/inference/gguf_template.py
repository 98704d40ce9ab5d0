"""Try the chat template of a GGUF file within bounds, before llama.cpp runs it without any.

llama.cpp renders a few conversations when it loads a model, and one for each answer. A template is
a foreign program: one that loops or doubles a text would occupy llama.cpp endlessly. So the same
conversations are rendered here first, with bounds on time and memory.
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
"""Conversations like those that llama.cpp renders to find out the features of a template."""


class GgufTemplate:
    """Chat template of a GGUF file.

    Args:
        path: path of the file.

    Raises:
        ExpectedError: the file is damaged, or its template is invalid or does not end.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        about: dict[str, Any] = {}
        try:
            # llama.cpp itself reports versions that it cannot read.
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
        """Render a conversation within the bounds.

        Raises:
            ExpectedError: rendering does not end, or fills the memory.
        """
        if self._template is not None:
            self._bounded(lambda: self._render(messages, tools))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        assert self._template is not None
        try:
            self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                bos_token=self._tokens["bos"],
                eos_token=self._tokens["eos"],
            )
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - llama.cpp reports what a template rejects
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
        ExpectedError: it is not a template.
    """
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

    class Generation(Extension):
        """Blocks that mark answers, as in templates for training."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # For all later templates of this process, since the class holds the operators.
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
