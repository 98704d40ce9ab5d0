"""Render a conversation with the model's chat template, and find the parts to learn.

Only the assistant's answers are learned. An answer's character range is found by rendering
prefixes: the text up to the question with the generation prompt, and the text up to the answer, are
both prefixes of the whole text. Some templates render earlier answers differently, for example
without reasoning; then the conversation is rendered again with another answer in its place, and the
differing range is the answer.

The last answer continues exactly what a chat puts before it. Where the finished text of a template
begins it otherwise, as with a thought that only the generation prompt opens, the answer is written
behind the generation prompt.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from agents.contract.spec import Learn
from agents.errors import ExpectedError
from agents.shared.data.columns import THOUGHT_MARKS
from agents.trainer.data import templates
from agents.trainer.data.conversations import ConversationTurn, Weighted, count_same
from agents.trainer.data.turns.thoughts import find_kept, find_thought, name_thought, place_thought
from agents.trainer.data.turns.tool_calls import ToolError
from agents.trainer.data.turns.tool_turns import find_left_out, settle_calls, shows_calls

_OTHER_ANSWER = "another-answer-in-its-place"
# For templates that write today's date: the same day on every node and after every resume. Llama
# 3's templates write this day by default.
_DAY = datetime(2024, 7, 26)
_SIGNS = (*"aAbBdeHIjmMpSyY", "-d", "-m")
_WRITTEN = "".join(f" | replace('%{sign}', '{_DAY.strftime('%' + sign)}')" for sign in _SIGNS)
_STOPPED_CLOCK = "{% macro strftime_now(format) %}{{ format" + _WRITTEN + " }}{% endmacro %}"
_MARK_CHARS = 64
_NOT_THINKING = {"enable_thinking": False, "thinking": False}
"""Variables by which templates ask for no thought."""
_CHANGED = (
    "the chat template of this model changes the assistant's answer, so the part to learn cannot "
    "be located"
)
CONTINUED, EMPTY_THOUGHT, OWN_THOUGHT = "continued", "empty_thought", "own_thought"
OTHER_PROMPT = "prompt"
UNENDED, DROPPED_TURN, ENDLESS = "unended", "dropped_turn", "endless"
DROPPED_THOUGHT = "dropped_thought"
Note = tuple[str, str]
"""Kind of a finding about a row, and the part of the text that it is about."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A rendered text and its characters to learn."""

    text: str
    spans: list[range]
    masked: list[range] = field(default_factory=list)
    """Parts of `spans` that the data excludes; a token that overlaps one is not learned."""
    weights: list[Weighted] = field(default_factory=list)
    """Weights of parts of `spans`; later ones replace earlier ones. Other parts have weight 1."""
    notes: frozenset[Note] = frozenset()
    ends_with_answer: bool = False
    """True if an answer that is learned ends the text, so that it has to teach the end."""
    is_text: bool = False
    """True for a plain text, which may be divided."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The token that ends an answer."""

    token: int | None
    """Its id; None: neither the template nor the tokenizer has one."""
    is_added: bool = False
    """True if the template writes none, and the tokenizer's end token is added."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The last answer of a conversation."""

    text: str
    """The whole text."""
    span: range
    note: Note | None = None
    begin: int | None = None
    """Place in the text at which the answer's content would begin; None: it is searched."""


def find_turn_end(tokenizer: Any) -> TurnEnd:
    """Return the token that ends a learned answer.

    Raises:
        LimitReached: the chat template does not end. The caller bounds time and memory.
        MemoryError: it needs too much memory.
    """
    asked = ConversationTurn(role="user", content="a")
    answered = ConversationTurn(role="assistant", content=_OTHER_ANSWER)
    begun = ConversationTurn(role="system", content="s")
    try:
        texts = (
            _try_render(tokenizer, turns, add_generation_prompt=False)
            for turns in ((asked, answered), (begun, asked, answered))
        )
        text = next(filter(None, texts), None)
    except ExpectedError:  # several templates: only plain text can have been trained
        text = None
    if text is None:
        return TurnEnd(tokenizer.eos_token_id)
    ids = _tokenize(tokenizer, text.partition(_OTHER_ANSWER)[2])[0]
    own = _own_tokens(tokenizer)
    end = next((token for token in ids if token in own), None)
    return TurnEnd(tokenizer.eos_token_id if end is None else end, is_added=end is None)


def render_answers(
    tokenizer: Any,
    turns: tuple[ConversationTurn, ...],
    num_shared_turns: int,
    rules: int,
    learn: Learn = "answers",
) -> RenderedText:
    """Return the text of a conversation with its answers.

    Args:
        tokenizer: tokenizer with its chat template.
        turns: the turns.
        num_shared_turns: number of leading turns that are not learned.
        rules: version of `tokens.TEXT_RULES`.
        learn: part of the conversation that is learned.

    Raises:
        ValueError: the template rejects the conversation, or an answer cannot be located.
    """
    if rules >= 3 and any(turn.role == "assistant" for turn in turns):
        template = templates.choose(tokenizer)
        turns = tuple(place_thought(turn, template) for turn in turns)
    try:
        folded, text = fold_system(tokenizer, turns)
    except ValueError as error:
        if any(turn.calls for turn in turns) and not shows_calls(_bind(tokenizer)):
            reason = str(error).partition(": ")[2] or str(error)
            raise ToolError(
                f"the chat template of this model has no place for tool calls: {reason}"
            ) from error
        raise
    num_shared_turns -= len(turns) - len(folded)
    learned = [
        place for place, turn in enumerate(folded) if turn.is_answer and place >= num_shared_turns
    ]
    if learn == "last_answer":
        learned = learned[-1:]
    if rules >= 3:
        found = _render_as_chat(tokenizer, folded, learned, text)
        return _learn_everything(found, folded) if learn == "everything" else found
    found = RenderedText(text, [])
    for place in learned:
        span = _find_answer(tokenizer, folded, place, text)
        found.spans.append(span)
        found.masked.extend(_place(folded[place], _masked(folded[place]), span, text))
    return found


def _render_as_chat(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], learned: Sequence[int], text: str
) -> RenderedText:
    notes: set[Note] = {
        (DROPPED_TURN, turns[place].role)
        for place in range(len(turns))
        if place not in learned and _is_dropped(tokenizer, turns, place, text)
    }
    notes |= find_left_out(turns, text, _bind(tokenizer))
    last = None
    shown, whole = turns, text
    if learned and learned[-1] == len(turns) - 1:
        last = _find_last(tokenizer, turns, text)
        notes |= {last.note} if last.note is not None else set()
        if last.text != text:
            # Earlier answers stand in the text of the chat, which the last one continues.
            text, shown = last.text, turns[:-1]
            whole = _render(tokenizer, shown, add_generation_prompt=False)
    found = RenderedText(text, [], ends_with_answer=last is not None)
    for place in learned:
        if last is not None and place == len(turns) - 1:
            span, begin = last.span, last.begin
        else:
            span, begin = _find_earlier(tokenizer, shown, place, text, whole), None
            if turns[place].calls:
                span = range(span.start, span.stop + _count_next(tokenizer, text[span.stop :]))
        if num_empty := _count_empty_thought(tokenizer, turns[:place], text, span.start):
            empty = text[span.start : span.start + num_empty]
            marks = (mark for pair in THOUGHT_MARKS for mark in pair if mark in empty)
            notes.add((EMPTY_THOUGHT, next(marks, "<think>")))
            span = range(span.start + num_empty, span.stop)
        found.spans.append(span)
        found.masked.extend(_place(turns[place], _masked(turns[place]), span, text, begin))
        parts = [part for part, _ in turns[place].weighted]
        weights = (weight for _, weight in turns[place].weighted)
        found.weights.extend(
            zip(_place(turns[place], parts, span, text, begin), weights, strict=True)
        )
        found.masked.extend(find_kept(turns[place], span, text))
        thought = find_thought(turns[place])
        if thought not in text[max(0, span.start - len(thought) - _MARK_CHARS) : span.stop]:
            notes.add((DROPPED_THOUGHT, name_thought(turns[place])))
    return replace(found, notes=frozenset(notes))


def _learn_everything(found: RenderedText, turns: tuple[ConversationTurn, ...]) -> RenderedText:
    """Return a text of which all is learned that its data does not exclude."""
    masked, weights, start = list(found.masked), list(found.weights), 0
    for turn in turns:
        said = turn.content.strip()
        place = found.text.find(said, start)
        start = place + len(said) if place >= 0 else start
        if turn.role == "assistant" or place < 0:
            continue  # masked where the answer was found
        begin = place - (len(turn.content) - len(turn.content.lstrip()))
        masked += [range(begin + part.start, begin + part.stop) for part in turn.masked]
        weights += [
            (range(begin + part.start, begin + part.stop), weight) for part, weight in turn.weighted
        ]
    return replace(found, spans=[range(len(found.text))], masked=masked, weights=weights)


def _is_dropped(tokenizer: Any, turns: tuple[ConversationTurn, ...], place: int, text: str) -> bool:
    """Return whether the template leaves out a turn."""
    said = turns[place].content.strip()
    if not said or said in text:
        return False
    try:
        rest = (*turns[:place], *turns[place + 1 :])
        return bool(rest) and _render(tokenizer, rest, add_generation_prompt=False) == text
    except ValueError:
        return False  # the template needs it


# ------------------------------------------------------------------- the last answer


def _find_last(tokenizer: Any, turns: tuple[ConversationTurn, ...], text: str) -> _Found:
    asked = turns[:-1]
    # A greeting has no question before it, but the template may insert its own text.
    prompt = _try_render(tokenizer, asked, add_generation_prompt=True) if asked else None
    if prompt is None:
        return _Found(text, _find_otherwise(tokenizer, turns, len(turns) - 1, text))
    thought = find_thought(turns[-1])
    rest = text.removeprefix(prompt).lstrip()
    # A template may write an empty thought before one in the content, which it does not know.
    is_empty = bool(thought) and any(rest.startswith(closing) for _, closing in THOUGHT_MARKS)
    continues = text.startswith(prompt) and len(text) > len(prompt) and not is_empty
    if continues and thought in text[len(prompt) :]:
        return _Found(text, range(len(prompt), len(text)))
    marks, opened = _find_opened(tokenizer, asked, prompt)
    content = turns[-1].content
    if marks is None and not (thought in content and thought not in text):
        if continues:  # the template has no place for the thought of another key
            return _Found(text, range(len(prompt), len(text)))
        # gpt-oss leaves out thoughts before calls once an answer follows, but a chat shows them.
        tail = prompt[prompt.rfind(asked[-1].content.strip()) :]
        place = text.rfind(tail)
        if place >= 0 and tail != prompt:
            whole = prompt + text[place + len(tail) :]
            return _Found(whole, range(len(prompt), len(whole)), (CONTINUED, "assistant"))
        # Another header, which no rule explains: the rows differ from a chat.
        span = _find_otherwise(tokenizer, turns, len(turns) - 1, text)
        return _Found(text, span, (OTHER_PROMPT, "assistant"))
    if marks is None:
        if turns[-1].calls:
            raise ValueError(_CHANGED)
        ending = _find_ending(tokenizer, turns)
        mark = next((one for one, _ in THOUGHT_MARKS if one in content), "assistant")
        return _continue(content, prompt, content, ending, mark)
    return _find_behind_thought(tokenizer, turns, text, prompt, marks, opened)


def _find_last_call(
    text: str, prompt: str, thought: str, marks: tuple[str, str], opened: int
) -> _Found:
    """Return a last answer that calls tools, behind a generation prompt with a thought.

    Args:
        text: the text of the finished conversation.
        prompt: the text before the answer in a chat.
        thought: the answer's thought; empty: it has none.
        marks: the tokens that open and close the thought of the prompt.
        opened: place of the thought in the prompt.
    """
    if not text.startswith(prompt[:opened]):
        raise ValueError(_CHANGED)
    opening, closing = marks
    called = text[opened:].lstrip("\n")
    if called.startswith(opening):  # the template writes the thought itself
        return _Found(text, range(opened, len(text)), (OWN_THOUGHT, opening))
    if closing not in prompt[opened:]:
        line = "\n" if prompt.endswith("\n") else ""
        called = f"{thought}{line}{closing}{line * 2}{called}"
    elif thought:
        prompt, called = prompt[:opened], f"{opening}\n{thought}\n{closing}\n\n{called}"
    whole = prompt + called
    return _Found(whole, range(len(prompt), len(whole)), (CONTINUED, opening))


def _find_behind_thought(
    tokenizer: Any,
    turns: tuple[ConversationTurn, ...],
    text: str,
    prompt: str,
    marks: tuple[str, str],
    opened: int,
) -> _Found:
    """Return the last answer behind a generation prompt with a thought, which the text lacks.

    Args:
        tokenizer: tokenizer with its chat template.
        turns: the turns.
        text: the text of the finished conversation.
        prompt: the text before the answer in a chat.
        marks: the tokens that open and close the thought.
        opened: place of the thought in the prompt.
    """
    opening, closing = marks
    content, thought = turns[-1].content, find_thought(turns[-1])
    if not thought:
        # A hybrid that thinks by default shows the empty thought if thinking is off.
        start = len(prompt) - len(_find_header(tokenizer, turns[:-1]))
        shown = prompt[:start] + _find_header(tokenizer, turns[:-1], **_NOT_THINKING)
        if closing in shown[start:] and text.startswith(shown):
            return _Found(text, range(len(shown), len(text)), (EMPTY_THOUGHT, opening))
    if turns[-1].calls:
        return _find_last_call(text, prompt, thought, marks, opened)
    ending = _find_ending(tokenizer, turns)
    if closing not in prompt[opened:]:
        return _continue_thought(turns[-1], prompt, marks, ending)
    if not thought:
        own = content.partition(closing)[2] or content
        return _continue(content, prompt, own, ending, opening)
    # The prompt closes an empty thought, and the row has its own.
    prompt = prompt[:opened]
    if text.startswith(f"{prompt}{opening}") and thought in text:
        return _Found(text, range(opened, len(text)), (OWN_THOUGHT, opening))
    own = content if closing in content else f"{opening}\n{thought}\n{closing}\n\n{content}"
    return _continue(content, prompt, own, ending, opening)


def _continue(content: str, prompt: str, own: str, ending: str, mark: str) -> _Found:
    """Return an answer with its own text behind a prompt; `own` ends with the content."""
    whole = f"{prompt}{own.strip()}{ending}"
    begin = len(prompt) + len(own.strip()) - len(content.rstrip())
    return _Found(whole, range(len(prompt), len(whole)), (CONTINUED, mark), begin)


def _count_empty_thought(
    tokenizer: Any, asked: tuple[ConversationTurn, ...], text: str, start: int
) -> int:
    """Return the length of an empty thought that only a chat without thinking shows.

    Args:
        tokenizer: tokenizer with its chat template.
        asked: the turns before the answer.
        text: the whole text.
        start: end of the generation prompt in the text.
    """
    head = text[start : start + _MARK_CHARS].lstrip()
    pairs = ((head.removeprefix(opening), closing) for opening, closing in THOUGHT_MARKS)
    if not any(rest.lstrip().startswith(closing) for rest, closing in pairs):
        return 0
    if "thinking" not in templates.choose(tokenizer):
        return 0
    # Some templates also write into the question that no thought is wanted, so headers alone count.
    header = _find_header(tokenizer, asked)
    other = _find_header(tokenizer, asked, **_NOT_THINKING)
    empty = other.removeprefix(header)
    return len(empty) if other.startswith(header) and text.startswith(empty, start) else 0


def _find_header(tokenizer: Any, asked: tuple[ConversationTurn, ...], **options: bool) -> str:
    """Return the text that a generation prompt adds to the turns before it."""
    bare = _try_render(tokenizer, asked, add_generation_prompt=False, **options) or ""
    prompt = _try_render(tokenizer, asked, add_generation_prompt=True, **options) or ""
    return prompt[count_same(bare, prompt) :]


def _find_opened(
    tokenizer: Any, asked: tuple[ConversationTurn, ...], prompt: str
) -> tuple[tuple[str, str] | None, int]:
    """Return the marks of the thought that a generation prompt opens or closes, and its place."""
    header = len(prompt) - len(_find_header(tokenizer, asked))
    for opening, closing in THOUGHT_MARKS:
        places = (prompt.rfind(mark, header) for mark in (opening, closing))
        place = next((place for place in places if place >= 0), None)
        if place is not None:
            return (opening, closing), place
    return None, len(prompt)


def _continue_thought(
    turn: ConversationTurn, prompt: str, marks: tuple[str, str], ending: str
) -> _Found:
    """Return an answer behind a generation prompt that opens a thought."""
    opening, closing = marks
    line = "\n" if prompt.endswith("\n") else ""
    if closing in turn.content:
        rest = turn.content.partition(opening)[2] or turn.content
        own = rest.lstrip("\n") if line else rest
    else:
        # Without a thought, the model has to close it before it answers.
        thought = find_thought(turn)
        own = f"{thought}{line}{closing}{line * 2}{turn.content.lstrip()}"
    whole = f"{prompt}{own.rstrip()}{ending}"
    # The content may begin before the prompt's end, with its own token that opens the thought.
    begin = len(prompt) + len(own.rstrip()) - len(turn.content.rstrip())
    return _Found(whole, range(len(prompt), len(whole)), (CONTINUED, opening), begin)


def _find_ending(tokenizer: Any, turns: tuple[ConversationTurn, ...]) -> str:
    """Return the text that the template writes behind the last answer."""
    text = _render(tokenizer, _answer_otherwise(turns, len(turns) - 1), add_generation_prompt=False)
    _, found, ending = text.partition(_OTHER_ANSWER)
    if not found:
        raise ValueError(_CHANGED)
    return ending


# ------------------------------------------------------------------- other answers


def _find_earlier(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], place: int, text: str, whole: str
) -> range:
    """Return the range of an answer that other turns follow.

    Args:
        tokenizer: tokenizer with its chat template.
        turns: the turns that are rendered in full; the generation prompt may follow them.
        place: index of the answer.
        text: the whole text.
        whole: text of the turns alone.
    """
    asked = _try_render(tokenizer, turns[:place], add_generation_prompt=True) if place else None
    answered = _try_render(tokenizer, turns[: place + 1], add_generation_prompt=False)
    if asked is not None and not text.startswith(asked):
        asked = _find_own_thought(tokenizer, turns, place, asked, text)
    is_prefix = answered is not None and text.startswith(answered)
    if asked is not None and answered is not None and is_prefix and answered.startswith(asked):
        stop = len(answered) + _count_end(tokenizer, turns[place].content, answered, text)
        return range(len(asked), stop)
    if turns[place].calls and answered is not None:
        start = len(asked) if asked is not None else _find_start(tokenizer, turns[:place], text)
        # The text before a call may differ from that of a chat, but its end is the same.
        ending = answered[answered.rfind(turns[place].calls[-1].name) :]
        last = text.find(ending, start)
        if last >= 0:
            return range(start, last + len(ending))
    other = _answer_otherwise(turns, place)
    before, found, after = _render(tokenizer, other, add_generation_prompt=False).partition(
        _OTHER_ANSWER
    )
    if not found or not whole.endswith(after):
        raise ValueError(_CHANGED)
    start, end = len(before) if asked is None else len(asked), len(whole) - len(after)
    if asked is None and not text.startswith(before):
        raise ValueError(_CHANGED)
    if not (start < end and text.startswith(whole[:end])):
        raise ValueError(_CHANGED)
    if asked is None and (header := _find_header(tokenizer, turns[:place])):
        # What stands between a chat's header and the answer is learned, too: `<|channel|>final`.
        shown = before.rfind(header, before.rfind(turns[place - 1].content.strip()))
        start = start if shown < 0 else shown + len(header)
    alone = _try_render(tokenizer, other[: place + 1], add_generation_prompt=False) or ""
    follower = turns[place + 1].content.strip() if place + 1 < len(turns) else ""
    alone = alone.partition(_OTHER_ANSWER)[2]
    closing = _find_closing(tokenizer, alone, after, follower, turns[:place])
    return range(start, end + len(closing))


def _find_start(tokenizer: Any, asked: tuple[ConversationTurn, ...], text: str) -> int:
    """Return the place of an answer behind the last turn before it, and its header.

    Mistral's templates write tools before the last question, so earlier text differs from a chat.
    """
    prompt = _render(tokenizer, asked, add_generation_prompt=True)
    tail = prompt[prompt.rfind(asked[-1].content.strip()) :]
    place = -1
    for _ in range(prompt.count(tail)):
        place = text.find(tail, place + 1)
        if place < 0:
            raise ValueError(_CHANGED)
    return place + len(tail)


def _find_own_thought(
    tokenizer: Any, turns: tuple[ConversationTurn, ...], place: int, asked: str, text: str
) -> str | None:
    """Return the text before an answer that begins with its own thought, or with a call in place of
    the prompt's thought; None: it begins otherwise.
    """
    thought = find_thought(turns[place])
    marks, opened = _find_opened(tokenizer, turns[:place], asked)
    if marks is None or not text.startswith(asked[:opened]):
        return None
    is_own = text.startswith(marks[0], opened) and bool(thought)
    is_own &= thought in text[opened : opened + len(thought) + _MARK_CHARS]
    if is_own or not turns[place].calls:
        return asked[:opened] if is_own else None
    other = _try_render(tokenizer, turns[:place], add_generation_prompt=True, **_NOT_THINKING)
    return other if other and text.startswith(other) else asked[:opened]


def _count_end(tokenizer: Any, content: str, answered: str, text: str) -> int:
    """Return the length of an end token that a template writes only if another turn follows."""
    eos = tokenizer.eos_token
    if not eos or not text.startswith(eos, len(answered)):
        return 0
    closing = answered.rpartition(content.strip())[2]
    is_ended = any(token in _own_tokens(tokenizer) for token in _tokenize(tokenizer, closing)[0])
    return 0 if is_ended else len(eos)


def _count_next(tokenizer: Any, after: str) -> int:
    """Return the length of the next role's token, by which GLM's models end a call."""
    if not find_turn_end(tokenizer).is_added:
        return 0
    token = next((one for one in tokenizer.get_added_vocab() if after.startswith(one)), "")
    return len(token)


def _find_closing(
    tokenizer: Any, alone: str, after: str, follower: str, asked: tuple[ConversationTurn, ...]
) -> str:
    """Return the text behind an answer that ends it.

    Args:
        tokenizer: the tokenizer.
        alone: text behind the answer if it is the last one.
        after: text behind it in this conversation.
        follower: content of the next turn.
        asked: the turns before the answer.
    """
    if alone and after.startswith(alone):
        return alone
    own = _own_tokens(tokenizer)
    head = after[: after.find(follower)] if follower and follower in after else after
    ids, stops = _tokenize(tokenizer, head)
    others, _ = _tokenize(tokenizer, alone)
    # Phi-3 writes an end of the text behind the end of the last turn.
    same = count_same(ids, others)
    if any(token in own for token in ids[:same]):
        return head[: stops[same - 1]]
    eos = tokenizer.eos_token
    if eos and after.startswith(eos):
        return str(eos)
    # gpt-oss ends earlier answers with another token than the last one. A token that opens the next
    # turn is none: it stands directly before the content, or in the header of an answer.
    first = next((place for place, token in enumerate(ids) if token in own), None)
    if first is None or head[: stops[first - 1] if first else 0].strip():
        return ""
    is_end = any(token in own for token in ids[first + 1 :])
    if not is_end or ids[first] in _tokenize(tokenizer, _find_header(tokenizer, asked))[0]:
        return ""
    return head[: stops[first]]


def _tokenize(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the ids of a text, and the position behind each token."""
    # The bounds are those of the rendering, during which this happens.
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(found["input_ids"]), [stop for _, stop in found["offset_mapping"]]


def _own_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of tokens that no text is divided into: control tokens."""
    eos = tokenizer.eos_token_id
    return frozenset({*tokenizer.added_tokens_decoder, *([] if eos is None else [eos])})


def _answer_otherwise(
    turns: tuple[ConversationTurn, ...], place: int
) -> tuple[ConversationTurn, ...]:
    other = replace(turns[place], content=_OTHER_ANSWER, calls=())
    return (*turns[:place], other, *turns[place + 1 :])


def _masked(turn: ConversationTurn) -> tuple[range, ...]:
    """Return the masked parts of an answer; one that is all of it needs no place for others."""
    whole = [part for part in turn.masked if len(part) == len(turn.content)]
    return tuple(whole[:1]) or turn.masked


def _place(
    turn: ConversationTurn, parts: Sequence[range], span: range, text: str, begin: int | None = None
) -> Iterator[range]:
    """Yield the places in the text of parts of an answer that its data marks.

    A mark at either end of the answer includes what the template writes there.

    Args:
        turn: the answer.
        parts: characters of its content.
        span: its range.
        text: the whole text.
        begin: place at which its content would begin, if known.
    """
    if all(len(part) == len(turn.content) for part in parts):
        yield from (span for _ in parts)
        return
    said = turn.content.strip()
    start = text.find(said, span.start, span.stop)
    if start >= 0:
        begin = start - (len(turn.content) - len(turn.content.lstrip()))
    if begin is None:
        raise ValueError(
            "the chat template of this model changes the assistant's answer, so the part that is "
            "masked or weighted cannot be located"
        )
    for part in parts:
        is_first = not turn.content[: part.start].strip()
        is_all = len(part) == len(turn.content)
        is_last = not turn.content[part.stop :].strip() and (is_all or not turn.calls)
        first = span.start if is_first else begin + part.start
        yield range(first, span.stop if is_last else begin + part.stop)


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
    other = _answer_otherwise(turns, place)
    before, found, after = _render(tokenizer, other, add_generation_prompt=False).partition(
        _OTHER_ANSWER
    )
    start, end = len(before), len(text) - len(after)
    if not (found and start < end and text.startswith(before) and text.endswith(after)):
        raise ValueError(_CHANGED)
    alone = _try_render(tokenizer, other[: place + 1], add_generation_prompt=False) or ""
    for closing in (alone.partition(_OTHER_ANSWER)[2], tokenizer.eos_token):
        if closing and after.startswith(closing):
            return range(start, end + len(closing))
    return range(start, end)


# ------------------------------------------------------------------- rendering


def fold_system(
    tokenizer: Any, turns: tuple[ConversationTurn, ...]
) -> tuple[tuple[ConversationTurn, ...], str]:
    """Return the turns and their text.

    Tool calls are in the form that the template takes. A system turn that it rejects or drops is
    prepended to the first question.

    Raises:
        ValueError: the template rejects the conversation.
    """
    turns = settle_calls(turns, _bind(tokenizer))
    if len(turns) < 2 or turns[0].role != "system" or turns[1].role != "user":
        return turns, _render(tokenizer, turns, add_generation_prompt=False)
    try:
        text = _render(tokenizer, turns, add_generation_prompt=False)
        # An equal text means that the template ignores the system turn.
        if text != _render(tokenizer, turns[1:], add_generation_prompt=False):
            return turns, text
    except ValueError:
        pass
    folded = (_prepend(turns[0], turns[1]), *turns[2:])
    return folded, _render(tokenizer, folded, add_generation_prompt=False)


def _prepend(system: ConversationTurn, asked: ConversationTurn) -> ConversationTurn:
    """Return a question with the system turn before it; the marks of both keep their places."""
    before = f"{system.content}\n\n"

    def moved(part: range) -> range:
        return range(len(before) + part.start, len(before) + part.stop)

    return replace(
        asked,
        content=before + asked.content,
        masked=(*system.masked, *map(moved, asked.masked)),
        weighted=(*system.weighted, *((moved(part), one) for part, one in asked.weighted)),
    )


def render_turns(tokenizer: Any, turns: tuple[ConversationTurn, ...]) -> str:
    """Return the text of a finished conversation.

    Raises:
        ValueError: the template rejects the conversation.
    """
    return _render(tokenizer, turns, add_generation_prompt=False)


def _bind(tokenizer: Any) -> functools.partial[str]:
    return functools.partial(_render, tokenizer, add_generation_prompt=False)


def _try_render(
    tokenizer: Any,
    turns: tuple[ConversationTurn, ...],
    *,
    add_generation_prompt: bool,
    **options: bool,
) -> str | None:
    """Return the text, or None if the template rejects these turns without the later ones."""
    try:
        return _render(tokenizer, turns, add_generation_prompt=add_generation_prompt, **options)
    except ValueError:
        return None


def _render(
    tokenizer: Any,
    turns: tuple[ConversationTurn, ...],
    *,
    add_generation_prompt: bool,
    **options: bool,
) -> str:
    messages = [_write_message(turn) for turn in turns]
    template = templates.choose(tokenizer)
    # The macro shadows the function that Transformers gives to templates.
    if "strftime_now" in template:
        template = _STOPPED_CLOCK + template
    return templates.render(
        tokenizer,
        messages,
        template,
        tools=_parse_tools(turns[0].tools) if turns else None,
        add_generation_prompt=add_generation_prompt,
        **options,
    )


def _write_message(turn: ConversationTurn) -> dict[str, Any]:
    message: dict[str, Any] = {**dict(turn.extra), "role": turn.role, "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [call.message for call in turn.calls]
    return message


# The rows of a data set often offer the same tools, and each is rendered several times.
@functools.lru_cache(maxsize=64)
def _parse_tools(tools: str) -> list[Any] | None:
    return list(json.loads(tools)) if tools else None
