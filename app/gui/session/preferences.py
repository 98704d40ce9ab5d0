"""The settings as the window has them: read once before it opens, told onwards when they change."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QObject, Signal

from app.settings import SETTINGS, Settings, Value


class Preferences(QObject):
    """Lives on the Qt thread; the main window has the core store each change."""

    changed = Signal(str)
    """The key of a setting that has another value now."""

    def __init__(self, values: Mapping[str, Value] | None = None, problem: str = "") -> None:
        super().__init__()
        self._values = {setting.key: setting.default for setting in SETTINGS} | dict(values or {})
        self.problem = problem
        """Why the stored ones could not be read; empty: they were."""

    def get(self, key: str) -> Value:
        return self._values[key]

    def set(self, key: str, value: Value) -> None:
        """Take an allowed value; the same one again changes nothing."""
        if self._values[key] != value:
            self._values[key] = value
            self.changed.emit(key)


def preferences_of(settings: Settings) -> Preferences:
    """Return what is stored."""
    values = {setting.key: settings.get(setting.key) for setting in SETTINGS}
    return Preferences(values, settings.problem)
