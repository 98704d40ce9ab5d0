"""Run Python's cycle collector on the Qt thread only, for as long as the core has its thread.

Python collects reference cycles in whichever thread happens to allocate. A widget in a cycle could
therefore be destroyed on the core's thread while Qt delivered events to it: the process crashed
without a message, or the two threads deadlocked. calibre and pyqtgraph use the same remedy.
"""

from __future__ import annotations

import gc

from PySide6.QtCore import QObject, QTimer

POLL_MS = 100
"""Interval between two checks of the thresholds, in milliseconds."""


class MainThreadCollector(QObject):
    """Replaces automatic collection from now until `end`; create it on the Qt thread."""

    # The collector is global to the process; each bridge (tests open several) has an instance.
    _num_active = 0

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        gc.disable()
        MainThreadCollector._num_active += 1
        self._timer = QTimer(self, interval=POLL_MS)
        self._timer.timeout.connect(collect_if_due)
        self._timer.start()

    def end(self) -> None:
        """Turn automatic collection on again, unless another instance is still active."""
        if not self._timer.isActive():
            return
        self._timer.stop()
        MainThreadCollector._num_active -= 1
        if not MainThreadCollector._num_active:
            gc.enable()


def collect_if_due() -> None:
    """Collect the oldest generation whose threshold, as set for Python itself, is exceeded."""
    due = zip(gc.get_count(), gc.get_threshold(), strict=True)
    generations = [place for place, (count, limit) in enumerate(due) if limit and count > limit]
    if generations:
        gc.collect(generations[-1])
