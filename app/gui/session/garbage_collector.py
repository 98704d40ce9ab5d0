"""Garbage is collected on the Qt thread, and there only, for as long as the core has a thread.

Python's collector of reference cycles runs in whichever thread happens to allocate. A widget that
is part of a cycle was thus at times destroyed on the core's thread while Qt delivered events to
it, and the process crashed without a word, or the two threads waited for each other for ever.
calibre and pyqtgraph go the same way as we do here.
"""

from __future__ import annotations

import gc

from PySide6.QtCore import QObject, QTimer

POLL_MS = 100
"""How often it looks whether there is enough to collect."""


class MainThreadCollector(QObject):
    """Takes the collector over from now until `end`. Made on the Qt thread."""

    _num_active = 0

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        gc.disable()
        MainThreadCollector._num_active += 1
        self._timer = QTimer(self, interval=POLL_MS)
        self._timer.timeout.connect(collect_if_due)
        self._timer.start()

    def end(self) -> None:
        """Give the collector back to Python, unless another one still has it."""
        if not self._timer.isActive():
            return
        self._timer.stop()
        MainThreadCollector._num_active -= 1
        if not MainThreadCollector._num_active:
            gc.enable()


def collect_if_due() -> None:
    """Collect the oldest generation that Python itself would collect by now."""
    due = zip(gc.get_count(), gc.get_threshold(), strict=True)
    generations = [place for place, (count, limit) in enumerate(due) if limit and count > limit]
    if generations:
        gc.collect(generations[-1])
