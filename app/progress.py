"""Callbacks by which slow work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

from agents.contract.messages import Progress

OnMessage = Callable[[str], None]
"""Callback with each sentence on the progress of slow work."""
OnProgress = Callable[[Progress], None]
"""Callback with each sentence and the phase of the work."""


def messages(report: OnMessage | None) -> OnProgress | None:
    """Return a callback that passes on the sentences alone."""
    return None if report is None else lambda said: report(said.message)
