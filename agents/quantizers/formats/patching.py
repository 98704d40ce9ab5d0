"""Replace a name of a package temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside the block.

    Raises:
        AttributeError: the name does not exist, for example in another version.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
