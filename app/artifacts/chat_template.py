"""Translate a model's chat template (Jinja) to Ollama's form (Go), if possible.

It is possible if each role has a fixed text before and after the message. These texts are found by
rendering conversations with marks in them, and verified with further conversations. A template that
does more (tools, dates, a system prompt inside the first turn) is refused.

A template is a program by a stranger, so it is rendered in a separate process with limits of time
and memory: `python -m app.artifacts.chat_template` reads one from stdin.
https://docs.ollama.com/modelfile#template
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agents.shared.files.bounded_work import (
    LimitReached,
    bound_operators,
    limited_memory,
    within_limits,
)
from agents.shared.files.python_child import SAFE_FOLDER, python_environ, same_source

Turn = tuple[str, str]
"""(role, message)."""
Render = Callable[[Sequence[Turn]], str]
_MARKS = ("@@S@@", "@@U@@", "@@A@@", "@@V@@")
TIMEOUT_S = 20.0
"""Time limit for the process, in seconds; its own limits are tighter."""
_MODULE = "app.artifacts.chat_template"
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
    """Text before and after the system prompt; None: the template takes no system prompt."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    generation: str
    """Text before the answer, in addition to that after the user's turn."""

    def render(self, turns: Sequence[Turn]) -> str:
        """Render a conversation as Ollama does."""
        around = {"system": self.system or ("", ""), "user": self.user}
        around["assistant"] = self.assistant
        texts = [around[role][0] + text + around[role][1] for role, text in turns]
        return "".join(texts) + self.generation

    def to_go(self) -> str:
        """Return it as the value of Ollama's TEMPLATE."""
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
        """Stop string that ends an answer; empty: only the model's end token ends it."""
        return self.assistant[1].strip().partition("\n")[0]


def express(template: str, bos_token: str, eos_token: str) -> PlainTemplate:
    """Return a template as plain turns. Starts a process, which takes a moment.

    Raises:
        ValueError: it has no such form, or does not end; its text is the reason, as a clause.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE],
            input=json.dumps([template, bos_token, eos_token]).encode("ascii"),
            capture_output=True,
            env=python_environ(os.environ, *same_source()),
            cwd=SAFE_FOLDER,
            timeout=TIMEOUT_S,
            check=False,
        )
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise ValueError("it does not end, so it was stopped") from error
    if "problem" in found:
        raise ValueError(str(found["problem"]))
    pairs = {name: _pair(found[name]) for name in ("system", "user", "assistant")}
    return PlainTemplate(
        system=pairs["system"],
        user=pairs["user"] or ("", ""),
        assistant=pairs["assistant"] or ("", ""),
        generation=str(found["generation"]),
    )


def _pair(texts: Sequence[str] | None) -> tuple[str, str] | None:
    return None if texts is None else (str(texts[0]), str(texts[1]))


def main() -> int:
    """Translate the template on stdin, and print the turns or the problem."""
    template, bos_token, eos_token = json.load(sys.stdin)
    try:
        with limited_memory():
            found = within_limits(lambda: _express(template, bos_token, eos_token))
            answer = json.dumps(asdict(found))
    except LimitReached as error:
        answer = json.dumps({"problem": f"it needs more than {error}"})
    except ValueError as error:
        answer = json.dumps({"problem": str(error)[:500]})
    print(answer)
    return 0


def _express(template: str, bos_token: str, eos_token: str) -> PlainTemplate:
    """Return a template as plain turns, rendered in this process.

    Raises:
        ValueError: it has no such form; its text is the reason, as a clause.
    """
    render = _make_render(template, bos_token, eos_token)
    found = _probe(render)
    for turns in _TRIALS:
        if turns[0][0] == "system" and found.system is None:
            continue
        if found.render(turns) != render(turns):
            raise ValueError("it does more than add text before and after each turn")
    # Both end the template early: braces in Go's syntax, quotes in the Modelfile's.
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
        return None  # Gemma's template raises an error for a system prompt
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
    """Return a function that renders like Transformers, without the first token."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

    bound_operators(SandboxedEnvironment)

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
        except MemoryError:
            raise
        except Exception as error:  # a stranger's program may raise anything
            raise ValueError(f"it cannot be rendered: {error}") from error
        return text.removeprefix(bos_token)  # llama.cpp adds the first token itself

    return render


if __name__ == "__main__":
    sys.exit(main())
