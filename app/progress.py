"""Callbacks by which slow work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

from agents.contract.messages import Progress

OnMessage = Callable[[str], None]
"""Callback for each sentence on the progress of slow work."""
OnProgress = Callable[[Progress], None]
"""Callback for each sentence with the phase of the work."""


def messages(report: OnMessage | None) -> OnProgress | None:
    """Return a callback that passes only the sentences to `report`."""
    return None if report is None else lambda progress: report(progress.message)
