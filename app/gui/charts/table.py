"""The values of a plot as tab-separated text, which spreadsheets can paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from app.gui.charts.limits import Limits
from app.gui.charts.line import LineSeries
from app.text import show_foreign


def format_table(lines: Sequence[LineSeries], view: Limits) -> str:
    """Return every point in view; with several lines, the first column names the line."""
    names = len(lines) > 1
    head = [
        *(["line"] if names else []),
        "step",
        "attempt",
        _cell(lines[0].name) if not names else "value",
    ]
    rows = ["\t".join(head)]
    for line in lines:
        name = [_cell(line.name)] if names else []
        rows += ["\t".join([*name, *row]) for row in _rows(line, view)]
    return "\n".join(rows) + "\n"


def _cell(name: str) -> str:
    """Return a name as one cell that no spreadsheet takes for a formula.

    >>> _cell("=HYPERLINK(1)"), _cell("poems\\t2")
    ("'=HYPERLINK(1)", 'poems\\\\t2')
    """
    shown = show_foreign(name)
    # A formula could open addresses and start programs.
    return f"'{shown}" if shown.lstrip().startswith(("=", "+", "-", "@")) else shown


def _rows(line: LineSeries, view: Limits) -> Iterator[list[str]]:
    for attempt in line.curves.attempts:
        series = line.curves.series(attempt)
        first = int(np.searchsorted(series.x, view.low))
        end = int(np.searchsorted(series.x, view.high, side="right"))
        for step, value in zip(series.x[first:end], series.y[first:end], strict=True):
            # No thousands separators, and no `nan`: a spreadsheet would read either as text.
            yield [f"{step:.0f}", f"{attempt}", "" if np.isnan(value) else f"{value:.9g}"]
