"""Side panel of the form: plan, summary, and the button for the data preview."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QLabel, QScrollArea, QVBoxLayout, QWidget

from app.gui.kit.primitives import Button, make_label, make_separator
from app.gui.kit.theme import Theme
from app.gui.new_run.plan_notes import AdviceLines, Notes
from app.gui.new_run.plan_view import PlanView

WIDTH_PX = 360
LOST, UNUSABLE = "Rows that would be lost", "The data cannot be used yet"
"""Titles of the notes about the data."""


class Outlook(QFrame):
    """Shows what starting the run would do."""

    advised = Signal(object)
    """The user takes an offer about the data: new values by dotted key of the run file."""

    def __init__(self, theme: Theme, look: Callable[[], object]) -> None:
        super().__init__()
        self.setObjectName("panel")
        self.setFixedWidth(WIDTH_PX)
        self.plan = PlanView(theme)
        self.left_out = Notes(LOST, role="problem")
        self.counted = Notes("Rows")
        for notes in (self.left_out, self.counted):
            notes.show_notes(())
        self.offers = AdviceLines(theme, self.advised.emit)
        self.left_out.add(self.offers)
        self._values: dict[str, QLabel] = {}
        self._rows = QVBoxLayout()
        self._rows.setSpacing(12)
        self.look = Button(
            theme,
            "Preview data\u2026",
            look,
            icon="search",
            tip="Show the detected format and three rows, with the learned text marked",
        )
        frame = QVBoxLayout(self)
        # Keeps the scroll area off the border, which the style draws inside this frame.
        frame.setContentsMargins(1, 1, 1, 1)
        frame.addWidget(self._make_scroll())

    def _make_scroll(self) -> QScrollArea:
        body = QWidget()
        body.setObjectName("content")
        column = QVBoxLayout(body)
        column.setContentsMargins(19, 15, 19, 15)
        column.setSpacing(12)
        column.addWidget(make_label("Plan", "heading"))
        column.addWidget(self.left_out)
        column.addWidget(self.plan)
        column.addWidget(self.counted)
        column.addWidget(make_separator())
        column.addWidget(make_label("Summary", "heading"))
        column.addLayout(self._rows)
        column.addWidget(self.look)
        column.addStretch(1)
        column.addWidget(
            make_label(
                "The model and the data are copied to each node once. The run continues when "
                "this window is closed.",
                "caption",
                wraps=True,
            )
        )
        scroll = QScrollArea()
        scroll.setWidget(body)
        scroll.setWidgetResizable(True)
        # Tab goes to the buttons inside, not to the scroll area.
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        return scroll

    def show_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show (label, value) rows; labels missing from `rows` keep their last value."""
        for label, value in rows:
            if label not in self._values:
                self._values[label] = make_label(wraps=True)
                pair = QVBoxLayout()
                pair.setSpacing(2)
                pair.addWidget(make_label(label, "caption"))
                pair.addWidget(self._values[label])
                self._rows.addLayout(pair)
            self._values[label].setText(value)
