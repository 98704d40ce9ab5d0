"""The window's copy of the settings: read once before it opens, with a signal for changes."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QObject, Signal

from app.settings import SETTINGS, Settings, Value


class Preferences(QObject):
    """Belongs to the Qt thread; the main window asks the core to store each change."""

    changed = Signal(str)
    """Key of the setting whose value changed."""

    def __init__(self, values: Mapping[str, Value] | None = None, problem: str = "") -> None:
        super().__init__()
        self._values = {setting.key: setting.default for setting in SETTINGS} | dict(values or {})
        self.problem = problem
        """Error that prevented reading the stored settings; empty if there was none."""

    def get(self, key: str) -> Value:
        return self._values[key]

    def set(self, key: str, value: Value) -> None:
        """Set a value, which must be allowed; emit `changed` if it differs."""
        if self._values[key] != value:
            self._values[key] = value
            self.changed.emit(key)


def preferences_of(settings: Settings) -> Preferences:
    """Return the stored settings as preferences."""
    values = {setting.key: settings.get(setting.key) for setting in SETTINGS}
    return Preferences(values, settings.problem)
