"""Tokenize rows and mark the targets: the tokens whose prediction is learned.

A conversation is rendered with the tokenizer's chat template, or a plain one if it has none, and
only the assistant's answers are learned; `answers` finds them. Both conversations of a preference
pair are rendered this way, and their shared turns are not learned. If a template ends the last
answer with no token, the tokenizer's end token is added, so that the model learns to stop.

The whole text is tokenized once, so the ids are exactly those of a chat with the model. Plain text
is learned completely. It starts with the tokens that the tokenizer puts before a text, and ends
with its end token, which marks the end of a document.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.contract.spec import Learn, LongText
from agents.errors import ExpectedError
from agents.shared.data.known_templates import BEGIN
from agents.shared.files import bounded_work
from agents.trainer.data.answers import (
    DROPPED_THOUGHT,
    ENDLESS,
    UNENDED,
    Note,
    RenderedText,
    TurnEnd,
    fold_system,
)
from agents.trainer.data.conversations import ConversationRow, ConversationTurn, Weighted
from agents.trainer.data.examples import Segment
from agents.trainer.data.frames import Frames
from agents.trainer.data.stops import find_bounded_turn_end
from agents.trainer.data.tally import Skipped
from agents.trainer.data.tokenizer_bounds import MAX_TOKENS_PER_CHAR, bounded_tokenizer

TEXT_RULES = 3
"""Version of the rules by which rows become tokens. A run keeps its first version. Version 1: plain
text starts with `bos_token` even if the tokenizer does not add it, and messages are role and
content. Version 2: rows are not reshaped, and marks of messages are not read; the last
answer is learned as the template writes it, even if a chat begins it otherwise.
"""


def begin_template(tokenizer: Any, template: str, rules: int) -> str:
    """Return a known chat template with the tokenizer's own beginning."""
    begins = rules == 1 or bool(find_ends(tokenizer).begin)
    return template if begins else template.removeprefix(BEGIN)


# Number of rows and characters per call. The tokenizer takes about 80 bytes per character.
_ROWS_AT_ONCE = 512
_CHARS_AT_ONCE = 1 << 21
# A longer text is tokenized in pieces of this size, and only the beginning is kept.
_PIECE_CHARS = 1 << 20
# Computing time for rendering: for all rows of a call, and for each of their turns, in seconds.
# Real templates take a hundredth of it.
_LEAST_RENDER_S = 10.0
_RENDER_S = 0.2


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
    notes: frozenset[Note] = frozenset()
    """Differences between the row and a chat with the model."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The texts of one row."""

    texts: tuple[RenderedText, ...]
    extra: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def notes(self) -> frozenset[Note]:
        return frozenset().union(*(one.notes for one in self.texts))


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
    weights: npt.NDArray[np.float32] | None = None
    """Weight of each token (T,); None: 1."""


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
    learn: Learn = "answers",
) -> Iterator[Tokenized | Skipped]:
    """Yield each row with at most `max_tokens`, or the reason why it is skipped.

    Args:
        tokenizer: the model's tokenizer.
        rows: the rows.
        max_tokens: maximum number of tokens of an example.
        rules: version of `TEXT_RULES`.
        long_text: what becomes of plain text that is longer; conversations are cut.
        learn: part of a conversation that is learned; pairs learn what differs.

    Raises:
        ExpectedError: a text is too long, and `long_text` is `refuse`.
    """
    some: list[ConversationRow] = []
    num_chars = 0
    ends = find_ends(tokenizer) if rules > 1 else None
    mode = long_text if rules >= 3 else "cut"
    texts = _Texts(max_tokens, ends, mode, rules, Frames(tokenizer, rules, learn))
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
    tokenizer: Any, rows: list[ConversationRow], max_tokens: int, texts: _Texts
) -> Iterator[Tokenized | Skipped]:
    ends = texts.ends
    if ends is None:
        rows = [_without_extra(row) for row in rows]
    drawn = _render_rows(tokenizer, rows, texts.rules, texts.frames)
    rendered = [one for item in drawn if not isinstance(item, Skipped) for one in item.texts]
    special = set(tokenizer.all_special_ids) if any(row.learned for row in rows) else set()
    # A text that is divided is needed as a whole.
    encoded = _encode(tokenizer, rendered, max_tokens if texts.mode == "cut" else None)
    for row, item in zip(rows, drawn, strict=True):
        if isinstance(item, Skipped):
            yield item
            continue
        segments = [next(encoded) for _ in item.texts]
        notes = item.notes
        if texts.rules >= 3 and any(one.ends_with_answer for one in item.texts):
            end = texts.turn_end or find_bounded_turn_end(tokenizer)
            texts.turn_end = end
            if end.token is None:
                notes |= {(ENDLESS, "")}
            elif end.is_added:
                notes |= {(UNENDED, tokenizer.convert_ids_to_tokens(end.token))}
                segments = [_end_answer(one, end.token) for one in segments]
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
            else replace(cut, label=row.label, extra=item.extra, dropped=item.dropped, notes=notes)
        )


def _end_answer(text: _Encoded, end: int) -> _Encoded:
    """Return a text whose last answer ends with a token, unless it is excluded from learning."""
    if not text.is_target[-1]:
        return text
    if len(text.ids) < text.num_tokens:  # the end is cut, but counts
        return replace(text, num_tokens=text.num_tokens + 1)
    ids, is_target = np.append(text.ids, np.int32(end)), np.append(text.is_target, np.True_)
    weights = None if text.weights is None else np.append(text.weights, text.weights[-1])
    return replace(text, ids=ids, is_target=is_target, num_tokens=len(ids), weights=weights)


def _without_extra(row: ConversationRow) -> ConversationRow:
    return replace(
        row,
        turns=tuple(replace(turn, extra=()) for turn in row.turns),
        rejected=tuple(replace(turn, extra=()) for turn in row.rejected),
    )


def _encode(
    tokenizer: Any, rendered: Sequence[RenderedText], max_tokens: int | None
) -> Iterator[_Encoded]:
    """Yield the tokens of each text in order; the longest texts are tokenized in pieces.

    Without `max_tokens`, all tokens are kept, with their positions.
    """
    short = [one.text for one in rendered if len(one.text) <= _CHARS_AT_ONCE]
    encoded = iter(_call(tokenizer, short) if short else ())
    for one in rendered:
        if len(one.text) > _CHARS_AT_ONCE:
            yield _encode_pieces(tokenizer, one, max_tokens)
        else:
            yield _read_encoding(one, next(encoded), keeps_text=max_tokens is None)


def _read_encoding(one: RenderedText, encoding: Any, *, keeps_text: bool) -> _Encoded:
    """Return the tokens of a text that was tokenized at once."""
    ids = encoding.ids
    if keeps_text and one.is_text:
        return _pack(one, ids, encoding.offsets, len(ids), keeps_text=True)
    is_target = _mark_few(encoding, one, len(ids))
    weights = weigh_tokens(encoding.offsets, one.weights) if one.weights else None
    return _Encoded(np.array(ids, dtype=np.int32), is_target, len(ids), weights=weights)


def _mark_few(encoding: Any, one: RenderedText, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Return `mark_targets` without the list of all offsets, whose making takes long."""
    is_target = np.zeros(num_tokens, dtype=np.bool_)
    for span, value in (
        *((part, True) for part in one.spans),
        *((part, False) for part in one.masked),
    ):
        if not span:
            continue
        first, last = encoding.char_to_token(span.start), encoding.char_to_token(span.stop - 1)
        if first is None or last is None:  # a character in no token
            return mark_targets(encoding.offsets, one.spans, one.masked)
        last += 1
        # A character may have several tokens.
        while last < num_tokens and (at := encoding.token_to_chars(last)) and at[0] < span.stop:
            if at[1] <= at[0]:
                return mark_targets(encoding.offsets, one.spans, one.masked)
            last += 1
        is_target[first:last] = value
    is_target[:1] = False
    return is_target


def _pack(
    one: RenderedText,
    ids: list[int],
    offsets: list[tuple[int, int]],
    num_tokens: int,
    *,
    keeps_text: bool,
) -> _Encoded:
    is_target = mark_targets(offsets, one.spans, one.masked)
    stops = np.array([stop for _, stop in offsets], dtype=np.int64) if keeps_text else None
    text = one.text if keeps_text else ""
    weights = weigh_tokens(offsets, one.weights) if one.weights else None
    return _Encoded(np.array(ids, dtype=np.int32), is_target, num_tokens, text, stops, weights)


def _call(tokenizer: Any, texts: list[str]) -> list[Any]:
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    with bounded_tokenizer(sum(map(len, texts))):
        encodings = backend.encode_batch(texts, add_special_tokens=False)
    for text, one in zip(texts, encodings, strict=True):
        if len(one) > MAX_TOKENS_PER_CHAR * (1 + len(text)):
            raise ExpectedError(
                f"The tokenizer of this model makes {len(one):,} tokens of a text of {len(text):,} "
                "characters, which no real one does.",
                bounded_work.TOKENIZER_HINT,
            )
    return encodings


def _encode_pieces(tokenizer: Any, one: RenderedText, max_tokens: int | None) -> _Encoded:
    """Return the first tokens of a long text, and its total number of tokens."""
    text = one.text
    kept: list[int] = []
    offsets: list[tuple[int, int]] = []
    num_tokens, start = 0, 0
    while start < len(text):
        stop = _find_piece_end(text, start)
        (encoding,) = _call(tokenizer, [text[start:stop]])
        num_tokens += len(encoding)
        if max_tokens is None or len(kept) <= max_tokens:
            kept += encoding.ids
            offsets += [(a + start, b + start) for a, b in encoding.offsets]
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
        rules: version of `TEXT_RULES`.
        frames: what the chat template writes around contents.
    """

    def __init__(
        self, max_tokens: int, ends: Ends | None, mode: LongText, rules: int, frames: Frames
    ) -> None:
        self.ends = ends
        self.rules = rules
        self.frames = frames
        self.turn_end: TurnEnd | None = None
        """Token that ends a learned answer; None: not needed so far."""
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
    cut = tuple(
        Segment(
            row,
            text.ids[:max_tokens],
            text.is_target[:max_tokens],
            None if text.weights is None else text.weights[:max_tokens],
        )
        for text in texts
    )
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


def weigh_tokens(
    offsets: Sequence[tuple[int, int]], weights: Sequence[Weighted]
) -> npt.NDArray[np.float32]:
    """Return the weight of each token (T,): the last one of `weights` that it overlaps, else 1."""
    place_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    weight_T = np.ones(len(place_T2), dtype=np.float32)
    for span, weight in weights:
        weight_T[(place_T2[:, 0] < span.stop) & (place_T2[:, 1] > span.start)] = weight
    return weight_T


def _render_rows(
    tokenizer: Any, rows: Sequence[ConversationRow], rules: int, frames: Frames
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
                draw = partial(_render_row, tokenizer, row, rules, frames)
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


def _render_row(
    tokenizer: Any, row: ConversationRow, rules: int, frames: Frames
) -> _Rendered | Skipped:
    """Return the texts of a row."""
    try:
        if not row.turns:
            text = row.text
            if rules == 1:  # a plain text gets its ends as text
                text = _enclose(text, tokenizer.bos_token or "", tokenizer.eos_token or "")
            spans = list(row.learned) or [range(len(text))]
            texts = [RenderedText(text, spans, is_text=True)]
            if row.rejected_text:
                start = row.learned[0].start
                texts.append(
                    RenderedText(row.rejected_text, [range(start, len(row.rejected_text))])
                )
            return _Rendered(tuple(texts))
        sides = [row.turns, row.rejected] if row.rejected else [row.turns]
        is_pair = bool(row.rejected)
        texts = [frames.render(turns, row.num_shared_turns, is_pair=is_pair) for turns in sides]
        extra = tuple(sorted({key for turns in sides for turn in turns for key, _ in turn.extra}))
        dropped = tuple(key for key in extra if _is_dropped(tokenizer, sides, texts, key))
        # A key that is left out everywhere is a finding of its own.
        told = {(DROPPED_THOUGHT, key) for key in dropped}
        texts = [replace(one, notes=one.notes - told) for one in texts]
        return _Rendered(tuple(texts), extra, dropped)
    except ValueError as error:
        return Skipped(row=row.number, reason=str(error), malformed=True)


def _is_dropped(
    tokenizer: Any,
    sides: Sequence[tuple[ConversationTurn, ...]],
    texts: Sequence[RenderedText],
    key: str,
) -> bool:
    """Return whether the texts are the same without a key of the messages."""
    for turns, one in zip(sides, texts, strict=True):
        without = tuple(
            replace(turn, extra=tuple(pair for pair in turn.extra if pair[0] != key))
            for turn in turns
        )
        try:
            if fold_system(tokenizer, without)[1] != one.text:
                return False
        except ValueError:
            return False  # the template needs it
    return True


def _enclose(text: str, begin: str, end: str) -> str:
    """Return the text with both tokens; rendered data may already have them."""
    # A doubled BOS or EOS would teach the model to repeat it.
    begin = "" if text.startswith(begin) else begin
    return f"{begin}{text}" if text.endswith(end) and end else f"{begin}{text}{end}"
