"""Choose the ticks of an axis and their labels."""

from __future__ import annotations

import math

from app.gui.charts.limits import Limits
from app.text import show_exponent


def choose_ticks(limits: Limits, num_wanted: int) -> list[float]:
    """Return about `num_wanted` round values inside `limits`, at most one more.

    They are 1, 2 or 5 times a power of ten apart.

    >>> choose_ticks(Limits(0.0, 10.0), 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    span = limits.high - limits.low
    if not 0 < span < math.inf or num_wanted < 1:
        return []
    raw = span / num_wanted
    power = 10.0 ** math.floor(math.log10(raw))
    # The tolerance accepts a span that is round but for the last bits of its float.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(limits.low / step - 1e-9)
    last = math.floor(limits.high / step + 1e-9)
    # 12 digits: 3 * 0.1 is 0.30000000000000004, which would show
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def format_tick(value: float, step: float) -> str:
    """Return the label of a tick, with as many digits as ticks `step` apart need.

    >>> format_tick(1.5, 0.5), format_tick(2000.0, 500.0), format_tick(25000.0, 5000.0)
    ('1.5', '2,000', '25 k')
    >>> format_tick(0.0, 2e-7), format_tick(4e-7, 2e-7), format_tick(1.5e-4, 5e-5)
    ('0', '4e-7', '1.5e-4')
    """
    if step < 1e-4 or abs(value) >= 1e7:  # longer texts do not fit next to a plot
        return show_exponent(value) if value else "0"
    if abs(value) >= 10_000 and step >= 1000:
        return f"{value / 1000:,.0f} k"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{min(digits, 6)}f}"
