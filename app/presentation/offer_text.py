"""Put what a refusal of data offers into words, and into settings that take it.

Refusals offer settings as lines of a run file, ready to paste; the window offers them with a
button.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agents.contract.data import parse_columns
from agents.contract.spec import DataSpec
from app.errors import RacklessError, UserError
from app.presentation.rows_text import COLUMN_WORDS
from app.text import show_list

_LINE = re.compile(r"\bdata\.(?:(columns|ignore_columns): \[([^\]]+)\]|(encoding): ([\w-]+))")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOffer:
    """Settings by which data could be read that was refused."""

    text: str
    label: str
    """Label of a button that takes them."""
    change: Mapping[str, Any]
    """New values by dotted key of the run file; empty: they belong to one of several sources."""


def find_offer(error: RacklessError, data: DataSpec) -> DataOffer | None:
    """Return the first setting that a refusal of this data offers; None: it offers none.

    >>> error = UserError("no usable row", "Set data.columns: [instruction=q, output=a]")
    >>> found = find_offer(error, DataSpec(train="d", columns=("output=b", "system=s")))
    >>> found.text, found.label
    ("Read the column 'q' as question and the column 'a' as answer.", 'Use this mapping')
    >>> found.change
    {'data.columns': ('system=s', 'instruction=q', 'output=a'), 'data.format': 'auto'}
    """
    line = _LINE.search(error.hint if isinstance(error, UserError) else "")
    if line is None:
        return None
    key, listed, _, encoding = line.groups()
    if encoding:
        text, label = f"It is most likely written in {encoding}.", f"Read it as {encoding}"
        change: dict[str, Any] = {"data.encoding": encoding}
    else:
        entries = tuple(entry.strip() for entry in listed.split(","))
        if key == "columns":
            text, label = describe_mapping(entries), "Use this mapping"
            names = {_wanted(entry) for entry in entries}
            kept = [entry for entry in data.columns if _wanted(entry) not in names]
            change = {"data.columns": (*kept, *entries), "data.format": "auto"}
        else:
            text = f"Train on these rows, too, without {show_list([*map(repr, entries)])}."
            label = "Ignore this column" if len(entries) == 1 else "Ignore these columns"
            change = {"data.ignore_columns": tuple(dict.fromkeys((*data.ignore_columns, *entries)))}
    return DataOffer(text=text, label=label, change={} if len(data.list_sources()) > 1 else change)


def describe_mapping(entries: tuple[str, ...]) -> str:
    """Return a sentence about the entries of a mapping.

    >>> describe_mapping(("roles.assistant=bing",))
    "Read the role 'bing' as assistant."
    """
    names = parse_columns(entries)
    parts = [
        f"the column {name!r} as {COLUMN_WORDS[wanted].lower()}"
        for name, wanted in names.columns.items()
    ]
    parts += [f"the role {name!r} as {role}" for name, role in names.roles.items()]
    return f"Read {show_list(parts)}."


def _wanted(entry: str) -> str:
    return entry.partition("=")[0].strip()
