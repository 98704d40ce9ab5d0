"""Parse one row into a conversation, plain text, or a pair of conversations.

Every supported row becomes one of the three. Instruction rows (Alpaca) become a conversation of one
question and one answer, so all rows are tokenized in the same way. The conversations of a
preference pair share a prompt, and only the differing turns are learned. A row that needs an
unsupported feature is skipped with a reason.
`agents.shared.data.findings` counts columns that no format reads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from agents.contract.spec import Rendered
from agents.shared.data import columns
from agents.shared.data.encodings import NotUtf8
from agents.shared.data.meaning import MAX_WEIGHT, read_mark
from agents.shared.data.rendered import ends_with_answer_begin, find_answers
from agents.shared.data.reshape import find_turns
from agents.trainer.data.turns.tool_calls import (
    ToolCall,
    ToolError,
    holds,
    read_called_text,
    read_calls,
    read_tools,
    write_result,
)

ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_ROLE_NAMES |= {"function": "tool", "observation": "tool", "developer": "system"}
_CALLING_ROLES = ("function_call", "tool_call", "tool_calls")
"""Roles of ShareGPT rows whose text is the assistant's call of a tool."""
_RESULT_ROLES = ("function_response", "tool_response", "tool_result", "tool_results", "ipython")
_ROLE_NAMES |= dict.fromkeys(_CALLING_ROLES, "assistant") | dict.fromkeys(_RESULT_ROLES, "tool")
_MIN_SHARED_WORDS = 2
"""Minimum number of words that two answers share for them to be a prompt."""
_GRAIN = 1 << 24
"""Weights are multiples of 1 / `_GRAIN`, so that their sums are exact in any order."""
Weighted = tuple[range, float]
"""Characters of a text, and the weight with which they are learned."""


class _Unsupported(ValueError):
    """A row is well-formed but needs an unsupported feature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationTurn:
    role: str
    content: str
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Other texts of the message for the chat template, such as `reasoning_content`."""
    masked: tuple[range, ...] = field(default=(), compare=False)
    """Characters of `content` that are not learned, as the data marks them."""
    weighted: tuple[Weighted, ...] = field(default=(), compare=False)
    """Weights of `content`, of which later ones replace earlier ones; the first is that of all of
    it. Empty: all have weight 1.
    """
    learns_thought: bool = field(default=True, compare=False)
    """False if the thought before the answer is only shown."""
    calls: tuple[ToolCall, ...] = ()
    """Tools that the assistant calls behind its text."""
    tools: str = field(default="", compare=False)
    """Tools that its conversation offers, as JSON; empty: none."""

    @property
    def is_answer(self) -> bool:
        """True if there is something to learn."""
        return self.role == "assistant" and bool(self.content.strip() or self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRow:
    """One training row: turns, text, or two conversations."""

    number: int
    """Line of the file, or index in its list, from 1."""
    turns: tuple[ConversationTurn, ...] = ()
    text: str = ""
    rejected: tuple[ConversationTurn, ...] = ()
    """Rejected conversation of a pair, as a whole; `turns` is then the chosen one."""
    num_shared_turns: int = 0
    """Number of leading turns that both conversations of a pair share; they are not learned."""
    label: float | None = None
    """Label of the row in the data; None without labels."""
    learned: tuple[range, ...] = ()
    """Characters of `text` to learn, if the data has rendered it already; empty: all."""
    rejected_text: str = ""
    """Rejected text of a rendered pair, which begins as `text` does up to the answer."""

    @property
    def num_chars(self) -> int:
        """Number of characters of all its texts."""
        turns = (*self.turns, *self.rejected)
        extra = sum(len(text) for turn in turns for _, text in turn.extra)
        texts = len(self.text) + len(self.rejected_text)
        texts += sum(len(side[0].tools) for side in (self.turns, self.rejected) if side)
        texts += sum(len(str(call.arguments)) for turn in turns for call in turn.calls)
        return texts + sum(len(turn.content) for turn in turns) + extra


def read_row(
    number: int, value: Any, data_format: str, rendered: Rendered = "no"
) -> ConversationRow | str:
    """Return the parsed row, or the reason why it is empty.

    Args:
        number: number of the row.
        value: its columns.
        data_format: format of the rows.
        rendered: whether a chat template has written the texts, as `data.rendered` says.

    Raises:
        ValueError: the row does not match the format.
    """
    keys = columns.keys_of(value)
    if data_format == "text":
        text = _text(value, "text", keys)
        learned = find_answers(text) if rendered == "yes" else ()
        row = ConversationRow(number=number, text=text, learned=learned)
        return row if text.strip() else "the text is empty"
    if rendered != "no" and data_format in ("preference", "alpaca"):
        found = _read_rendered(number, value, keys, is_certain=rendered == "yes")
        if found is not None:
            return found
    if data_format == "preference":
        read = _read_pair(number, value, keys)
    elif data_format == "chat":
        read = _read_chat(number, value, keys)
    else:
        read = _read_instruction(number, value, keys)
    return read if isinstance(read, str) else _offer_tools(read, read_tools(value))


def _offer_tools(row: ConversationRow, tools: str) -> ConversationRow:
    """Return a row whose turns know its tools; GLM's data offers them in the system turn."""
    tools = tools or next((turn.tools for turn in row.turns if turn.tools), "")
    if not tools:
        return row
    turns, rejected = (
        tuple(replace(turn, tools=tools) for turn in side) for side in (row.turns, row.rejected)
    )
    return replace(row, turns=turns, rejected=rejected)


def _read_rendered(
    number: int, value: dict[str, Any], keys: set[str], *, is_certain: bool
) -> ConversationRow | str | None:
    """Return a row whose texts are taken as written; None: its texts are not rendered."""
    asked = columns.first_of(keys, columns.QUESTION_KEYS)
    answered = columns.first_of(keys, columns.ANSWER_KEYS)
    is_pair = "chosen" in keys and "rejected" in keys
    names = ["chosen", "rejected"] if is_pair else [answered] if answered else []
    prompt = value.get(asked) if asked else ""
    texts = [text for name in names if isinstance(text := value[name], str)]
    if not isinstance(prompt, str) or not texts or len(texts) != len(names):
        return None
    if any(find_turns(text) for text in texts):  # messages in a column of a CSV file
        return None
    if asked is None and is_pair:  # TRL's implicit prompt: the common beginning of both
        prompt = _find_common(*texts)
        if len(prompt.split()) < _MIN_SHARED_WORDS:
            return None
        texts = [text[len(prompt) :] for text in texts]
    elif not (is_certain or ends_with_answer_begin(prompt)):
        return None
    for name in ("system", "input"):
        part = value.get(name)
        if isinstance(part, str) and part.strip() not in prompt:
            raise ValueError(f"'{name}' is no part of the prompt, which is rendered already")
    if is_pair and texts[0] == texts[1]:
        return "'chosen' and 'rejected' are the same"
    if not all(text.strip() for text in texts):
        return f"'{names[0] if not texts[0].strip() else names[1]}' is empty"
    wholes = [_check_text(prompt + text, name) for name, text in zip(names, texts, strict=True)]
    return ConversationRow(
        number=number,
        text=wholes[0],
        learned=(range(len(prompt), len(wholes[0])),),
        rejected_text=wholes[1] if is_pair else "",
    )


def count_same(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common beginning."""
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False)))


def _find_common(one: str, other: str) -> str:
    """Return the common beginning of two texts, without a space at its end."""
    num_same = count_same(one, other)
    # A space belongs to the word behind it; the line end of a template's header does not.
    return one[: num_same - one[:num_same].endswith(" ")]


def read_row_by_older_rules(number: int, value: Any, data_format: str) -> ConversationRow | str:
    """Return the row as before version 3 of `tokens.TEXT_RULES`, for runs that began with those.

    Answers with a weight, the role `developer` and parts that are no `text` were not read, and
    marks of messages were ignored. Raises the errors of `read_row`.
    """
    if isinstance(value, dict):
        _refuse_newer(value, data_format)
    row = read_row(number, value, data_format)
    if isinstance(row, str):
        return row
    turns, rejected = (
        tuple(_without_newer(turn, data_format) for turn in side)
        for side in (row.turns, row.rejected)
    )
    return replace(row, turns=turns, rejected=rejected)


def _without_newer(turn: ConversationTurn, data_format: str) -> ConversationTurn:
    extra = () if data_format == "alpaca" else turn.extra
    return replace(turn, masked=(), weighted=(), tools="", extra=extra)


def _refuse_newer(row: dict[str, Any], data_format: str) -> None:
    """Raise for what was not read before version 3 of `tokens.TEXT_RULES`."""
    used = columns.used_columns(row.keys(), data_format)
    for name, part in row.items():
        if name in used & columns.TOOL_KEYS and holds(part):
            raise _Unsupported(f"'{name}' offers tools, which is not trained")
        single = [part] if isinstance(part, dict) and name in used else ()
        for place, message in enumerate(find_turns(part) or single, start=1):
            if isinstance(message, dict):
                _refuse_newer_message(place, message, is_used=name in used)


def _refuse_newer_message(place: int, message: dict[str, Any], *, is_used: bool) -> None:
    role, content = str(_get_either(message, "role", "from")).lower(), message.get("content")
    if role == "developer":
        raise ValueError(f"message {place} has the role 'developer'")
    is_answer = _ROLE_NAMES.get(role, role) == "assistant"
    if is_answer and (weight := message.get("weight")) not in (None, 1):
        raise _Unsupported(f"message {place} has the weight {weight!r:.40}")
    if isinstance(content, list) and any(
        isinstance(one, dict) and not isinstance(one.get("text"), str) for one in content
    ):
        raise ValueError(f"message {place} has a part without text")
    if not is_used:
        return
    if any(holds(message.get(key)) for key in columns.CALL_KEYS):
        raise _Unsupported(f"message {place} calls a tool, which is not trained")
    if role in (*_CALLING_ROLES, *_RESULT_ROLES):
        raise ValueError(f"message {place} has the role {columns.quote(role)}")
    said = _get_either(message, "content", "value")
    if not isinstance(said, (str, list)):
        raise ValueError(f"message {place} has no text: 'content' is {columns.name_kind(said)}")


def _text(value: dict[str, Any], key: str, keys: set[str]) -> str:
    if key not in keys:
        raise ValueError(f"'{key}' is missing; the row has the keys {columns.quote_keys(keys)}")
    if not isinstance(value[key], str):
        raise ValueError(f"'{key}' should be a string, but is {columns.name_kind(value[key])}")
    return _check_text(value[key], key)


def _check_text(text: str, key: str) -> str:
    """Return `text` if it is valid: JSON may contain lone surrogates, a damaged file NUL bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # Python's surrogateescape: `files` could not decode the byte
            raise NotUtf8(f"byte 0x{code - 0xDC00:02x} in '{key}' is not UTF-8") from error
        raise ValueError(f"'{key}' holds half a character (a lone surrogate)") from error
    if "\0" in text:
        raise ValueError(f"'{key}' holds a NUL byte")
    return text


def _read_instruction(number: int, value: dict[str, Any], keys: set[str]) -> ConversationRow | str:
    asked = columns.first_of(keys, columns.QUESTION_KEYS) or columns.QUESTION_KEYS[0]
    answered = columns.first_of(keys, columns.ANSWER_KEYS) or columns.ANSWER_KEYS[0]
    if _is_conversation(value, asked, answered):
        return _read_prompted(number, value, asked, answered, keys)
    question, answer = _text(value, asked, keys), _text(value, answered, keys)
    # The input of an Alpaca row follows its instruction.
    if value.get("input"):
        question = f"{question}\n\n{_text(value, 'input', keys)}"
    if not question.strip():
        return f"'{asked}' is empty"
    if not answer.strip():
        return f"'{answered}' is empty"
    thought = columns.first_of(keys, columns.THOUGHT_KEYS)
    has_thought = thought is not None and isinstance(value[thought], str) and holds(value[thought])
    extra = ((thought, _text(value, thought, keys)),) if thought and has_thought else ()
    turns = [
        ConversationTurn(role="user", content=question),
        ConversationTurn(role="assistant", content=answer, extra=extra),
    ]
    if value.get("system"):
        turns.insert(0, ConversationTurn(role="system", content=_text(value, "system", keys)))
    return ConversationRow(number=number, turns=tuple(turns))


def _is_conversation(value: dict[str, Any], asked: str, answered: str) -> bool:
    """Return whether question and answer are messages instead of texts."""
    parts = (value.get(asked), value.get(answered))
    if any(isinstance(part, (list, dict)) for part in parts):
        return True
    return all(_find_turns(part, key) for part, key in zip(parts, (asked, answered), strict=True))


def _read_prompted(
    number: int, value: dict[str, Any], asked: str, answered: str, keys: set[str]
) -> ConversationRow | str:
    prompt = _add_system(value, _read_side(value, asked, "user", keys), keys)
    completion = _read_side(value, answered, "assistant", keys)
    if not _has_answer(completion):
        return f"'{answered}' has no answer of the assistant"
    return ConversationRow(number=number, turns=_join(prompt, completion))


def _read_chat(number: int, value: dict[str, Any], keys: set[str]) -> ConversationRow | str:
    key = columns.first_of(keys, columns.CONVERSATION_KEYS)
    if key is None:
        asked, answered = (
            columns.first_of(keys, columns.QUESTION_KEYS),
            columns.first_of(keys, columns.ANSWER_KEYS),
        )
        if asked and answered and _is_conversation(value, asked, answered):
            return _read_prompted(number, value, asked, answered, keys)
        raise ValueError(f"'messages' is missing; the row has the keys {columns.quote_keys(keys)}")
    turns = _read_turns(value[key], key)
    if not turns:
        return "the conversation is empty"
    if not _has_answer(turns):
        return "the conversation has no answer of the assistant"
    return ConversationRow(number=number, turns=_add_system(value, turns, keys))


def _has_answer(turns: tuple[ConversationTurn, ...]) -> bool:
    return any(turn.is_answer and not _is_masked(turn) for turn in turns)


def _is_masked(turn: ConversationTurn) -> bool:
    return any(len(part) == len(turn.content) for part in turn.masked)


def _read_turns(messages: Any, key: str) -> tuple[ConversationTurn, ...]:
    if isinstance(messages, str):  # a column of a CSV file
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"'{key}' is a string that is not JSON") from error
    if not isinstance(messages, list):
        raise ValueError(f"'{key}' should be a list, but is {columns.name_kind(messages)}")
    turns: list[ConversationTurn] = []
    for place, message in enumerate(messages, start=1):
        turn = _read_turn(place, message)
        before = turns[-1] if turns else turn
        # ShareGPT writes each of several calls as a turn of its own.
        is_more = turns and not turn.content and before.is_answer and _calls_by_role(message)
        extra = {**dict(turn.extra), **dict(before.extra)}
        is_more = is_more and {*turn.extra} <= {*extra.items()}  # two thoughts are two turns
        marks = (before.masked, before.weighted)
        if is_more and marks == (turn.masked, turn.weighted):
            calls = before.calls + turn.calls
            turns[-1] = replace(before, calls=calls, extra=tuple(extra.items()))
        else:
            turns.append(turn)
    return tuple(turns)


def _read_role(place: int, message: dict[str, Any]) -> str:
    role = _get_either(message, "role", "from")
    if isinstance(role, str):
        # ShareGPT and other sources use their own names for the roles.
        plain = role.lower()
        role = _ROLE_NAMES.get(plain, plain if plain in ROLES else role)
    if role is None:
        raise ValueError(f"message {place} has no role")
    if role not in ROLES:
        known = f"it must be one of {list(ROLES)}"
        raise ValueError(f"message {place} has the role {columns.quote(str(role))}; {known}")
    return str(role)


def _calls_by_role(message: dict[str, Any]) -> bool:
    role = _get_either(message, "role", "from")
    return isinstance(role, str) and role.lower() in _CALLING_ROLES


def _read_pair(number: int, value: dict[str, Any], keys: set[str]) -> ConversationRow | str:
    asked = columns.first_of(keys, columns.QUESTION_KEYS)
    prompt: tuple[ConversationTurn, ...] = ()
    if asked is not None and value[asked]:
        prompt = _read_side(value, asked, "user", keys)
    prompt = _add_system(value, prompt, keys)
    chosen = _join(prompt, _read_side(value, "chosen", "assistant", keys))
    rejected = _join(prompt, _read_side(value, "rejected", "assistant", keys))
    # A pair without a difference has no gradient but would count in the mean.
    if chosen == rejected:
        return "'chosen' and 'rejected' are the same"
    # Without a shared prompt the two answers would reply to different questions.
    num_shared_turns = count_same(chosen, rejected)
    if not num_shared_turns:
        missing = "" if prompt else "there is no 'prompt', and "
        raise ValueError(f"{missing}'chosen' and 'rejected' do not begin alike")
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if any(turn.weighted and turn.is_answer for turn in turns):
            raise _Unsupported(f"a message of '{name}' has a weight, but pairs have none")
        if not _has_answer(turns[num_shared_turns:]):
            return f"'{name}' is empty"
    return ConversationRow(
        number=number, turns=chosen, rejected=rejected, num_shared_turns=num_shared_turns
    )


def _add_system(
    value: dict[str, Any], turns: tuple[ConversationTurn, ...], keys: set[str]
) -> tuple[ConversationTurn, ...]:
    """Return the turns with the row's 'system' in front, unless they have a system turn."""
    if not value.get("system") or _split_system(turns)[0]:
        return turns
    return (ConversationTurn(role="system", content=_text(value, "system", keys)), *turns)


def _split_system(
    turns: tuple[ConversationTurn, ...],
) -> tuple[tuple[ConversationTurn, ...], tuple[ConversationTurn, ...]]:
    size = 1 if turns and turns[0].role == "system" else 0
    return turns[:size], turns[size:]


def _join(
    prompt: tuple[ConversationTurn, ...], side: tuple[ConversationTurn, ...]
) -> tuple[ConversationTurn, ...]:
    """Return prompt and side joined, or the side alone if it already starts with the prompt.

    The comparison ignores system turns and white space around texts. The side's own system turn
    takes precedence.
    """
    system, asked = _split_system(prompt)
    own, rest = _split_system(side)
    # Some data sets repeat the prompt in each answer, with other white space. Others give one of
    # its questions as the prompt: a side that begins with a question is a whole conversation.
    is_whole = bool(asked and rest) and asked[-1].role == rest[0].role == "user"
    begins = [_bare(turn) for turn in rest[: len(asked)]] == [_bare(turn) for turn in asked]
    if not begins and not is_whole:
        rest = asked + rest
    return (own or system) + rest


def _bare(turn: ConversationTurn) -> tuple[object, ...]:
    return turn.role, turn.content.strip(), turn.calls


def _read_side(
    value: dict[str, Any], key: str, role: str, keys: set[str]
) -> tuple[ConversationTurn, ...]:
    """Return a field of a row as turns; it may be a text, one message, or a list of messages."""
    turns = _find_turns(value.get(key), key)
    return (
        (ConversationTurn(role=role, content=_text(value, key, keys)),) if turns is None else turns
    )


def _find_turns(part: Any, key: str) -> tuple[ConversationTurn, ...] | None:
    """Return the turns of one message or a list of messages, or None for anything else."""
    if isinstance(part, list) and part and all(isinstance(one, str) for one in part):
        raise ValueError(f"'{key}' should be a text or messages, but is a list of texts")
    if isinstance(part, (dict, list)):
        return _read_turns([part] if isinstance(part, dict) else part, key)
    if not isinstance(part, str) or not part.lstrip().startswith("[{"):
        return None
    try:
        return _read_turns(part, key)  # JSON in a column of a CSV file
    except (_Unsupported, ToolError):
        raise
    except ValueError:
        return None


def _read_turn(place: int, message: Any) -> ConversationTurn:
    if not isinstance(message, dict):
        raise ValueError(
            f"message {place} should be an object, but is {columns.name_kind(message)}"
        )
    role, content = _read_role(place, message), _get_either(message, "content", "value")
    calls = read_calls(place, message) if role == "assistant" else ()
    marks: list[Weighted] = []
    if role == "tool" and not _has_texts(content):
        content = write_result(content)
    elif content is None and role == "assistant":
        # OpenAI's refusals stand in a key of their own; a call needs no text.
        refusal = message.get("refusal")
        content = "" if calls else refusal if isinstance(refusal, str) else None
    if isinstance(content, list):
        content, marks = _join_parts(place, content)
    if not isinstance(content, str):
        raise ValueError(f"message {place} has no text: 'content' is {columns.name_kind(content)}")
    if _calls_by_role(message):
        content, calls = read_called_text(place, content)
    masked, weighted = _find_marks(place, message, content, marks)
    extra = _find_extra(place, message) if message.keys() - columns.TURN_KEYS else ()
    return ConversationTurn(
        role=role,
        content=_check_text(content, f"message {place}"),
        extra=extra,
        masked=tuple(masked),
        weighted=tuple(weighted),
        calls=calls,
        tools=read_tools(message),
    )


def _has_texts(content: Any) -> bool:
    """Return whether a content is a text, or a list of parts with one."""
    if not isinstance(content, list):
        return isinstance(content, str)
    parts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return all(isinstance(part, str) for part in parts)


def _find_marks(
    place: int, message: dict[str, Any], content: str, marks: Sequence[Weighted]
) -> tuple[list[range], list[Weighted]]:
    """Return the characters that a message excludes from learning, and the weights of the others.

    Args:
        place: number of the message, from 1.
        message: the message.
        content: its text.
        marks: weights of its parts.

    Returns:
        Masked characters, and weights as in `ConversationTurn.weighted`.
    """
    whole, inner = _weigh(place, message), list(marks)
    if whole == 0:
        return [range(len(content))], []
    # Axolotl's offsets include the last character.
    for detail in message.get("train_detail") or ():
        try:
            first, last = int(detail["begin_offset"]), int(detail["end_offset"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"message {place} has a 'train_detail' without offsets") from error
        inner.append((range(max(0, first), min(len(content), last + 1)), _weigh(place, detail)))
    inner = [one for one in inner if one[1] != 1]
    masked = [part for part, weight in inner if weight == 0]
    if all(weight in (0, 1) for weight in (whole, *(weight for _, weight in inner))):
        return masked, []
    found: list[Weighted] = [(range(len(content)), _round_weight(place, whole))]
    if not inner:
        return [], found
    weights = [whole] * len(content)
    for part, weight in inner:
        for at in range(part.start, min(part.stop, len(content))):
            weights[at] *= weight
    start, runs = 0, []
    for weight, run in itertools.groupby(weights):
        stop = start + sum(1 for _ in run)
        if weight:
            runs.append((range(start, stop), _round_weight(place, weight)))
        start = stop
    # A token of two parts has the smaller weight.
    return masked, found + sorted(runs, key=lambda one: -one[1])


def _round_weight(place: int, weight: float) -> float:
    if weight > MAX_WEIGHT:
        raise _Unsupported(f"message {place} and its parts have the weight {weight:g} together")
    return max(1, round(weight * _GRAIN)) / _GRAIN


def _weigh(place: int, marked: dict[str, Any]) -> float:
    """Return the smallest weight that the keys of a message or a part ask for; 1 is no weight."""
    weights = []
    for key, value in marked.items():
        if isinstance(key, str) and key not in columns.TURN_KEYS:
            mark = read_mark(key, value)
            if mark is None and key == "weight" and holds(value):
                raise _Unsupported(f"message {place} has the weight {value!r:.40}")
            weights += [] if mark in (None, 1) else [mark]
    weight = min(weights, default=1.0)
    if not 0 <= max(weights, default=1.0) <= MAX_WEIGHT or weight < 0:
        wrong = next(one for one in weights if not 0 <= one <= MAX_WEIGHT)
        raise _Unsupported(
            f"message {place} has the weight {wrong:g}; weights from 0 to {MAX_WEIGHT} are trained"
        )
    return weight


def _find_extra(place: int, message: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return other texts of a message, which the chat template may use."""
    return tuple(
        (key, _check_text(value, f"message {place}"))
        for key, value in message.items()
        if isinstance(value, str) and value.strip() and key not in columns.TURN_KEYS
    )


def _get_either(message: dict[str, Any], name: str, other: str) -> Any:
    """Return the value under either name; rows of a table may have both, one of them empty."""
    value = message.get(name)
    return message.get(other) if value is None else value


def _join_parts(place: int, parts: list[Any]) -> tuple[str, list[Weighted]]:
    """Return the text of the parts of a message, and their weights."""
    text, marks = "", []
    for part in parts:
        said = _get_either(part, "text", "value") if isinstance(part, dict) else part
        if not isinstance(said, str):
            kind = part.get("type") if isinstance(part, dict) else None
            named = f" ({columns.quote(str(kind))})" if kind else ""
            raise ValueError(
                f"message {place} has a part without text{named}; only text is trained"
            )
        if isinstance(part, dict):
            marks.append((range(len(text), len(text) + len(said)), _weigh(place, part)))
        # OpenAI's format: the parts of a content are one text.
        text += said
    return text, marks
