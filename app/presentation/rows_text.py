"""Describe the rows of data and their numbers, for the Data page and the command line."""

from __future__ import annotations

from agents.contract.data import RATED, WANTED
from agents.contract.requests.rows import DataFigures, RowBrief, RowFilter
from app.text import DASH, count_of, show_share

FILTERS: dict[RowFilter, str] = {
    "all": "All rows",
    "left_out": "Left out",
    "cut": "Cut",
    "duplicate": "Repeated",
    "longest": "Longest first",
    "least_learned": "Fewest learned tokens first",
}
"""Filters of rows in words."""
_WORDS = {
    "messages": "Conversation",
    "instruction": "Question",
    "input": "Input to the question",
    "output": "Answer",
    "system": "System prompt",
    "text": "Plain text",
    "tools": "Tools",
    "chosen": "Chosen answer",
    "rejected": "Rejected answer",
    "candidates": "Answers to choose from",
    "score": "Score of an answer",
    "rank": "Rank of an answer",
    "best": "Place of the best answer",
    "good": "Verdict on the answer",
}
COLUMN_WORDS = {name: _WORDS[name] for name in (*WANTED, *RATED)}
"""Meanings of columns in words, by their names in a mapping."""
STATE_WORDS = {"kept": "learned", "left_out": "left out", "cut": "cut", "duplicate": "repeated"}
"""States of rows in words."""


_MOST_PRECISE = 0.1
"""Share below which a decimal is shown."""


def describe_figures(found: DataFigures) -> list[tuple[str, str]]:
    """Return (caption, text) of each number.

    >>> describe_figures(DataFigures(format="chat", num_rows=10, is_whole=True, num_left_out=1,
    ...     is_tokenized=True, num_tokens=200, num_targets=50))[1:]
    [('Rows', '10'), ('Left out', '1 (10 %)'), ('Cut', 'none'), ('Repeated', 'none'), \
('Tokens', '200'), ('Learned', '25 % of the tokens')]
    """
    about = "" if found.is_tokenized else "about "
    rows = f"{found.num_rows:,}"
    if not found.is_whole:
        rows += f" so far, {show_share(found.share)} of the data"
    return [
        ("Format", found.format if found.format != "auto" else "not recognized yet"),
        ("Rows", rows),
        ("Left out", _share(found.num_left_out, found.num_rows)),
        ("Cut", _share(found.num_cut, found.num_rows)),
        ("Repeated", _share(found.num_duplicates, found.num_rows)),
        ("Tokens", f"{about}{found.num_tokens:,}"),
        ("Learned", f"{show_share(found.num_targets / max(1, found.num_tokens))} of the tokens"),
    ]


def sum_up(found: DataFigures) -> str:
    """Return the most important numbers on one line."""
    if not found.num_rows:
        return "Reading the data\u2026"
    parts = [count_of(found.num_rows, "row")]
    if not found.is_whole:
        parts[0] = f"The first {parts[0]} ({show_share(found.share)} of the data)"
    for count, words in (
        (found.num_left_out, "left out"),
        (found.num_cut, "cut"),
        (found.num_duplicates, "repeated"),
    ):
        if count:
            parts.append(f"{count:,} {words}")
    about = "" if found.is_tokenized else "about "
    parts.append(f"{about}{count_of(found.num_tokens, 'token')}")
    return " \u00b7 ".join(parts)


def describe_state(row: RowBrief) -> str:
    """Return the state of a row in words; empty: it is learned as it is written."""
    if row.reason:
        return f"left out: {row.reason}"
    return "" if row.state == "kept" else STATE_WORDS[row.state]


def describe_place(row: RowBrief) -> str:
    """Return the file and number of a row."""
    return f"{row.file}, row {row.row:,}" if row.file else f"Row {row.row:,}"


def show_length(count: int | None) -> str:
    """Return a number of tokens, or a dash while it is not known."""
    return DASH if count is None else f"{count:,}"


def name_bars(lengths: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """Return (label, most tokens, rows) of each bar of the histogram of lengths.

    >>> name_bars((0, 0, 3, 5))
    [('3-4', 4, 3), ('5-8', 8, 5)]
    """
    first = next((place for place, count in enumerate(lengths) if count), 0)
    return [(_span(place), 1 << place, lengths[place]) for place in range(first, len(lengths))]


def _span(place: int) -> str:
    low, high = (1 << place) // 2 + 1, 1 << place
    return f"{low:,}-{high:,}" if low < high else f"{high:,}"


def _share(count: int, total: int) -> str:
    """Return a number of rows with its share of all.

    >>> _share(34, 12_480), _share(1, 10)
    ('34 (0.3 %)', '1 (10 %)')
    """
    share = count / max(1, total)
    return f"{count:,} ({show_share(share, int(share < _MOST_PRECISE))})" if count else "none"
