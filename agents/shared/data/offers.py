"""Offer the mapping by which a row could be read whose columns match no format.

An offer is pasted into a run file, so it must not teach anything wrong: answers of unknown quality,
steps and choices are never offered as turns of a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agents.shared.data.columns import CONVERSATION_KEYS, QUESTION_KEYS, first_of
from agents.shared.data.rankings import offer_ranking
from agents.shared.data.reshape import CONVERSATIONS, KNOWN_ROLES, find_turns, shape_turns

_TURNS = (*CONVERSATIONS, "data", "items")
_USUAL = {
    "instruction": (
        *QUESTION_KEYS, "input", "inputs", "query", "user", "human", "source", "article",
        "document", "dialogue", "dialog", "message_1", "problem", "goal", "sql_prompt", "ctx",
        "src", "en", "q",
    ),
    "output": (
        "output", "response", "completion", "target", "targets", "assistant", "bot", "gpt",
        "summary", "highlights", "message_2", "solution", "answer", "canonical_solution",
        "best_answer", "generation", "sql", "code", "label_text", "answers", "reply", "tgt", "de",
        "fr", "es", "zh", "a",
    ),
    "text": ("content", "document", "body", "article", "markdown", "code", "page_content", "raw"),
    "chosen": ("better", "best", "good", "chosen_answer", "response_chosen", "response_j"),
    "rejected": ("worse", "worst", "bad", "rejected_answer", "response_rejected", "response_k"),
    "system": ("system_prompt", "systemprompt", "sys", "meta_instruction"),
    "input": ("context", "passage", "sql_context", "paragraph"),
}  # fmt: skip
"""Usual other names of each column."""
# Columns of choices, and the one that says which is right, by the names of known data sets.
_CHOICES = (
    ("choices", "choices.answer"),
    ("choices.text", "choices.text.answerKey"),
    ("endings", "endings.label"),
    ("options", "options.answer"),
    ("options", "options.answer_idx"),
)
_MIN_KEYED = 3


def offer_mapping(row: Any) -> str:
    """Return `data.columns` for a row that no format reads, ready to paste; empty: none is near.

    >>> offer_mapping({"INSTRUCTION": "q", "RESPONSE": "a"})
    'data.columns: [instruction=INSTRUCTION, output=RESPONSE]'
    >>> offer_mapping({"dialog": ["hi", "hello"]}), offer_mapping(["q", "a"])
    ('data.columns: [messages=dialog]', 'data.columns: [instruction=0, output=1]')
    >>> offer_mapping({"question": "q", "choices": ["x", "y"], "answer": 1})
    'data.columns: [instruction=question, input=choices, output=choices.answer]'
    >>> offer_mapping({"prompt": "q", "completions": ["a step", "another"]})
    ''
    """
    entries = _offer(row)
    return f"data.columns: [{', '.join(entries)}]" if entries else ""


def _offer(row: Any) -> list[str]:
    if isinstance(row, list) and len(row) > 1 and all(isinstance(text, str) for text in row[:2]):
        return ["instruction=0", "output=1"]
    if not isinstance(row, dict):
        return []
    if roles := list(_offer_roles(row)):
        return roles
    if "role" in row or "from" in row:
        return []  # one turn of a conversation is no row
    turns = [name for name, value in row.items() if _could_be_turns(str(name), value)]
    if len(turns) == 1:
        return [f"messages={turns[0]}"]
    names = _names_inside(row)
    texts = {
        name: value for name, value in names.items() if _is_text(value, is_field=name not in row)
    }
    found = {wanted: _nearest(texts, _USUAL[wanted]) for wanted in _USUAL}
    asked = found["instruction"]
    ranked = offer_ranking(row)
    if ranked and (asked or "history" in texts):
        used = {entry.partition("=")[2] for entry in ranked}
        asked = next((name for name in (asked, "history") if name in texts.keys() - used), "")
        return [f"instruction={asked}", *ranked] if asked else []
    for listed, right in _CHOICES:
        if asked and listed in names and (right in names or _column_of(right) in names):
            return [f"instruction={asked}", f"input={listed}", f"output={right}"]
    return _offer_columns(found)


def _offer_columns(found: Mapping[str, str]) -> list[str]:
    """Return the entries for the first format whose columns were found."""
    for needed in (("chosen", "rejected"), ("instruction", "output"), ("text",)):
        columns = [found[wanted] for wanted in needed]
        if all(columns) and len(set(columns)) == len(columns):
            more = {"chosen": ("instruction", "system"), "instruction": ("input", "system")}
            extra = [one for one in more.get(needed[0], ()) if found[one] not in ("", *columns)]
            # Under their own names they were read already, and have another fault.
            if columns != [*needed]:
                return [f"{wanted}={found[wanted]}" for wanted in (*needed, *extra)]
    return []


def _column_of(name: str) -> str:
    return name.rpartition(".")[2]


def _offer_roles(row: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the mapping of the only unknown role, to the one of two that is missing."""
    key = first_of(row.keys(), CONVERSATION_KEYS)
    turns = find_turns(row[key]) if key else None
    roles = [turn.get("role") or turn.get("from") for turn in turns or () if isinstance(turn, dict)]
    known = {KNOWN_ROLES.get(str(role).lower(), str(role).lower()) for role in roles}
    missing = [role for role in ("user", "assistant") if role not in known]
    strange = {str(role) for role in roles if role and str(role).lower() not in KNOWN_ROLES}
    if len(missing) == len(strange) == 1:
        yield f"roles.{missing[0]}={strange.pop()}"


def _names_inside(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the columns of a row and the fields of its objects, by dotted name."""
    names: dict[str, Any] = {}
    # Many objects are rows by key, or otherwise nothing that one mapping could name.
    many = sum(isinstance(value, dict) for value in row.values()) >= _MIN_KEYED
    for key, value in row.items():
        if isinstance(value, dict) and not many and key not in CONVERSATION_KEYS:
            names |= {f"{key}.{inner}": part for inner, part in value.items()}
        names[str(key)] = value
    return names


def _could_be_turns(name: str, value: Any) -> bool:
    turns = find_turns(value)
    if not isinstance(turns, list) or len(turns) < 2:
        return False
    if all(isinstance(turn, str) for turn in turns):
        # With an odd number, the first may be a system prompt.
        return name.lower() in _TURNS and len(turns) % 2 == 0
    return shape_turns(turns, is_mapped=True) is not None


def _is_text(value: Any, *, is_field: bool) -> bool:
    if isinstance(value, list):
        # Of several texts, only a field such as `answers.text` means alternatives.
        return bool(value) and isinstance(value[0], str) and (len(value) == 1 or is_field)
    return isinstance(value, str) and bool(value.strip())


def _nearest(names: Mapping[str, Any], usual: Sequence[str]) -> str:
    lowered = {name.lower(): name for name in names}
    # A field of an object counts by its own name, or by that of its column: `answers.text`.
    for name in names:
        column, _, field = name.lower().rpartition(".")
        lowered.setdefault(field, name)
        if field in ("text", "full_text"):
            lowered.setdefault(column, name)
    return next((lowered[name] for name in usual if name in lowered), "")
