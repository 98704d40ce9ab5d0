"""Entries of the hub's search, and what a PC's cache holds, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agents.contract.hub import check_hub_id
from agents.contract.names import MAX_FILE_BYTES
from agents.contract.requests.hub import CachedKind, CachedRepo

MAX_LICENCE_CHARACTERS = 60
"""Maximum length of the name of a licence, in characters."""
# Bits of a number by its type in a safetensors file; a type of another name is of unknown size.
_BITS = {"BOOL": 8, "F4": 4, "F8": 8, "BF16": 16}
_TYPE = re.compile(r"[A-Z]+(\d{1,3})")
_ROWS = re.compile(r"n[<>]\d{1,6}[KMBT]|\d{1,6}[KMBT]<n<\d{1,6}[KMBT]")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubItem:
    """A model or data set on the hub. All texts are of strangers."""

    kind: CachedKind
    name: str
    """Hub id."""
    size_bytes: int | None = None
    """Size of a model's weights, or of all files of a data set, in bytes."""
    num_parameters: int | None = None
    rows: str = ""
    """Number of rows of a data set as its author classes it, such as `10K<n<100K`."""
    licence: str = ""
    is_gated: bool = False
    """True if the hub gives it only to accounts that have accepted its licence."""
    downloads: int | None = None
    """Downloads in the last 30 days."""
    likes: int | None = None
    revision: str = ""
    """Commit of the main branch; empty: unknown."""
    is_cached: bool = False
    """True if this PC's cache has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubResults:
    items: tuple[HubItem, ...]
    has_more: bool = False
    """True if the hub has more than was asked for."""
    problem: str = ""
    """Reason why these are from this PC's cache alone; empty: the hub has answered."""
    hint: str = ""
    """What to do about the problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PcCache:
    """Models and data sets that a PC has."""

    pc: str
    """Name of the node; empty: this PC."""
    repos: tuple[CachedRepo, ...] = ()
    problem: str = ""
    """Reason why they are not known; empty: they are."""


Verdict = Literal["fits", "too-large", "unusable", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFit:
    """Whether this cluster can fine-tune a model, by the planner."""

    model: str
    verdict: Verdict
    text: str
    """Where and how it fits, or the reason."""
    adapter: str = ""
    """Method that fits, as in a run file; empty: none does."""
    nodes: tuple[str, ...] = ()
    """Nodes of the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedRepo:
    kind: CachedKind
    name: str
    pc: str
    """Name of the node that has it now; empty: this PC."""
    folder: str = ""
    """Folder of the revision in the cache; empty: not known."""


def read_item(kind: CachedKind, said: object) -> HubItem | None:
    """Return an entry of the hub's answer; None: it is not one.

    >>> read_item("model", {"id": "../x"}) is None
    True
    >>> item = read_item("model", {"id": "org/a", "safetensors": {"parameters": {"BF16": 5}}})
    >>> item.size_bytes, item.num_parameters
    (10, 5)
    """
    if not isinstance(said, dict) or not isinstance(said.get("id"), str):
        return None
    try:
        check_hub_id(said["id"])
    except ValueError:
        return None
    parameters = _read_parameters(said.get("safetensors")) if kind == "model" else {}
    sha = said.get("sha")
    return HubItem(
        kind=kind,
        name=said["id"],
        size_bytes=_weigh(parameters) if parameters else _read_count(said.get("usedStorage")),
        num_parameters=sum(parameters.values()) if parameters else None,
        rows=_read_tag(said, "size_categories:", _ROWS),
        licence=_read_tag(said, "license:", re.compile(r"[A-Za-z0-9._+-]+")),
        # `auto`, `manual`, or False.
        is_gated=said.get("gated") not in (None, False),
        downloads=_read_count(said.get("downloads")),
        likes=_read_count(said.get("likes")),
        revision=sha if isinstance(sha, str) and re.fullmatch("[0-9a-f]{40}", sha) else "",
    )


def _read_count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MAX_FILE_BYTES else None


def _read_parameters(said: object) -> dict[str, int]:
    """Return the number of parameters by type."""
    parameters = said.get("parameters") if isinstance(said, dict) else None
    if not isinstance(parameters, dict):
        return {}
    counts = {name: _read_count(count) for name, count in list(parameters.items())[:32]}
    return {name: count for name, count in counts.items() if count}


def _weigh(parameters: Mapping[str, int]) -> int | None:
    total = 0
    for name, count in parameters.items():
        found = _TYPE.match(name)
        bits = _BITS.get(name) or (int(found[1]) if found else 0)
        if not bits:
            return None
        total += count * bits // 8
    return total


def _read_tag(said: Mapping[str, Any], start: str, form: re.Pattern[str]) -> str:
    tags = said.get("tags")
    for tag in tags[:1000] if isinstance(tags, list) else ():
        if isinstance(tag, str) and tag.startswith(start):
            text = tag.removeprefix(start)[:MAX_LICENCE_CHARACTERS]
            return text if form.fullmatch(text) else ""
    return ""
