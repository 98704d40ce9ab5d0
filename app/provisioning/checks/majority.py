"""Compare a value over the nodes of a group with the most common one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value", str, int)


def find_odd(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return, for each node that differs from the majority, the value of the majority."""
    if not values:
        return {}
    usual = max(set(values.values()), key=list(values.values()).count)
    return {name: usual for name, value in values.items() if value != usual}
