"""Key: the complete definition of one key of the run file, written at its field in `spec.py`.

The form, `--set`, the guide, the limits and the changes that a resume allows are derived from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

KeyKind = Literal["text", "whole", "decimal", "tick", "choice", "names", "numbers", "sources"]
MAX_COUNT = 10**15
"""Maximum of a whole number without its own limit. It is far beyond any use, so that arithmetic of
a plan cannot overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Annotation of a field of the run file."""

    label: str
    """Name on the screen."""
    help: str
    """Meaning and a good value, in one or two sentences."""
    group: str
    """Section of the form; one of `GROUPS`."""
    details: str = ""
    """Text for the guide alone, in Markdown."""
    choices: tuple[tuple[str, str], ...] = ()
    """Values that the form offers, each with its summary."""
    unit: str = ""
    placeholder: str = ""
    """Meaning of an empty field, or an example value."""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower limit."""
    below: float | None = None
    """Exclusive upper limit."""
    reason: str = ""
    """Reason for the maximum, appended to its message."""
    names: Literal["", "file", "folder", "node"] = ""
    """Kind of object that the value names, so that the form offers candidates; empty: a plain
    value."""
    is_wide: bool = False
    """True if the field takes a whole line of the form."""
    after: str = ""
    """Key after which the form shows this one; empty: the order of the fields."""
    only_with: tuple[str, tuple[str, ...]] | None = None
    """Another key, and its values with which this key has an effect; None: always."""
    may_change: bool = False
    """True if a resume may change it: it changes no number, or only the last bits, or only later
    numbers."""
    is_later: bool = False
    """True if older checkpoints lack it; they were trained with its default."""

    def find_excess(self, value: float) -> str:
        """Return the limit that a number violates, such as `at least 1`; empty: it is within
        limits.

        >>> Key(label="", help="", group="", minimum=0, below=1).find_excess(1)
        'from 0 to below 1'
        """
        if self.minimum is not None and self.below is not None:
            within = self.minimum <= value < self.below
            return "" if within else f"from {self.minimum} to below {self.below}"
        if self.minimum is not None and value < self.minimum:
            return f"at least {self.minimum}"
        if self.above is not None and value <= self.above:
            return f"above {self.above}"
        maximum = MAX_COUNT if self.maximum is None and isinstance(value, int) else self.maximum
        if maximum is not None and value > maximum:
            return f"at most {maximum:,}{self.reason}"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKey:
    """A key of the run file, with its type and default."""

    name: str
    """Dotted name, such as `adapter.rank`."""
    about: Key
    hint: Any
    """Type of the field, without the annotation."""
    default: Any
    """`dataclasses.MISSING` if the key is required."""

    @property
    def options(self) -> tuple[Any, ...]:
        """Types of a value that is not None."""
        is_union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        found = typing.get_args(self.hint) if is_union else (self.hint,)
        return tuple(option for option in found if option is not type(None))

    @property
    def is_optional(self) -> bool:
        """True if None is a value."""
        return type(None) in typing.get_args(self.hint)

    @property
    def words(self) -> tuple[Any, ...]:
        """Values of a closed list, or words that stand for other values."""
        literals = [option for option in self.options if typing.get_origin(option) is Literal]
        return tuple(word for literal in literals for word in typing.get_args(literal))

    @property
    def kind(self) -> KeyKind:
        """Kind of value."""
        for option in self.options:
            if typing.get_origin(option) is tuple:
                item = typing.get_args(option)[0]
                if dataclasses.is_dataclass(item):
                    return "sources"
                return "numbers" if item is float else "names"
        if self.words:
            return "choice"
        kinds: dict[Any, KeyKind] = {str: "text", int: "whole", float: "decimal", bool: "tick"}
        return kinds[self.options[0]]

    def value_in(self, spec: Any) -> Any:
        """Return the value of this key in a RunSpec."""
        return operator.attrgetter(self.name)(spec)


# Resolving annotations is slow, and the result never changes.
@functools.cache
def keys_of(cls: type) -> Mapping[str, RunKey]:
    """Return the keys of a dataclass and of its sections by dotted name, in the order of fields."""
    found: dict[str, RunKey] = {}
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            for key in keys_of(typing.cast(type, hint)).values():
                name = f"{field.name}.{key.name}"
                found[name] = dataclasses.replace(key, name=name)
            continue
        plain, about = typing.get_args(hint)
        found[field.name] = RunKey(name=field.name, about=about, hint=plain, default=field.default)
    return types.MappingProxyType(found)


def check_limits(spec: Any) -> None:
    """Check every number of a section of the run file against the limits of its key.

    Raises:
        ValueError: names the key, the value and the limit.
    """
    for name, key in keys_of(spec.__class__).items():
        if "." in name:
            continue  # each section checks its own keys
        value = getattr(spec, name)
        for number in value if isinstance(value, tuple) else (value,):
            # NaN compares false with every limit.
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name} is {number}; it must be a finite number")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and (wanted := key.about.find_excess(value)):
            raise ValueError(f"{name} is {_shown(value)}; it must be {wanted}")


def _shown(value: float) -> str:
    # A longer number would fill the screen, and Python refuses to print over 4,300 digits.
    is_long = isinstance(value, int) and value.bit_length() > 200
    return "a number of more than 60 digits" if is_long else str(value)
