"""Look whether the model and the data that a form names are there, once the hands rest."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QObject, QTimer, Signal

from app.gui.session.bridge import Bridge, Op

DEBOUNCE_MS = 300


class PathChecker(QObject):
    """Answers to the newest names only."""

    checked = Signal()
    """`missing` is that of the names as they stand."""

    def __init__(self, bridge: Bridge, parent: QObject) -> None:
        super().__init__(parent)
        self.missing: dict[str, str] = {}
        """Field key -> why it cannot be what it names."""
        self._bridge = bridge
        self._names: dict[str, str] = {}
        self._op: Op | None = None
        self._rest = QTimer(self, interval=DEBOUNCE_MS, singleShot=True)
        self._rest.timeout.connect(self._ask)

    def follow(self, names: Mapping[str, str]) -> None:
        """Look for `names` from now on; what is said of one that has changed is forgotten."""
        changed = {key for key in {*names, *self._names} if names.get(key) != self._names.get(key)}
        if changed:
            self.missing = {key: why for key, why in self.missing.items() if key not in changed}
            self._names = dict(names)
            self._rest.start()

    def _ask(self) -> None:
        if self._op is not None:
            self._op.cancel()
        names = dict(self._names)
        self._op = self._bridge.run(
            lambda core, report: core.library.find_missing(names), self._take
        )

    def _take(self, missing: dict[str, str]) -> None:
        if not self._rest.isActive() and missing != self.missing:
            self.missing = missing
            self.checked.emit()
