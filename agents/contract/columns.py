"""Entries of `data.columns`: which column of the data has which of the names that formats read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WANTED = ("messages", "instruction", "input", "output", "system", "text", "chosen", "rejected")
"""Names to which a column can be mapped."""
_ROLES = ("system", "user", "assistant", "tool")
_ROLE_PREFIX = "roles."


@dataclass(frozen=True, slots=True)
class ColumnNames:
    columns: dict[str, str]
    """Wanted name by the name in the data."""
    roles: dict[str, str]
    """Role of a message by the name in the data."""


def parse_columns(entries: Sequence[str]) -> ColumnNames:
    """Return the names that entries such as `instruction=question` map.

    Raises:
        ValueError: an entry has another form, or an unknown wanted name.

    >>> parse_columns(["instruction=question", "roles.user=customer"])
    ColumnNames(columns={'question': 'instruction'}, roles={'customer': 'user'})
    """
    found = ColumnNames({}, {})
    for entry in entries:
        wanted, _, name = (part.strip() for part in entry.partition("="))
        role = wanted.removeprefix(_ROLE_PREFIX)
        if not name:
            raise ValueError(
                f"columns has {entry!r}; it must be NAME=COLUMN, such as instruction=question"
            )
        if role != wanted and role in _ROLES:
            found.roles[name] = role
        elif wanted in WANTED:
            found.columns[name] = wanted
        else:
            known = ", ".join((*WANTED, *(f"{_ROLE_PREFIX}{role}" for role in _ROLES)))
            raise ValueError(f"columns names {wanted!r}; it must be one of {known}")
    return found


def flatten_columns(mapping: dict[str, object]) -> list[str]:
    """Return the entries of a mapping, as a run file may write them.

    >>> flatten_columns({"instruction": "question", "roles": {"customer": "user"}})
    ['instruction=question', 'roles.user=customer']
    """
    entries = []
    for wanted, name in mapping.items():
        if isinstance(name, dict):  # roles are written as in the data: {customer: user}
            entries += [f"{wanted}.{role}={own}" for own, role in name.items()]
        else:
            entries.append(f"{wanted}={name}")
    return entries
