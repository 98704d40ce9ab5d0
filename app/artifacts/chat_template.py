"""Translate a model's chat template (Jinja) to the form of Ollama (Go), where possible.

It is possible where every turn is the same text before and after what was said. That is found out
by rendering conversations with marks in them, and held against further conversations; a template
that does more (tools, dates, a system prompt inside the first turn) is not guessed at.
https://docs.ollama.com/modelfile#template
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Turn = tuple[str, str]
"""(role, what was said)."""
Render = Callable[[Sequence[Turn]], str]
_MARKS = ("@@S@@", "@@U@@", "@@A@@", "@@V@@")
# What a template may raise beside those of Jinja.
_ERRORS = (TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
_TRIALS: tuple[tuple[Turn, ...], ...] = (
    (("user", "Who?"),),
    (("system", "Be kind.\nAnd short."), ("user", "Who are you?")),
    (("user", "a"), ("assistant", "b"), ("user", "c\n\nd"), ("assistant", "e"), ("user", "f")),
    (("system", "s"), ("user", "a"), ("assistant", "b {x}"), ("user", "<c>")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainTemplate:
    """Text before and after each turn of a role."""

    system: tuple[str, str] | None
    """Text before and after the system prompt; None: the template takes none."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    generation: str
    """Text before the answer, in addition to that after the user's turn."""

    def render(self, turns: Sequence[Turn]) -> str:
        """Render a conversation as Ollama will."""
        around = {"system": self.system or ("", ""), "user": self.user}
        around["assistant"] = self.assistant
        said = [around[role][0] + text + around[role][1] for role, text in turns]
        return "".join(said) + self.generation

    def to_go(self) -> str:
        """Return it as Ollama's TEMPLATE."""
        roles = [("user", self.user), ("assistant", self.assistant)]
        if self.system is not None:
            roles.insert(0, ("system", self.system))
        parts = []
        for place, (role, (before, after)) in enumerate(roles):
            test = "{{ if" if place == 0 else "{{ else if"
            parts.append(f'{test} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}')
        return "{{ range .Messages }}" + "".join(parts) + "{{ end }}{{ end }}" + self.generation

    @property
    def stop(self) -> str:
        """Stop string that ends an answer; empty: only the model's own end token does."""
        return self.assistant[1].strip().partition("\n")[0]


def express(template: str, bos_token: str, eos_token: str) -> PlainTemplate:
    """Return a template as plain turns.

    Raises:
        ValueError: it cannot be said so; the sentence says why.
    """
    render = _make_render(template, bos_token, eos_token)
    found = _probe(render)
    for turns in _TRIALS:
        if turns[0][0] == "system" and found.system is None:
            continue
        if found.render(turns) != render(turns):
            raise ValueError("it does more than add text before and after each turn")
    if any("{{" in text or '"""' in text for text in _texts(found)):
        raise ValueError("it has characters that a Modelfile cannot hold")
    return found


def _texts(found: PlainTemplate) -> list[str]:
    return [*(found.system or ()), *found.user, *found.assistant, found.generation]


def _probe(render: Render) -> PlainTemplate:
    system, user, answer, again = _MARKS
    turns = [("user", user), ("assistant", answer), ("user", again)]
    first, between, back, end = _split(render(turns), (user, answer, again))
    after_user = _common_start(between, end)
    if not back.endswith(first):
        raise ValueError("its first turn differs from the following ones")
    return PlainTemplate(
        system=_probe_system(render, first, (system, user)),
        user=(first, after_user),
        assistant=(between[len(after_user) :], back[: len(back) - len(first)]),
        generation=end[len(after_user) :],
    )


def _probe_system(render: Render, first: str, marks: tuple[str, str]) -> tuple[str, str] | None:
    try:
        text = render([("system", marks[0]), ("user", marks[1])])
    except ValueError:
        return None  # such as Gemma's, which raises
    if marks[0] not in text:
        return None
    before, after, _ = _split(text, marks)
    if not after.endswith(first):
        raise ValueError("it puts the system prompt inside the first turn")
    return before, after[: len(after) - len(first)]


def _common_start(one: str, two: str) -> str:
    """Return the common prefix of two texts.

    >>> _common_start("assistant:\\n", "assistant: think")
    'assistant:'
    """
    pairs = zip(one, two, strict=False)
    length = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    return one[: min(len(one), len(two))] if length is None else one[:length]


def _split(text: str, marks: Sequence[str]) -> list[str]:
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise ValueError("it leaves out a part of the conversation")
        parts.append(before)
    return [*parts, text]


def _make_render(template: str, bos_token: str, eos_token: str) -> Render:
    """Return what renders as Transformers does, less the first token, which llama.cpp adds."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse

    def render(turns: Sequence[Turn]) -> str:
        values: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token}
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            made = environment.from_string(template)
            text = made.render(messages=messages, add_generation_prompt=True, **values)
        except (TemplateError, *_ERRORS) as error:
            raise ValueError(f"it cannot be rendered: {error}") from error
        return text.removeprefix(bos_token)

    return render
