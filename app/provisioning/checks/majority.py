"""Compare a value over the nodes of a group with that of their majority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

Value = TypeVar("Value", str, int)


def find_usual(values: Mapping[str, Value]) -> Value | None:
    """Return the value of more than half of the nodes, or None without such a value.

    Of two nodes that differ, neither is right: a lying one would else choose for the other.

    >>> find_usual({"a": 1500, "b": 9000, "c": 1500}), find_usual({"a": 1500, "b": 40})
    (1500, None)
    """
    value, number = next(iter(Counter(values.values()).most_common(1)), (None, 0))
    return value if number > len(values) / 2 else None


class Odd(NamedTuple):
    """Difference of a node from others."""

    who: str
    """Those others: `most nodes`, or `others` if no value has a majority."""
    value: str


def find_odd(values: Mapping[str, Value]) -> dict[str, Odd]:
    """Return, for each node that differs from others, the value that they have.

    >>> find_odd({"a": "3.12", "b": "3.11", "c": "3.12"}), find_odd({"a": "1"})
    ({'b': Odd(who='most nodes', value='3.12')}, {})
    >>> find_odd({"a": "3.12", "b": "3.11"})["b"]
    Odd(who='others', value='3.12')
    """
    usual = find_usual(values)
    if usual is not None:
        odd = Odd("most nodes", str(usual))
        return {name: odd for name, value in values.items() if value != usual}
    return {
        name: Odd("others", " or ".join(sorted({str(v) for v in values.values() if v != value})))
        for name, value in values.items()
    }
