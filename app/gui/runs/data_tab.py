"""Data of a run, as the first rank read it, and the way to all of its rows."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from agents.contract.data import DataPreview
from app.gui.kit.primitives import Button, make_label
from app.gui.kit.theme import Theme
from app.gui.new_run.data_view import DataView


class DataTab(QWidget):
    rows_wanted = Signal()
    """The user wants to look through all rows."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.view = DataView(theme)
        look = Button(
            theme,
            "Look through all rows",
            self.rows_wanted.emit,
            icon="search",
            role="link",
            tip="Open the Data page with the data of this run",
        )
        row = QHBoxLayout()
        row.addWidget(make_label("Rows of the data as a model learns them.", "muted"), 1)
        row.addWidget(look)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addLayout(row)
        column.addWidget(self.view, 1)

    def show_data(self, found: DataPreview | None) -> None:
        """Show a preview; None: not known yet."""
        self.view.show_data(found)
