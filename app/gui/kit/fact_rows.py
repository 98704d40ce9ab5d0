"""A two-column grid of names and values that can be selected and copied."""

from __future__ import annotations

from collections.abc import Iterable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel

from app.gui.kit.primitives import make_label, make_selectable


class FactRows(QGridLayout):
    def __init__(self, across_px: int, down_px: int) -> None:
        """Create an empty grid with this spacing between columns and between rows, in pixels."""
        super().__init__()
        self.setHorizontalSpacing(across_px)
        self.setVerticalSpacing(down_px)
        self.setColumnStretch(1, 1)
        self._labels: list[QLabel] = []

    def show_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Replace all rows with these (name, value) pairs."""
        for label in self._labels:
            self.removeWidget(label)
            label.hide()  # deleteLater waits for the event loop; until then it would overlap
            label.deleteLater()
        self._labels = []
        for place, (name, value) in enumerate(rows):
            pair = (make_label(name, "muted"), make_selectable(make_label(value, wraps=True)))
            pair[1].setAccessibleName(f"{name}: {value}")
            for side, label in enumerate(pair):
                self.addWidget(label, place, side, Qt.AlignmentFlag.AlignTop)
                self._labels.append(label)
