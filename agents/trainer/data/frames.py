"""Texts of conversations, with what a chat template writes around the contents found only once.

To find the answers of a conversation, `answers` renders it several times. Most conversations of a
data set differ in their contents alone, so the places of the answers follow from another one with
as many turns. Each text is still rendered once, and has to agree; a content that holds a text of
the template itself, on which the template may decide, is rendered in full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agents.contract.spec import Learn
from agents.trainer.data import templates
from agents.trainer.data.answers import RenderedText, fold_system, render_answers, render_turns
from agents.trainer.data.conversations import ConversationTurn

NUM_CHECKED = 3
"""Number of conversations of a form whose answers are found both ways before one is enough."""
_MAX_FORMS = 1024
_STAND_IN = re.compile(r"Qz(\d+)zQ")
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
# Names of keys and roles, which templates compare with those alone.
_NAMES = frozenset(
    (
        *("user", "assistant", "system", "tool", "developer", "function", "human", "model"),
        *("role", "content", "text", "type", "image", "name", "message", "messages", "video"),
        *("audio", "url", "arguments", "parameters", "tool_calls", "string", "value"),
    )
)
_Form = tuple[tuple[str, ...], int]


class Frames:
    """Renders the conversations of one data set.

    Args:
        tokenizer: tokenizer with its chat template.
        rules: version of `tokens.TEXT_RULES`.
        learn: part of a conversation that is learned.
    """

    def __init__(self, tokenizer: Any, rules: int, learn: Learn) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._learn = learn
        self._literals: list[str] | None = None
        self._frames: dict[_Form, _Frame | None] = {}
        self._num_checked: dict[_Form, int] = {}

    def render(
        self, turns: tuple[ConversationTurn, ...], num_shared_turns: int, *, is_pair: bool
    ) -> RenderedText:
        """Return the text of a conversation with its answers; see `answers.render_answers`.

        Raises:
            ValueError: the template rejects the conversation, or an answer cannot be located.
        """
        learn = "answers" if is_pair else self._learn
        form = (tuple(turn.role for turn in turns), num_shared_turns)
        found = None
        if self._rules >= 3 and not is_pair and all(map(self._is_plain, turns)):
            found = self._fill(form, turns)
            if found is not None and self._num_checked.get(form, 0) >= NUM_CHECKED:
                return found
        whole = render_answers(self._tokenizer, turns, num_shared_turns, self._rules, learn)
        if found is not None:
            if found == whole:
                self._num_checked[form] = self._num_checked.get(form, 0) + 1
            else:
                self._frames[form] = None
        return whole

    def _is_plain(self, turn: ConversationTurn) -> bool:
        """Return whether a template cannot tell a turn from any other one of its role."""
        said = turn.content
        if not said or said[0].isspace() or said[-1].isspace():
            return False
        is_marked = turn.masked or turn.weighted or not turn.learns_thought
        if turn.extra or is_marked or turn.calls or turn.tools:
            return False
        if self._literals is None:
            self._literals = _find_literals(templates.choose(self._tokenizer))
        return not any(literal in said for literal in self._literals)

    def _fill(self, form: _Form, turns: tuple[ConversationTurn, ...]) -> RenderedText | None:
        if form not in self._frames:
            if len(self._frames) >= _MAX_FORMS:
                return None
            self._frames[form] = self._find(form)
        frame = self._frames[form]
        if frame is None:
            return None
        contents = [turn.content for turn in turns]
        if frame.is_folded:
            first = replace(turns[1], content=f"{contents[0]}\n\n{contents[1]}")
            turns = (first, *turns[2:])
        text = render_turns(self._tokenizer, turns)
        return frame.fill(contents) if text == frame.finished.fill(contents) else None

    def _find(self, form: _Form) -> _Frame | None:
        roles, num_shared = form
        turns = tuple(
            ConversationTurn(role=role, content=f"Qz{place}zQ") for place, role in enumerate(roles)
        )
        try:
            found = render_answers(self._tokenizer, turns, num_shared, self._rules, self._learn)
            folded, finished = fold_system(self._tokenizer, turns)
        except ValueError:
            return None
        ends = [end for span in found.spans for end in (span.start, span.stop)]
        frame = _Pieces.of(found.text, ends)
        whole = _Pieces.of(finished, ())
        if frame is None or whole is None or found.masked:
            return None
        return _Frame(found, frame, whole, len(folded) < len(turns))


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A text with places for contents."""

    literals: tuple[str, ...]
    """Texts around the contents: one more than contents."""
    order: tuple[int, ...]
    """Turn of each place."""
    marks: tuple[tuple[int, int], ...]
    """Marked positions, each as a literal and the position in it."""

    @classmethod
    def of(cls, text: str, marks: Sequence[int]) -> _Pieces | None:
        """Return the pieces of a text with stand-ins; None: a mark is inside of one."""
        parts = _STAND_IN.split(text)
        literals, order = tuple(parts[::2]), tuple(map(int, parts[1::2]))
        starts = [0, *(found.end() for found in _STAND_IN.finditer(text))]
        found = []
        for mark in marks:
            place = next(
                (
                    place
                    for place, start in enumerate(starts)
                    if start <= mark <= start + len(literals[place])
                ),
                None,
            )
            if place is None:
                return None
            found.append((place, mark - starts[place]))
        return cls(literals, order, tuple(found))

    def fill(self, contents: Sequence[str]) -> str:
        """Return the text with contents."""
        parts = [self.literals[0]]
        for place, literal in zip(self.order, self.literals[1:], strict=True):
            parts += (contents[place], literal)
        return "".join(parts)

    def find_marks(self, contents: Sequence[str]) -> list[int]:
        """Return the marked positions in the text with contents."""
        starts, start = [0], 0
        for place, literal in zip(self.order, self.literals, strict=False):
            start += len(literal) + len(contents[place])
            starts.append(start)
        return [starts[place] + offset for place, offset in self.marks]


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a template writes around the contents of one form of conversation."""

    found: RenderedText
    """The text with stand-ins for contents."""
    pieces: _Pieces
    """The learned text, with the ends of answers as marks."""
    finished: _Pieces
    """The finished conversation, as the template writes it."""
    is_folded: bool
    """True if the system turn is part of the first question."""

    def fill(self, contents: Sequence[str]) -> RenderedText:
        marks = self.pieces.find_marks(contents)
        spans = [range(*ends) for ends in zip(marks[::2], marks[1::2], strict=True)]
        return replace(self.found, text=self.pieces.fill(contents), spans=spans)


def _find_literals(template: str) -> list[str]:
    """Return the texts in a template's code that a content could be compared with.

    >>> _find_literals("{% if '</think>' in m.content and m.role == 'user' %}")
    ['</think>']
    """
    code = re.findall(r"\{[{%].*?[}%]\}", template, re.DOTALL)
    found = {a or b for one in code for a, b in _LITERAL.findall(one)}
    texts = {one.encode("ascii", "backslashreplace").decode("unicode-escape") for one in found}
    return sorted(one for one in texts if len(one.strip()) > 1 and one.strip() not in _NAMES)
