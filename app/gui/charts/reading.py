"""The values of a plot's lines at a step, for the readout and for screen readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from app.gui.charts.line import LineSeries
from app.text import DASH


@dataclass(frozen=True, slots=True)
class ChartReading:
    """Value and text of one line at a step."""

    color: str
    """Name of a colour in the palette."""
    value: float
    """Value at the step; NaN if unknown."""
    text: str


def read_lines(
    lines: Sequence[LineSeries], step: float, write: Callable[[float | None], str]
) -> tuple[float | None, list[ChartReading]]:
    """Return the recorded step nearest to `step`, and the reading of every line there."""
    readings: list[ChartReading] = []
    at = None
    for line in lines:
        found = line.curves.value_at(step)
        if found is None:
            continue
        nearest, value, attempt = found
        # The first line decides where the readout stands; others may lack that very step.
        at = nearest if at is None else at
        shown = DASH if np.isnan(value) else write(value)
        # Three spaces separate the parts: `describe_readings` splits there.
        text = f"step {nearest:,.0f}   {shown}"
        if len(lines) > 1:
            text = f"{shown}   {line.name}, step {nearest:,.0f}"
        elif len(line.curves.attempts) > 1:
            text += f"   attempt {attempt}"
        readings.append(ChartReading(line.color, value, text))
    return at, readings


def describe_readings(readings: Sequence[ChartReading]) -> str:
    """Return the readings as one line for a screen reader."""
    return "; ".join(", ".join(one.text.split("   ")) for one in readings).replace(DASH, "unknown")


def next_step(lines: Sequence[LineSeries], step: float, gap: float) -> float | None:
    """Return the nearest recorded step at least `gap` after `step`, or before it if `gap` < 0.

    None at the end of all lines.
    """
    found = [
        step_there
        for line in lines
        for attempt in line.curves.attempts
        if (step_there := _neighbour(line.curves.series(attempt).x, step, gap)) is not None
    ]
    if not found:
        return None
    return min(found) if gap > 0 else max(found)


def _neighbour(steps: np.ndarray, step: float, gap: float) -> float | None:
    place = int(np.searchsorted(steps, step + gap, side="left" if gap > 0 else "right"))
    # To the left, the point before the one found.
    place -= gap < 0
    return float(steps[place]) if 0 <= place < len(steps) else None
