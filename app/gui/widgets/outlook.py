"""What follows from the answers of a form, beside it: figures, and a look at the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtWidgets import QFrame, QLabel, QVBoxLayout

from app.gui.theme import Theme
from app.gui.widgets.parts import Button, make_label

WIDTH_PX = 280


class Outlook(QFrame):
    """Says what will happen when the form is sent off."""

    def __init__(self, theme: Theme, look: Callable[[], object]) -> None:
        super().__init__()
        self.setObjectName("panel")
        self.setFixedWidth(WIDTH_PX)
        self._values: dict[str, QLabel] = {}
        self._rows = QVBoxLayout()
        self._rows.setSpacing(12)
        self.look = Button(
            theme,
            "Look at the data\u2026",
            look,
            icon="search",
            tip="Show what is recognised, and three rows with what is learned of them",
        )
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 16, 20, 16)
        column.setSpacing(12)
        column.addWidget(make_label("What will happen", "heading"))
        column.addLayout(self._rows)
        column.addWidget(self.look)
        column.addStretch(1)
        column.addWidget(
            make_label(
                "The model and the data are copied to each node once. The run goes on when this "
                "window is closed.",
                "caption",
                wraps=True,
            )
        )

    def show_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show (label, value); a label that is missing now keeps its last value."""
        for label, value in rows:
            if label not in self._values:
                self._values[label] = make_label(wraps=True)
                pair = QVBoxLayout()
                pair.setSpacing(2)
                pair.addWidget(make_label(label, "caption"))
                pair.addWidget(self._values[label])
                self._rows.addLayout(pair)
            self._values[label].setText(value)
