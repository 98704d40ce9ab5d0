"""Read values of a model's config.json, with a clear error if one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import UserError

_HINT = "Name a folder or a hub id of a causal language model"


class ConfigReader:
    """The config of a text model with the defaults of its family."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known

    def number(self, *names: str) -> int:
        """Return the first of these sizes that is given, at least 1.

        Raises:
            UserError: no size of at least 1 is given.
        """
        for name in names:
            value = self._known.get(name)
            if isinstance(value, list):
                # Some families write a size per layer; only equal ones are supported.
                value = value[0] if value and all(size == value[0] for size in value) else None
            if value is not None:
                break
        # In Python a bool is an int, too.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"The model's config.json has {names[0]}: {value!r}, which is not a size.", _HINT
            )
        return value

    def count(self, *names: str) -> int:
        """Return the first of these numbers that is given and positive, else 0."""
        for name in names:
            value = self._known.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return 0

    def has(self, name: str) -> bool:
        """Return whether a switch is given and on."""
        return bool(self._known.get(name, False))

    def ratio(self, name: str) -> float:
        """Return a factor; 1 if it is not given."""
        value = self._known.get(name)
        return float(value) if isinstance(value, (int, float)) else 1.0

    def entries(self, name: str) -> list[Any]:
        """Return a list; empty if it is not given."""
        value = self._known.get(name)
        return list(value) if isinstance(value, (list, tuple)) else []

    def each(self, name: str, count: int) -> list[Any]:
        """Return a list with a value for each layer; empty if it is not given.

        Raises:
            UserError: the list is shorter.
        """
        found = self.entries(name)
        if found and len(found) < count:
            raise UserError(
                f"The model's config.json has {len(found):,} {name} for {count:,} layers.", _HINT
            )
        return found[:count]

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a mapping; empty if it is not given."""
        value = self._known.get(name)
        return value if isinstance(value, Mapping) else {}
