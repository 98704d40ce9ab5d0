"""Describe the rows and tokens that a run would leave out, for plan, form and start."""

from __future__ import annotations

from agents.contract.data import MAX_LEFT_OUT_SHARE, DataPreview, NamedRow
from app.text import count_of, show_share

NUM_NAMED = 3
"""Maximum number of rows that are named with their reasons."""
_BLANK = "the line is empty"
ON_A_NODE = "its rows are counted by a node when the run starts, before the model is sent"
"""Clause about data that this PC cannot read."""


def say_count(name: str, found: DataPreview) -> str:
    """Return a sentence without its full stop on what is left out of a data set.

    >>> found = DataPreview(format="chat", whole=True, num_rows=3, num_examples=2, num_tokens=40,
    ...     num_targets=10, longest_tokens=32, sequence_tokens=64, num_skipped=1,
    ...     skipped=(NamedRow(row=2, reason="not valid JSON"),))
    >>> say_count("chats.jsonl", found)
    'of the 3 rows of chats.jsonl, 1 is left out (33 %): row 2: not valid JSON'
    """
    rows = count_of(found.num_rows - found.num_blank, "row")
    of = f"of the {rows} of {name}" if found.whole else f"of the first {rows} of {name}"
    parts = []
    if found.num_left_out:
        verb = "is" if found.num_left_out == 1 else "are"
        share = show_share(found.left_out_share)
        parts.append(f"{found.num_left_out:,} {verb} left out ({share}){_reasons(found)}")
    if found.num_truncated:
        verb = "is" if found.num_truncated == 1 else "are"
        parts.append(f"{found.num_truncated:,} {verb} cut at {found.sequence_tokens:,} tokens")
        least = "" if found.is_tokenized else "at least "
        parts[-1] += f" (losing {least}{show_share(found.cut_share)} of all tokens)"
    return f"{of}, {'; '.join(parts) or 'none is left out or cut'}"


def hint_for_losses(found: DataPreview) -> str:
    """Return what to do about data of which much is left out, for a command."""
    is_cut = found.cut_share > MAX_LEFT_OUT_SHARE
    advice = "Raise sequence_tokens" if is_cut else "Correct these rows"
    return f"{advice}, or start without what is left out: --accept-left-out"


def offer_start(found: DataPreview) -> str:
    """Return the label of the button that starts without what is left out."""
    if found.left_out_share <= MAX_LEFT_OUT_SHARE:
        return "Start with cut rows"
    if found.num_left_out == 1:
        return "Start without this row"
    return f"Start without these {found.num_left_out:,} rows"


def _reasons(found: DataPreview) -> str:
    named = [row for row in found.skipped if row.reason != _BLANK][:NUM_NAMED]
    shown = [_name(row) for row in named]
    if found.num_left_out > len(shown) > 0:
        shown.append(f"and {found.num_left_out - len(shown):,} more")
    return f": {'; '.join(shown)}" if shown else ""


def _name(row: NamedRow) -> str:
    place = f"{row.file}, row {row.row}" if row.file else f"row {row.row}"
    return f"{place}: {row.reason}"
