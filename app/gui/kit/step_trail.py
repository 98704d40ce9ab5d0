"""The numbered steps of a wizard in a row, the current one highlighted."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtWidgets import QHBoxLayout, QWidget

from app.gui.kit.primitives import make_label, set_style_property


class StepTrail(QWidget):
    def __init__(self, steps: Sequence[tuple[str, str]]) -> None:
        """Create one label for each (key, name) pair."""
        super().__init__()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(20)
        self._marks = {
            key: make_label(f"{place + 1}  {name}", "step")
            for place, (key, name) in enumerate(steps)
        }
        for label in self._marks.values():
            row.addWidget(label)
        row.addStretch(1)

    def show_step(self, current: str) -> None:
        """Highlight the step with this key."""
        for key, label in self._marks.items():
            set_style_property(label, "now", key == current)
