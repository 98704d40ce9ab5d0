"""Offer the settings by which refused data can be read, with a button that takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agents.contract.spec import DataSpec
from app.errors import RacklessError
from app.gui.kit.banner import Banner
from app.presentation.offer_text import find_offer


def show_offer(
    banner: Banner, error: RacklessError, data: DataSpec, take: Callable[[Mapping[str, Any]], None]
) -> bool:
    """Show a refusal with what it offers; return False if it offers nothing.

    Args:
        banner: place for the message.
        error: refusal.
        data: settings of the refused data.
        take: takes the new values by dotted key of the run file.
    """
    offer = find_offer(error, data)
    if offer is None:
        return False
    action = (offer.label, lambda: take(offer.change)) if offer.change else None
    banner.show_message("error", str(error), offer.text, action)
    return True
