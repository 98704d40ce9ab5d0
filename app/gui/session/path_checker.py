"""Check that the model and data files named in a form exist, once typing pauses."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QObject, QTimer, Signal

from app.core.library import FindMissing
from app.gui.session.bridge import Bridge, Op

DEBOUNCE_MS = 300
"""Pause in typing before paths are checked, in milliseconds."""


class PathChecker(QObject):
    """Reports on the newest names only; an older check is cancelled."""

    checked = Signal()
    """`missing` changed, and belongs to the current names."""

    def __init__(self, bridge: Bridge, parent: QObject) -> None:
        super().__init__(parent)
        self.missing: dict[str, str] = {}
        """Problem with the value of a field, by key of the field."""
        self._bridge = bridge
        self._names: dict[str, str] = {}
        self._op: Op | None = None
        self._debounce = QTimer(self, interval=DEBOUNCE_MS, singleShot=True)
        self._debounce.timeout.connect(self._start)

    def follow(self, names: Mapping[str, str]) -> None:
        """Check `names` after the next pause; forget results for those that changed."""
        changed = {key for key in {*names, *self._names} if names.get(key) != self._names.get(key)}
        if changed:
            self.missing = {key: why for key, why in self.missing.items() if key not in changed}
            self._names = dict(names)
            self._debounce.start()

    def _start(self) -> None:
        if self._op is not None:
            # A cancelled check reports nothing, so its result cannot replace a newer one.
            self._op.cancel()
        names = dict(self._names)
        self._op = self._bridge.do(FindMissing(names=names), self._finish)

    def _finish(self, missing: dict[str, str]) -> None:
        # A running timer means that the names have changed since: a newer check is on its way.
        if not self._debounce.isActive() and missing != self.missing:
            self.missing = missing
            self.checked.emit()
