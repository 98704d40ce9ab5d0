"""The values of a plot as tab-separated text, which spreadsheets can paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from app.gui.charts.limits import Limits
from app.gui.charts.line import LineSeries


def format_table(lines: Sequence[LineSeries], view: Limits) -> str:
    """Return every point in view; with several lines, the first column names the line."""
    names = len(lines) > 1
    head = [
        *(["line"] if names else []),
        "step",
        "attempt",
        lines[0].name if not names else "value",
    ]
    rows = ["\t".join(head)]
    for line in lines:
        rows += ["\t".join([line.name, *row] if names else row) for row in _rows(line, view)]
    return "\n".join(rows) + "\n"


def _rows(line: LineSeries, view: Limits) -> Iterator[list[str]]:
    for attempt in line.curves.attempts:
        series = line.curves.series(attempt)
        first = int(np.searchsorted(series.x, view.low))
        end = int(np.searchsorted(series.x, view.high, side="right"))
        for step, value in zip(series.x[first:end], series.y[first:end], strict=True):
            # No thousands separators, and no `nan`: a spreadsheet would read either as text.
            yield [f"{step:.0f}", f"{attempt}", "" if np.isnan(value) else f"{value:.9g}"]
