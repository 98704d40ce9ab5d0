"""Tokenize rows and mark the targets: the tokens whose prediction is learned.

A conversation is rendered with the tokenizer's chat template, or a plain one if it has none, and
only the assistant's answers are learned. An answer's character range is found by rendering
prefixes: the text up to the question with the generation prompt, and the text up to the answer, are
both prefixes of the whole text. Some templates render earlier answers differently, for example
without reasoning; then the conversation is rendered again with another answer in its place, and the
differing range is the answer. Both conversations of a preference pair are rendered this way, and
their shared turns are not learned.

The whole text is tokenized once, so the ids are exactly those of a chat with the model. Plain text
is learned completely. It starts with the tokens that the tokenizer puts before a text, and ends
with its end token, which marks the end of a document.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.errors import ExpectedError
from agents.shared.files import bounded_work
from agents.trainer.data import templates
from agents.trainer.data.conversations import ConversationRow, ConversationTurn
from agents.trainer.data.examples import Segment
from agents.trainer.data.tally import Skipped
from agents.trainer.data.tokenizer_bounds import MAX_TOKENS_PER_CHAR, bounded_tokenizer

TEXT_RULES = 2
"""Version of the rules by which rows become tokens. A run keeps its first version. Version 1: plain
text starts with `bos_token` even if the tokenizer does not add it, and messages are role and
content.
"""
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + (eos_token or '') }}"
    "{% elif message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n### Response:\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
"""Chat template for tokenizers without one, with the wording of Stanford Alpaca."""
_BEGIN = "{{ bos_token }}"


def choose_plain_template(tokenizer: Any, rules: int) -> str:
    """Return the chat template for a tokenizer without one, with the tokenizer's own beginning."""
    begins = rules == 1 or bool(find_ends(tokenizer).begin)
    return PLAIN_TEMPLATE if begins else PLAIN_TEMPLATE.removeprefix(_BEGIN)


# Number of rows and characters per call. The tokenizer takes about 80 bytes per character.
_ROWS_AT_ONCE = 512
_CHARS_AT_ONCE = 1 << 21
# A longer text is tokenized in pieces of this size, and only the beginning is kept.
_PIECE_CHARS = 1 << 20
# Computing time for rendering: for all rows of a call, and for each of their turns, in seconds.
# Real templates take a hundredth of it.
_LEAST_RENDER_S = 10.0
_RENDER_S = 0.2
_OTHER_ANSWER = "another-answer-in-its-place"
# For templates that write today's date: the same day on every node and after every resume. Llama
# 3's templates write this day by default.
_DAY = datetime(2024, 7, 26)
_SIGNS = (*"aAbBdeHIjmMpSyY", "-d", "-m")
_WRITTEN = "".join(f" | replace('%{sign}', '{_DAY.strftime('%' + sign)}')" for sign in _SIGNS)
_STOPPED_CLOCK = "{% macro strftime_now(format) %}{{ format" + _WRITTEN + " }}{% endmacro %}"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One tokenized row."""

    segments: tuple[Segment, ...]
    """One segment, or the chosen and the rejected conversation of a pair."""
    label: float | None = None
    """Label of the row in the data; None without labels."""
    cut_from: int | None = None
    """Tokens of the longest conversation before truncation; None without truncation."""
    num_tokens: int = 0
    """Number of tokens of all segments before truncation."""
    extra: tuple[str, ...] = ()
    """Other keys of its messages than role and content, which the chat template received."""
    dropped: tuple[str, ...] = ()
    """Keys of `extra` that the chat template leaves out."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The texts of one row, each with the character ranges to learn."""

    texts: tuple[tuple[str, list[range]], ...]
    extra: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The beginning of a tokenized text."""

    ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    num_tokens: int
    """Number of tokens of the whole text."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Ids before and after a plain text."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


def tokenize_rows(
    tokenizer: Any, rows: Iterable[ConversationRow], max_tokens: int, rules: int = TEXT_RULES
) -> Iterator[Tokenized | Skipped]:
    """Yield each row truncated to `max_tokens`, or the reason why it is skipped."""
    some: list[ConversationRow] = []
    num_chars = 0
    ends = find_ends(tokenizer) if rules > 1 else None
    for row in rows:
        some.append(row)
        num_chars += row.num_chars
        if len(some) >= _ROWS_AT_ONCE or num_chars >= _CHARS_AT_ONCE:
            yield from _tokenize(tokenizer, some, max_tokens, ends)
            some, num_chars = [], 0
    yield from _tokenize(tokenizer, some, max_tokens, ends)


def find_ends(tokenizer: Any) -> Ends:
    """Return the ids that a plain text gets at its ends."""
    # The tokenizer is asked: Llama 3 and Gemma start every text with their BOS, Qwen and GPT-2 with
    # none, and the BOS of SmolLM2 opens a turn of a chat.
    with bounded_tokenizer(1):
        alone = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    places = range(len(whole) - len(alone) + 1)
    at = next((place for place in places if whole[place : place + len(alone)] == alone), 0)
    end = tuple(whole[at + len(alone) :]) if alone else ()
    # Without an end token a model never learns to stop.
    if not end and tokenizer.eos_token_id is not None:
        end = (tokenizer.eos_token_id,)
    return Ends(tuple(whole[:at]), end)


def _tokenize(
    tokenizer: Any, rows: list[ConversationRow], max_tokens: int, ends: Ends | None
) -> Iterator[Tokenized | Skipped]:
    if ends is None:
        rows = [_without_extra(row) for row in rows]
    drawn = _render_rows(tokenizer, rows, by_hand=ends is None)
    rendered = [text for item in drawn if not isinstance(item, Skipped) for text in item.texts]
    encoded = _encode(tokenizer, rendered, max_tokens)
    for row, item in zip(rows, drawn, strict=True):
        if isinstance(item, Skipped):
            yield item
            continue
        segments = [next(encoded) for _ in item.texts]
        if not row.turns and ends is not None:
            segments = [_close(segment, ends) for segment in segments]
        cut = _cut(row.number, segments, max_tokens)
        yield (
            cut
            if isinstance(cut, Skipped)
            else replace(cut, label=row.label, extra=item.extra, dropped=item.dropped)
        )


def _without_extra(row: ConversationRow) -> ConversationRow:
    return replace(
        row,
        turns=tuple(replace(turn, extra=()) for turn in row.turns),
        rejected=tuple(replace(turn, extra=()) for turn in row.rejected),
    )


def _encode(
    tokenizer: Any, rendered: Sequence[tuple[str, list[range]]], max_tokens: int
) -> Iterator[_Encoded]:
    """Yield the tokens of each text in order; the longest texts are tokenized in pieces."""
    short = [text for text, _ in rendered if len(text) <= _CHARS_AT_ONCE]
    encoding = _call(tokenizer, short) if short else {"input_ids": [], "offset_mapping": []}
    encoded = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    for text, spans in rendered:
        if len(text) > _CHARS_AT_ONCE:
            yield _encode_pieces(tokenizer, text, spans, max_tokens)
            continue
        ids, offsets = next(encoded)
        yield _Encoded(np.array(ids, dtype=np.int32), mark_targets(offsets, spans), len(ids))


def _call(tokenizer: Any, texts: list[str]) -> Any:
    with bounded_tokenizer(sum(map(len, texts))):
        encoding = tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
    for text, ids in zip(texts, encoding["input_ids"], strict=True):
        if len(ids) > MAX_TOKENS_PER_CHAR * (1 + len(text)):
            raise ExpectedError(
                f"The tokenizer of this model makes {len(ids):,} tokens of a text of {len(text):,} "
                "characters, which no real one does.",
                bounded_work.TOKENIZER_HINT,
            )
    return encoding


def _encode_pieces(tokenizer: Any, text: str, spans: Sequence[range], max_tokens: int) -> _Encoded:
    """Return the first tokens of a long text, and its total number of tokens."""
    kept: list[int] = []
    offsets: list[tuple[int, int]] = []
    num_tokens, start = 0, 0
    while start < len(text):
        stop = _find_piece_end(text, start)
        encoding = _call(tokenizer, [text[start:stop]])
        num_tokens += len(encoding["input_ids"][0])
        if len(kept) <= max_tokens:
            kept += encoding["input_ids"][0]
            offsets += [(a + start, b + start) for a, b in encoding["offset_mapping"][0]]
        start = stop
    return _Encoded(np.array(kept, dtype=np.int32), mark_targets(offsets, spans), num_tokens)


def _find_piece_end(text: str, start: int) -> int:
    """Return the end of a piece: before a space, since tokens rarely span one."""
    stop = start + _PIECE_CHARS
    if stop >= len(text):
        return len(text)
    space = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
    return space if space > start else stop


def _close(text: _Encoded, ends: Ends) -> _Encoded:
    """Return a plain text with its ends; rendered data may already have them."""
    # A doubled BOS or EOS would teach the model to repeat it.
    ids = text.ids
    begin = () if tuple(ids[: len(ends.begin)]) == ends.begin else ends.begin
    has_end = bool(ends.end) and tuple(ids[-len(ends.end) :]) == ends.end
    # The end of a text that is longer than the kept part is cut, but counts.
    is_whole = len(ids) == text.num_tokens
    end = () if has_end and is_whole else ends.end
    last = end if is_whole else ()
    is_target = np.ones(len(begin) + len(ids) + len(last), dtype=np.bool_)
    is_target[: max(1, len(begin))] = False
    return _Encoded(
        np.array([*begin, *ids, *last], dtype=np.int32),
        is_target,
        len(begin) + text.num_tokens + len(end),
    )


def _cut(row: int, texts: Sequence[_Encoded], max_tokens: int) -> Tokenized | Skipped:
    longest = max(text.num_tokens for text in texts)
    num_tokens = sum(text.num_tokens for text in texts)
    cut = tuple(Segment(row, text.ids[:max_tokens], text.is_target[:max_tokens]) for text in texts)
    # In a pair both sides need targets: a side without a target has no log-probability.
    if not all(segment.num_targets for segment in cut):
        left = f"nothing to learn is left within {max_tokens} of its {longest} tokens"
        is_long = longest > max_tokens
        reason = left if is_long else "no answer"
        return Skipped(row=row, reason=reason, num_tokens=num_tokens if is_long else 0)
    if len(cut) == 2 and np.array_equal(cut[0].ids, cut[1].ids):
        where = f" within {max_tokens} of their {longest} tokens" if longest > max_tokens else ""
        return Skipped(row=row, reason=f"'chosen' and 'rejected' are the same{where}")
    return Tokenized(cut, cut_from=longest if longest > max_tokens else None, num_tokens=num_tokens)


def mark_targets(
    offsets: Sequence[tuple[int, int]], spans: Sequence[range]
) -> npt.NDArray[np.bool_]:
    """Return the mask of tokens that overlap a character range; the first token never counts."""
    place_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    is_target = np.zeros(len(place_T2), dtype=np.bool_)
    for span in spans:
        is_target |= (place_T2[:, 0] < span.stop) & (place_T2[:, 1] > span.start)
    is_target[:1] = False  # no token precedes the first one to predict it
    return is_target


def _render_rows(
    tokenizer: Any, rows: Sequence[ConversationRow], *, by_hand: bool
) -> list[_Rendered | Skipped]:
    """Return the texts of rows.

    Raises:
        ExpectedError: the chat template does not end, or fills the memory.
    """
    drawn: list[_Rendered | Skipped] = []
    number, allowed_s, started_s = 0, _LEAST_RENDER_S, time.thread_time()
    try:
        with bounded_work.limited_memory():
            for row in rows:
                number = row.number
                more_s = _RENDER_S * (len(row.turns) + len(row.rejected))
                # Long conversations get more time: each answer is rendered separately.
                draw = partial(_render_row, tokenizer, row, by_hand=by_hand)
                drawn.append(
                    bounded_work.within_limits(
                        draw, bounded_work.SOFT_S + more_s, bounded_work.HARD_S + more_s
                    )
                )
                allowed_s += _RENDER_S + more_s
                # Of the thread, not of the wall clock: other programs may slow this one down.
                if time.thread_time() - started_s > allowed_s:
                    raise bounded_work.LimitReached(
                        f"{allowed_s:.0f} s of computing for {len(drawn)} rows"
                    )
    except (bounded_work.LimitReached, MemoryError) as error:
        reason = str(error) or "the memory that it may use"
        raise ExpectedError(
            f"The chat template of this model needs more than {reason}, at row {number:,} of the "
            "data.",
            bounded_work.KILLED_HINT,
        ) from None
    return drawn


def _render_row(tokenizer: Any, row: ConversationRow, *, by_hand: bool) -> _Rendered | Skipped:
    """Return the texts of a row.

    Args:
        tokenizer: tokenizer with its chat template.
        row: the row.
        by_hand: True if a plain text gets its ends as text, as in version 1 of `TEXT_RULES`.
    """
    try:
        if not row.turns:
            text = row.text
            if by_hand:
                text = _enclose(text, tokenizer.bos_token or "", tokenizer.eos_token or "")
            return _Rendered(((text, [range(len(text))]),))
        sides = [row.turns, row.rejected] if row.rejected else [row.turns]
        texts = [_render_with_answers(tokenizer, turns, row.num_shared_turns) for turns in sides]
        extra = tuple(sorted({key for turns in sides for turn in turns for key, _ in turn.extra}))
        dropped = tuple(key for key in extra if _is_dropped(tokenizer, sides, texts, key))
        return _Rendered(tuple(texts), extra, dropped)
    except ValueError as error:
        return Skipped(row=row.number, reason=str(error), malformed=True)


def _is_dropped(
    tokenizer: Any,
    sides: Sequence[tuple[ConversationTurn, ...]],
    texts: Sequence[tuple[str, list[range]]],
    key: str,
) -> bool:
    """Return whether the texts are the same without a key of the messages."""
    for turns, (text, _) in zip(sides, texts, strict=True):
        without = tuple(
            replace(turn, extra=tuple(pair for pair in turn.extra if pair[0] != key))
            for turn in turns
        )
        try:
            if _fold_system(tokenizer, without)[1] != text:
                return False
        except ValueError:
            return False  # the template needs it
    return True


def _enclose(text: str, begin: str, end: str) -> str:
    """Return the text with both tokens; rendered data may already have them."""
    # A doubled BOS or EOS would teach the model to repeat it.
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
    # A greeting has no question before it, but the template may insert its own text.
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
    """Return the range that changes when another answer replaces this one."""
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
        # An equal text means that the template ignores the system turn.
        if text != _render(tokenizer, turns[1:], add_generation_prompt=False):
            return turns, text
    except ValueError:
        pass
    first = replace(turns[1], content=f"{turns[0].content}\n\n{turns[1].content}")
    folded = (first, *turns[2:])
    return folded, _render(tokenizer, folded, add_generation_prompt=False)


def _try_render(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], *, add_generation_prompt: bool
) -> str | None:
    """Return the text, or None if the template rejects these turns without the later ones."""
    try:
        return _render(tokenizer, turns, add_generation_prompt=add_generation_prompt)
    except ValueError:
        return None


def _render(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], *, add_generation_prompt: bool
) -> str:
    messages = [{**dict(turn.extra), "role": turn.role, "content": turn.content} for turn in turns]
    template = tokenizer.get_chat_template()
    if not isinstance(template, str):
        raise ValueError("the chat template of this model is no text")
    # The macro shadows the function that Transformers gives to templates.
    if "strftime_now" in template:
        template = _STOPPED_CLOCK + template
    return templates.render(
        tokenizer, messages, template, add_generation_prompt=add_generation_prompt
    )
