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
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.contract.spec import LongText
from agents.errors import ExpectedError
from agents.shared.files import bounded_work
from agents.trainer.data import templates
from agents.trainer.data.conversations import ConversationRow, ConversationTurn
from agents.trainer.data.examples import Segment
from agents.trainer.data.tally import Skipped

TEXT_RULES = 3
"""Version of the rules by which rows become tokens. A run keeps its first version. Version 1: plain
text starts with `bos_token` even if the tokenizer does not add it, and messages are role and
content. Version 2: rows are not reshaped, and marks of messages are not read.
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
class _Text:
    """A rendered text and its characters to learn."""

    text: str
    spans: list[range]
    masked: list[range] = field(default_factory=list)
    """Parts of `spans` that the data excludes; a token that overlaps one is not learned."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The texts of one row."""

    texts: tuple[_Text, ...]
    extra: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The beginning of a tokenized text."""

    ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    num_tokens: int
    """Number of tokens of the whole text."""
    text: str = ""
    """The text, if it is to be divided."""
    stops: npt.NDArray[np.int64] | None = None
    """Position behind each token in `text` (T,)."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Ids before and after a plain text."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


def tokenize_rows(
    tokenizer: Any,
    rows: Iterable[ConversationRow],
    max_tokens: int,
    rules: int = TEXT_RULES,
    long_text: LongText = "cut",
) -> Iterator[Tokenized | Skipped]:
    """Yield each row with at most `max_tokens`, or the reason why it is skipped.

    Args:
        tokenizer: the model's tokenizer.
        rows: the rows.
        max_tokens: maximum number of tokens of an example.
        rules: version of `TEXT_RULES`.
        long_text: what becomes of plain text that is longer; conversations are cut.

    Raises:
        ExpectedError: a text is too long, and `long_text` is `refuse`.
    """
    some: list[ConversationRow] = []
    num_chars = 0
    ends = find_ends(tokenizer) if rules > 1 else None
    texts = _Texts(max_tokens, ends, long_text if rules >= 3 else "cut")
    for row in rows:
        some.append(row)
        num_chars += row.num_chars
        if len(some) >= _ROWS_AT_ONCE or num_chars >= _CHARS_AT_ONCE:
            yield from _tokenize(tokenizer, some, max_tokens, texts)
            some, num_chars = [], 0
    yield from _tokenize(tokenizer, some, max_tokens, texts)
    yield from texts.finish()


def find_ends(tokenizer: Any) -> Ends:
    """Return the ids that a plain text gets at its ends."""
    # The tokenizer is asked: Llama 3 and Gemma start every text with their BOS, Qwen and GPT-2 with
    # none, and the BOS of SmolLM2 opens a turn of a chat.
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
    tokenizer: Any, rows: list[ConversationRow], max_tokens: int, texts: _Texts
) -> Iterator[Tokenized | Skipped]:
    ends = texts.ends
    if ends is None:
        rows = [_without_extra(row) for row in rows]
    drawn = _render_rows(tokenizer, rows, by_hand=ends is None)
    rendered = [one for item in drawn if not isinstance(item, Skipped) for one in item.texts]
    special = set(tokenizer.all_special_ids) if any(row.learned for row in rows) else set()
    # A text that is divided is needed as a whole.
    encoded = _encode(tokenizer, rendered, max_tokens if texts.mode == "cut" else None)
    for row, item in zip(rows, drawn, strict=True):
        if isinstance(item, Skipped):
            yield item
            continue
        segments = [next(encoded) for _ in item.texts]
        if not row.turns and ends is not None:
            if texts.mode != "cut" and not row.learned:
                yield from texts.divide(row, segments[0])
                continue
            segments = [
                _close_rendered(one, ends, special) if row.learned else _close(one, ends)
                for one in segments
            ]
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
    tokenizer: Any, rendered: Sequence[_Text], max_tokens: int | None
) -> Iterator[_Encoded]:
    """Yield the tokens of each text in order; the longest texts are tokenized in pieces.

    Without `max_tokens`, all tokens are kept, with their positions.
    """
    short = [one.text for one in rendered if len(one.text) <= _CHARS_AT_ONCE]
    encoding = _call(tokenizer, short) if short else {"input_ids": [], "offset_mapping": []}
    encoded = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    for one in rendered:
        if len(one.text) > _CHARS_AT_ONCE:
            yield _encode_pieces(tokenizer, one, max_tokens)
            continue
        ids, offsets = next(encoded)
        yield _pack(one, ids, offsets, len(ids), keeps_text=max_tokens is None)


def _pack(
    one: _Text, ids: list[int], offsets: list[tuple[int, int]], num_tokens: int, *, keeps_text: bool
) -> _Encoded:
    is_target = mark_targets(offsets, one.spans, one.masked)
    stops = np.array([stop for _, stop in offsets], dtype=np.int64) if keeps_text else None
    text = one.text if keeps_text else ""
    return _Encoded(np.array(ids, dtype=np.int32), is_target, num_tokens, text, stops)


def _call(tokenizer: Any, texts: list[str]) -> Any:
    return tokenizer(
        texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
    )


def _encode_pieces(tokenizer: Any, one: _Text, max_tokens: int | None) -> _Encoded:
    """Return the first tokens of a long text, and its total number of tokens."""
    text = one.text
    kept: list[int] = []
    offsets: list[tuple[int, int]] = []
    num_tokens, start = 0, 0
    while start < len(text):
        stop = _find_piece_end(text, start)
        encoding = _call(tokenizer, [text[start:stop]])
        num_tokens += len(encoding["input_ids"][0])
        if max_tokens is None or len(kept) <= max_tokens:
            kept += encoding["input_ids"][0]
            offsets += [(a + start, b + start) for a, b in encoding["offset_mapping"][0]]
        start = stop
    return _pack(one, kept, offsets, num_tokens, keeps_text=max_tokens is None)


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


def _close_rendered(text: _Encoded, ends: Ends, special: Set[int]) -> _Encoded:
    """Return a rendered text with its ends, unless it has a special token in their place."""
    ids = text.ids
    is_whole = len(ids) == text.num_tokens
    begin = () if int(ids[0]) in special else ends.begin
    end = () if int(ids[-1]) in special or not is_whole else ends.end
    # The end is learned if the text ends with an answer.
    learns_end = [bool(text.is_target[-1])] * len(end)
    return _Encoded(
        np.array([*begin, *ids, *end], dtype=np.int32),
        np.array([*[False] * len(begin), *text.is_target, *learns_end], dtype=np.bool_),
        len(begin) + text.num_tokens + len(end),
    )


class _Texts:
    """Divides or joins plain texts, so that each of their tokens is in exactly one example.

    Args:
        max_tokens: maximum number of tokens of an example.
        ends: ids before and after a text; None: texts have them already.
        mode: what becomes of a longer text.
    """

    def __init__(self, max_tokens: int, ends: Ends | None, mode: LongText) -> None:
        self.ends = ends
        self.mode: LongText = mode if ends is not None else "cut"
        self._max_tokens = max_tokens
        self._row = 0
        """First row of the example that is being filled."""
        self._ids: list[npt.NDArray[np.int32]] = []
        self._num_tokens = 0

    def divide(self, row: ConversationRow, text: _Encoded) -> Iterator[Tokenized | Skipped]:
        """Yield the examples of a text.

        Raises:
            ExpectedError: the text is too long, and has to be refused.
        """
        assert self.ends is not None
        whole = _close(text, self.ends)
        if whole.num_tokens > self._max_tokens and self.mode == "refuse":
            raise ExpectedError(
                f"Row {row.number:,} of the data has {whole.num_tokens:,} tokens, more than "
                f"sequence_tokens ({self._max_tokens:,}), and data.long_text is refuse.",
                "Raise sequence_tokens, shorten it, or set data.long_text: split",
            )
        if self.mode == "join":
            yield from self._fill(row.number, whole)
        elif whole.num_tokens <= self._max_tokens:
            yield _cut(row.number, [whole], self._max_tokens)
        else:
            yield from self._split(row.number, text, self.ends)

    def _split(self, row: int, text: _Encoded, ends: Ends) -> Iterator[Tokenized | Skipped]:
        assert text.stops is not None
        room = max(1, self._max_tokens - len(ends.begin) - len(ends.end))
        start = 0
        while start < len(text.ids):
            stop = find_cut(text.text, text.stops, start, start + room)
            piece = _Encoded(text.ids[start:stop], text.is_target[start:stop], stop - start)
            # Only the end of a document teaches the model to stop.
            own = ends if stop == len(text.ids) else Ends(ends.begin, ())
            yield _cut(row, [_close(piece, own)], self._max_tokens)
            start = stop

    def _fill(self, row: int, text: _Encoded) -> Iterator[Tokenized]:
        place = 0
        while place < len(text.ids):
            if not self._num_tokens:
                self._row = row
            taken = text.ids[place : place + self._max_tokens - self._num_tokens]
            self._ids.append(taken)
            self._num_tokens += len(taken)
            place += len(taken)
            if self._num_tokens == self._max_tokens:
                yield from self.finish()

    def finish(self) -> Iterator[Tokenized]:
        """Yield the example that is being filled, if any."""
        if self._num_tokens > 1:
            # In a block, the token before a text's first one predicts it.
            targets = np.arange(self._num_tokens) > 0
            segment = Segment(self._row, np.concatenate(self._ids), targets)
            yield Tokenized((segment,), num_tokens=self._num_tokens)
        self._ids, self._num_tokens = [], 0


_BREAKS = ("\n\n", "\n", ". ", "! ", "? ", "\u3002", " ")
"""Where a text is divided, the best first; U+3002 ends Chinese and Japanese sentences."""


def find_cut(text: str, stops: npt.NDArray[np.int64], start: int, most: int) -> int:
    """Return the token before which a text is divided, in the later half of what fits.

    Args:
        text: the text.
        stops: position behind each token (T,).
        start: first token of the piece.
        most: the first token that does not fit.
    """
    if most >= len(stops):
        return len(stops)
    least = start + max(1, (most - start) // 2)
    low, high = int(stops[least - 1]), int(stops[most - 1])
    for sign in _BREAKS:
        found = text.rfind(sign, low, high)
        if found >= 0:
            # A space belongs to the word behind it.
            place = found + len(sign.rstrip(" "))
            cut = int(np.searchsorted(stops, place, side="right"))
            if start < cut <= most:
                return cut
    return most


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
    offsets: Sequence[tuple[int, int]], spans: Sequence[range], masked: Sequence[range] = ()
) -> npt.NDArray[np.bool_]:
    """Return the mask of tokens that overlap a character range; the first token never counts.

    Tokens that overlap one of `masked` do not count either.
    """
    place_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    is_target = np.zeros(len(place_T2), dtype=np.bool_)
    for span in spans:
        is_target |= (place_T2[:, 0] < span.stop) & (place_T2[:, 1] > span.start)
    for span in masked:
        is_target &= (place_T2[:, 0] >= span.stop) | (place_T2[:, 1] <= span.start)
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
            spans = list(row.learned) or [range(len(text))]
            texts = [_Text(text, spans)]
            if row.rejected_text:
                start = row.learned[0].start
                texts.append(_Text(row.rejected_text, [range(start, len(row.rejected_text))]))
            return _Rendered(tuple(texts))
        sides = [row.turns, row.rejected] if row.rejected else [row.turns]
        texts = [_render_with_answers(tokenizer, turns, row.num_shared_turns) for turns in sides]
        extra = tuple(sorted({key for turns in sides for turn in turns for key, _ in turn.extra}))
        dropped = tuple(key for key in extra if _is_dropped(tokenizer, sides, texts, key))
        return _Rendered(tuple(texts), extra, dropped)
    except ValueError as error:
        return Skipped(row=row.number, reason=str(error), malformed=True)


def _is_dropped(
    tokenizer: Any, sides: Sequence[tuple[ConversationTurn, ...]], texts: Sequence[_Text], key: str
) -> bool:
    """Return whether the texts are the same without a key of the messages."""
    for turns, one in zip(sides, texts, strict=True):
        without = tuple(
            replace(turn, extra=tuple(pair for pair in turn.extra if pair[0] != key))
            for turn in turns
        )
        try:
            if _fold_system(tokenizer, without)[1] != one.text:
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
) -> _Text:
    folded, text = _fold_system(tokenizer, turns)
    num_shared_turns -= len(turns) - len(folded)
    found = _Text(text, [])
    for place, turn in enumerate(folded):
        if turn.role == "assistant" and turn.content.strip() and place >= num_shared_turns:
            span = _find_answer(tokenizer, folded, place, text)
            found.spans.append(span)
            found.masked.extend(_find_masked(turn, span, text))
    return found


def _find_masked(turn: ConversationTurn, span: range, text: str) -> Iterator[range]:
    """Yield the parts of an answer's range that its data excludes from learning.

    A mark at either end of the answer includes what the template writes there.
    """
    if not turn.masked:
        return
    said = turn.content.strip()
    start = text.find(said, span.start, span.stop)
    if start < 0:
        raise ValueError(
            "the chat template of this model changes the assistant's answer, so the part that is "
            "not to be learned cannot be located"
        )
    start -= len(turn.content) - len(turn.content.lstrip())
    for part in turn.masked:
        is_first = not turn.content[: part.start].strip()
        is_last = not turn.content[part.stop :].strip()
        begin = span.start if is_first else start + part.start
        yield range(begin, span.stop if is_last else start + part.stop)


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
