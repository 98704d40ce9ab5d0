"""Tokenize rows and mark the targets: the tokens whose prediction is learned.

A conversation is rendered with the tokenizer's chat template, or a plain one if it has none, and
only the assistant's answers are learned. An answer's character range is found by rendering
prefixes: the text up to the question, with the generation prompt, and the text up to the answer
are both prefixes of the whole text. Some templates render earlier answers differently, for example
without reasoning; then the conversation is rendered again with another answer in its place, and the
range that differs is the answer. Both conversations of a preference pair are rendered this way, and
their shared turns are not learned.

The whole text is tokenized once, so the ids are exactly those of a chat with the model. Plain text
is learned completely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import TemplateError

from agents.trainer.data.conversations import ConversationRow, ConversationTurn
from agents.trainer.data.examples import Segment
from agents.trainer.data.tally import Skipped

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + (eos_token or '') }}"
    "{% elif message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n### Response:\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
"""Chat template for tokenizers without one, with the wording of Stanford Alpaca."""
_TEMPLATE_ERRORS = (TemplateError, TypeError, ArithmeticError, LookupError, AttributeError)
# Rows and characters tokenized per call. The tokenizer takes about 80 bytes per character.
_ROWS_AT_ONCE = 512
_CHARS_AT_ONCE = 1 << 22
_OTHER_ANSWER = "another-answer-in-its-place"
# For templates that write today's date: the same day on every node and after every resume. It is
# the day that Llama 3's templates write by default.
_DAY = datetime(2024, 7, 26)
_SIGNS = (*"aAbBdeHIjmMpSyY", "-d", "-m")
_WRITTEN = "".join(f" | replace('%{one}', '{_DAY.strftime('%' + one)}')" for one in _SIGNS)
_STOPPED_CLOCK = "{% macro strftime_now(format) %}{{ format" + _WRITTEN + " }}{% endmacro %}"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One tokenized row."""

    segments: tuple[Segment, ...]
    """One segment, or the chosen and the rejected conversation of a pair."""
    cut_from: int | None = None
    """Tokens of the longest conversation before truncation; None if nothing was truncated."""


def tokenize_rows(
    tokenizer: Any, rows: Iterable[ConversationRow], max_tokens: int
) -> Iterator[Tokenized | Skipped]:
    """Yield each row truncated to `max_tokens`, or the reason why it is skipped."""
    some: list[ConversationRow] = []
    num_chars = 0
    for row in rows:
        some.append(row)
        num_chars += row.num_chars
        if len(some) >= _ROWS_AT_ONCE or num_chars >= _CHARS_AT_ONCE:
            yield from _tokenize(tokenizer, some, max_tokens)
            some, num_chars = [], 0
    yield from _tokenize(tokenizer, some, max_tokens)


def _tokenize(
    tokenizer: Any, rows: list[ConversationRow], max_tokens: int
) -> Iterator[Tokenized | Skipped]:
    drawn = [_render_row(tokenizer, row) for row in rows]
    texts = [text for one in drawn if not isinstance(one, Skipped) for text, _ in one]
    encoding = (
        {"input_ids": [], "offset_mapping": []}
        if not texts
        else tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
    )
    encoded = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    for row, one in zip(rows, drawn, strict=True):
        if isinstance(one, Skipped):
            yield one
            continue
        segments = []
        for _, spans in one:
            ids, offsets = next(encoded)
            is_target = mark_targets(offsets, spans)
            segments.append(Segment(row.number, np.array(ids, dtype=np.int32), is_target))
        yield _cut(segments, max_tokens)


def _cut(segments: list[Segment], max_tokens: int) -> Tokenized | Skipped:
    longest = max(len(segment.ids) for segment in segments)
    cut = tuple(
        Segment(one.row, one.ids[:max_tokens], one.is_target[:max_tokens]) for one in segments
    )
    # In a pair both sides need targets: a side without any has no log-probability to compare.
    if not all(one.num_targets for one in cut):
        left = f"nothing to learn is left within {max_tokens} of its {longest} tokens"
        return Skipped(row=cut[0].row, reason=left if longest > max_tokens else "no answer")
    if len(cut) == 2 and np.array_equal(cut[0].ids, cut[1].ids):
        where = f" within {max_tokens} of their {longest} tokens" if longest > max_tokens else ""
        return Skipped(row=cut[0].row, reason=f"'chosen' and 'rejected' are the same{where}")
    return Tokenized(cut, longest if longest > max_tokens else None)


def mark_targets(
    offsets: Sequence[tuple[int, int]], spans: Sequence[range]
) -> npt.NDArray[np.bool_]:
    """Return which tokens overlap one of the character ranges; the first token never counts."""
    place_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    is_target = np.zeros(len(place_T2), dtype=np.bool_)
    for span in spans:
        is_target |= (place_T2[:, 0] < span.stop) & (place_T2[:, 1] > span.start)
    is_target[:1] = False  # nothing precedes the first token that could predict it
    return is_target


def _render_row(tokenizer: Any, row: ConversationRow) -> list[tuple[str, list[range]]] | Skipped:
    """Return the text of each conversation of a row, with the character ranges to learn."""
    try:
        if not row.turns:
            text = _enclose(row.text, tokenizer.bos_token or "", tokenizer.eos_token or "")
            return [(text, [range(len(text))])]
        sides = [row.turns, row.rejected] if row.rejected else [row.turns]
        return [_render_with_answers(tokenizer, turns, row.num_shared_turns) for turns in sides]
    except ValueError as error:
        return Skipped(row=row.number, reason=str(error), malformed=True)


def _enclose(text: str, begin: str, end: str) -> str:
    """Return the text with both tokens; data that was rendered before may already have them."""
    # A BOS or EOS twice would teach the model to repeat it.
    begin = "" if text.startswith(begin) else begin
    return f"{begin}{text}" if text.endswith(end) and end else f"{begin}{text}{end}"


def _render_with_answers(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], num_shared_turns: int
) -> tuple[str, list[range]]:
    folded, text = _fold_system(tokenizer, turns)
    num_shared_turns -= len(turns) - len(folded)
    spans: list[range] = []
    for place, turn in enumerate(folded):
        if turn.role == "assistant" and turn.content.strip() and place >= num_shared_turns:
            spans.append(_find_answer(tokenizer, folded, place, text))
    return text, spans


def _find_answer(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], place: int, text: str
) -> range:
    # A greeting has no question before it, but the template may insert text of its own.
    asked = _try_render(tokenizer, turns[:place], add_generation_prompt=True) if place else None
    is_last = place == len(turns) - 1
    answered = (
        text if is_last else _try_render(tokenizer, turns[: place + 1], add_generation_prompt=False)
    )
    if (
        asked is not None
        and answered is not None
        and text.startswith(answered)
        and answered.startswith(asked)
    ):
        return range(len(asked), len(answered))
    return _find_otherwise(tokenizer, turns, place, text)


def _find_otherwise(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], place: int, text: str
) -> range:
    """Return the range that changes when the answer is replaced by another one."""
    other = (*turns[:place], replace(turns[place], content=_OTHER_ANSWER), *turns[place + 1 :])
    before, found, after = _render(tokenizer, other, add_generation_prompt=False).partition(
        _OTHER_ANSWER
    )
    start, end = len(before), len(text) - len(after)
    if not (found and start < end and text.startswith(before) and text.endswith(after)):
        raise ValueError(
            "the chat template of this model changes the assistant's answer, "
            "so the part to learn cannot be located"
        )
    alone = _try_render(tokenizer, other[: place + 1], add_generation_prompt=False) or ""
    for closing in (alone.partition(_OTHER_ANSWER)[2], tokenizer.eos_token):
        if closing and after.startswith(closing):
            return range(start, end + len(closing))
    return range(start, end)


def _fold_system(
    tokenizer: Any, turns: tuple[ConversationTurn, ...]
) -> tuple[tuple[ConversationTurn, ...], str]:
    """Return the turns and their text.

    A system turn that the template rejects or drops is prepended to the first question.
    """
    if len(turns) < 2 or turns[0].role != "system" or turns[1].role != "user":
        return turns, _render(tokenizer, turns, add_generation_prompt=False)
    try:
        text = _render(tokenizer, turns, add_generation_prompt=False)
        if text != _render(tokenizer, turns[1:], add_generation_prompt=False):
            return turns, text
    except ValueError:
        pass
    first = ConversationTurn(role="user", content=f"{turns[0].content}\n\n{turns[1].content}")
    folded = (first, *turns[2:])
    return folded, _render(tokenizer, folded, add_generation_prompt=False)


def _try_render(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], *, add_generation_prompt: bool
) -> str | None:
    """Return the text, or None if the template rejects these turns without those that follow."""
    try:
        return _render(tokenizer, turns, add_generation_prompt=add_generation_prompt)
    except ValueError:
        return None


def _render(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], *, add_generation_prompt: bool
) -> str:
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:
        template = _STOPPED_CLOCK + template
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except _TEMPLATE_ERRORS as error:
        raise ValueError(f"the chat template of this model refuses it: {error}") from error
    return text
