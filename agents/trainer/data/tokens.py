"""Turn rows into token ids, and mark the tokens whose prediction is learned.

A conversation is rendered by the tokenizer's own chat template, or by a plain one where it has
none, and only the assistant's answers are learned. They are found as character ranges: the text up
to a question (with the opening of an answer) and the text up to its answer are both beginnings of
the whole text. Some templates write earlier answers differently (reasoning is left out, say); there
the answer is searched for. The whole text is tokenized once, so the ids are exactly those that a
chat with the model would produce. Plain text is learned wholly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import TemplateError

from agents.errors import UserError
from agents.trainer.data.conversations import Row, Turn
from agents.trainer.data.rows import Skipped

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n### Response:\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
"""For tokenizers without a template: the wording of Stanford Alpaca."""
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """One row as the model sees it."""

    row: int
    """Number of the row in its file."""
    ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    """Whether the prediction of this token counts; never true for the first one."""

    @property
    def num_targets(self) -> int:
        return int(self.is_target.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSet:
    samples: tuple[Sample, ...]
    skipped: tuple[Skipped, ...]
    num_truncated: int
    """Rows that were longer than the longest sequence and lost their end."""
    num_tokens: int


def tokenize_rows(tokenizer: Any, rows: Sequence[Row], max_tokens: int) -> SampleSet:
    """Return a sample for each row that has something to learn within `max_tokens`.

    Raises:
        UserError: the chat template refuses a row, or no row is left.
    """
    samples: list[Sample] = []
    skipped: list[Skipped] = []
    num_truncated = 0
    for row, ids, is_target in _encode(tokenizer, rows):
        num_truncated += len(ids) > max_tokens
        sample = Sample(row.number, ids[:max_tokens], is_target[:max_tokens])
        if sample.num_targets:
            samples.append(sample)
        else:
            cut = len(ids) > max_tokens
            reason = f"nothing to learn is left within {max_tokens} tokens" if cut else "no answer"
            skipped.append(Skipped(row=row.number, reason=reason))
    if not samples:
        raise UserError(
            f"None of the {len(rows)} rows has anything to learn: row {skipped[0].row}: "
            f"{skipped[0].reason}.",
            "Raise sequence_tokens, or check that the rows have answers",
        )
    return SampleSet(
        samples=tuple(samples),
        skipped=tuple(skipped),
        num_truncated=num_truncated,
        num_tokens=sum(len(sample.ids) for sample in samples),
    )


def _encode(
    tokenizer: Any, rows: Sequence[Row]
) -> Iterator[tuple[Row, npt.NDArray[np.int32], npt.NDArray[np.bool_]]]:
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        rendered = [_render_row(tokenizer, row) for row in some]
        encoding = tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
        for row, (_, spans), ids, offsets in zip(
            some, rendered, encoding["input_ids"], encoding["offset_mapping"], strict=True
        ):
            is_target = mark_targets(offsets, spans)
            yield row, np.array(ids, dtype=np.int32), is_target


def mark_targets(
    offsets: Sequence[tuple[int, int]], spans: Sequence[range]
) -> npt.NDArray[np.bool_]:
    """Return which tokens touch one of the character ranges; the first token never counts."""
    place_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    is_target = np.zeros(len(place_T2), dtype=np.bool_)
    for span in spans:
        is_target |= (place_T2[:, 0] < span.stop) & (place_T2[:, 1] > span.start)
    is_target[:1] = False
    return is_target


def _render_row(tokenizer: Any, row: Row) -> tuple[str, list[range]]:
    """Return the whole text of a row, and the parts of it that are learned."""
    if not row.turns:
        text = f"{tokenizer.bos_token or ''}{row.text}{tokenizer.eos_token or ''}"
        return text, [range(len(text))]
    turns = _fold_system(tokenizer, row)
    text = _render(tokenizer, row, turns, ask=False)
    spans: list[range] = []
    for place, turn in enumerate(turns):
        if turn.role == "assistant" and turn.content.strip():
            start = spans[-1].stop if spans else 0
            spans.append(_find_answer(tokenizer, row, turns, place, text, start))
    return text, spans


def _find_answer(
    tokenizer: Any, row: Row, turns: tuple[Turn, ...], place: int, text: str, start: int
) -> range:
    asked = _render(tokenizer, row, turns[:place], ask=True) if place else ""
    answered = _render(tokenizer, row, turns[: place + 1], ask=False)
    if text.startswith(answered) and answered.startswith(asked):
        return range(len(asked), len(answered))
    content = turns[place].content.strip()
    found = text.find(content, start)
    if found < 0:
        raise UserError(
            f"Row {row.number}: the chat template of this model changes the assistant's answer, "
            "so it cannot be told what should be learned.",
            "Delete that row, or give the model a chat template that keeps answers as they are",
        )
    end = found + len(content)
    eos = tokenizer.eos_token or ""
    return range(found, end + len(eos) if eos and text.startswith(eos, end) else end)


def _fold_system(tokenizer: Any, row: Row) -> tuple[Turn, ...]:
    """Return the turns; a system turn moves into the first question where templates refuse it."""
    turns = row.turns
    if len(turns) < 2 or turns[0].role != "system" or turns[1].role != "user":
        return turns
    try:
        _render(tokenizer, row, turns, ask=False)
    except UserError:
        first = Turn(role="user", content=f"{turns[0].content}\n\n{turns[1].content}")
        return (first, *turns[2:])
    return turns


def _render(tokenizer: Any, row: Row, turns: tuple[Turn, ...], *, ask: bool) -> str:
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask
        )
    except TemplateError as error:
        raise UserError(
            f"Row {row.number}: the chat template of this model refuses it: {error}.",
            "Correct the order of the roles in that row, or delete it",
        ) from error
    return text
