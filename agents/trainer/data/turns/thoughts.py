"""Find the thought of an answer, and drop, move or keep it as the data and the template ask.

A thought stands in a key of the message, or at the beginning of its content between two marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from agents.contract.spec import Reasoning
from agents.shared.data.columns import THOUGHT_KEYS, THOUGHT_MARKS
from agents.trainer.data.conversations import ConversationRow, ConversationTurn


def find_thought(turn: ConversationTurn) -> str:
    """Return the thought of an answer, from its content or from another key; empty: it has none."""
    for opening, closing in THOUGHT_MARKS:
        before, found, _ = turn.content.partition(closing)
        if found:
            return before.rpartition(opening)[2].strip()
    keys = dict(turn.extra)
    return next((keys[key].strip() for key in THOUGHT_KEYS if keys.get(key)), "")


def name_thought(turn: ConversationTurn) -> str:
    """Return the mark or the key by which an answer has its thought."""
    marks = (opening for opening, closing in THOUGHT_MARKS if closing in turn.content)
    keys = (key for key in THOUGHT_KEYS if dict(turn.extra).get(key))
    return next(marks, "") or next(keys, "")


def without_thought(turn: ConversationTurn) -> ConversationTurn:
    """Return an answer without its thought."""
    extra = tuple(pair for pair in turn.extra if pair[0] not in THOUGHT_KEYS)
    content = turn.content
    for _, closing in THOUGHT_MARKS:
        content = content.partition(closing)[2] if closing in content else content
    content = content if content == turn.content else content.lstrip()
    cut = len(turn.content) - len(content)

    def moved(part: range) -> range:
        return range(max(0, part.start - cut), part.stop - cut)

    # An answer that is marked as a whole stays so, even if only its call is left.
    stays = not content and bool(turn.calls)
    masked = tuple(part for part in map(moved, turn.masked) if len(part) or stays)
    weighted = ((moved(part), weight) for part, weight in turn.weighted)
    kept = tuple(one for one in weighted if len(one[0]) or stays)
    return replace(turn, content=content, extra=extra, masked=masked, weighted=kept)


def treat_thoughts(row: ConversationRow | str, reasoning: Reasoning) -> ConversationRow | str:
    """Return a row with its thoughts as `data.reasoning` asks, or the reason why it is empty."""
    if isinstance(row, str) or reasoning == "learn" or not row.turns:
        return row
    change = without_thought if reasoning == "drop" else _keep
    turns, rejected = (
        tuple(change(turn) if turn.role == "assistant" else turn for turn in side)
        for side in (row.turns, row.rejected)
    )
    first = row.num_shared_turns
    if not any(turn.is_answer for turn in turns[first:]) or (
        rejected and not any(turn.is_answer for turn in rejected[first:])
    ):
        return "the answer is only a thought, which data.reasoning drops"
    if turns == rejected:
        return "'chosen' and 'rejected' differ only in thoughts, which data.reasoning drops"
    return replace(row, turns=turns, rejected=rejected)


def _keep(turn: ConversationTurn) -> ConversationTurn:
    return replace(turn, learns_thought=False)


def place_thought(turn: ConversationTurn, template: str) -> ConversationTurn:
    """Return an answer with its thought in a key, if the template reads a key and no marks.

    gpt-oss writes thoughts into a channel of their own, and marks in a content are only text to it.
    """
    thought = find_thought(turn)
    mark = next((pair for pair in THOUGHT_MARKS if pair[1] in turn.content), None)
    is_marked = turn.masked or len({weight for _, weight in turn.weighted}) > 1
    if not thought or mark is None or mark[1] in template or is_marked:
        return turn
    if not any(re.search(rf"\b{key}\b", template) for key in THOUGHT_KEYS):
        return turn
    rest = without_thought(turn)
    return replace(rest, extra=(*rest.extra, (THOUGHT_KEYS[0], thought)))


def find_kept(turn: ConversationTurn, span: range, text: str) -> Iterator[range]:
    """Yield the part of an answer's range that is its thought, if it is not to be learned."""
    thought = "" if turn.learns_thought else find_thought(turn)
    place = text.find(thought, span.start, span.stop) if thought else -1
    if place < 0:
        return
    end = place + len(thought)
    after = text[end : span.stop].lstrip()
    closing = next((mark for _, mark in THOUGHT_MARKS if after.startswith(mark)), "")
    after = after.removeprefix(closing).lstrip() if closing else text[end : span.stop]
    yield range(span.start, span.stop - len(after))
