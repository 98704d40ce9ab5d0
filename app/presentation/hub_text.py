"""Describe entries of the hub, for the window and the command line."""

from __future__ import annotations

from agents.contract.requests.hub import CachedKind
from app.hub.hub_http import ENDPOINT
from app.hub.hub_item import HubFit, HubItem
from app.text import DASH, show_bytes, show_count


def describe_size(item: HubItem) -> str:
    """Describe the size of a model's weights, or of a data set."""
    parts = []
    if item.num_parameters:
        parts.append(show_count(item.num_parameters))
    if item.size_bytes is not None:
        parts.append(show_bytes(item.size_bytes))
    if item.rows:
        parts.append(show_rows(item.rows))
    return ", ".join(parts) or DASH


def show_rows(text: str) -> str:
    """Return the hub's class of a number of rows in words.

    >>> show_rows("10K<n<100K"), show_rows("n<1K"), show_rows("n>1T")
    ('10K to 100K rows', 'under 1K rows', 'over 1T rows')
    """
    least, _, most = text.partition("<n<")
    if most:
        return f"{least} to {most} rows"
    return f"{'under' if '<' in text else 'over'} {text.strip('n<>')} rows"


def describe_item(item: HubItem, fit: HubFit | None, has_token: bool | None) -> str:
    """Describe what to know about an entry before a run uses it.

    Args:
        item: the entry.
        fit: verdict of the planner; None: not judged.
        has_token: whether this PC has a token of the hub; None: not known yet.
    """
    parts = []
    if fit is not None:
        parts.append(f"Fits your PCs: {fit.text}" if fit.verdict == "fits" else fit.text)
    if item.is_cached:
        parts.append("It is on this PC already")
    elif item.is_gated:
        token = ", and a token of that account kept in Settings" if has_token is False else ""
        parts.append(f"Gated: its licence has to be accepted on its page first{token}")
    return " ".join(f"{part.rstrip('.')}." for part in parts)


def page_of(kind: CachedKind, name: str) -> str:
    """Return the address of an entry's page.

    >>> page_of("data", "org/rows")
    'https://huggingface.co/datasets/org/rows'
    """
    return f"{ENDPOINT}/{name}" if kind == "model" else f"{ENDPOINT}/datasets/{name}"


def describe_gate(item: HubItem) -> str:
    """Describe who may download an entry."""
    return "gated" if item.is_gated else "open"


def name_pc(node: str) -> str:
    """Return the name of a PC in a sentence.

    >>> name_pc(""), name_pc("alpha")
    ('this PC', 'alpha')
    """
    return node or "this PC"
