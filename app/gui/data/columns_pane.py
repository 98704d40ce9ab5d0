"""Columns of the data, and the meaning that a run gives to each."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QGridLayout, QVBoxLayout, QWidget

from agents.contract.data import parse_columns
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import ElidedLabel, make_label, make_scroll_area
from app.presentation.rows_text import COLUMN_WORDS

AS_NAMED = "Automatic"


class ColumnsPane(QWidget):
    chosen = Signal(list)
    """Entries of the mapping after a choice of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, ChoiceBox] = {}
        self._others: list[str] = []
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(16)
        self._grid.setVerticalSpacing(8)
        self._grid.setColumnStretch(0, 1)
        body = QWidget()
        body.setObjectName("content")
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 12, 12, 12)
        column.setSpacing(12)
        words = "Choose what each column means. Rows are read again, and a new run takes it over."
        column.addWidget(make_label(words, "muted", wraps=True))
        column.addLayout(self._grid)
        column.addStretch(1)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(make_scroll_area(body))

    def show_columns(self, names: Sequence[str], entries: Sequence[str]) -> None:
        """Show the columns of the data with their meanings in a mapping."""
        meanings = parse_columns(entries).columns
        # Roles, and fields inside of a column, stay as they are mapped.
        self._others = [entry for entry in entries if entry.partition("=")[2].strip() not in names]
        if list(self.boxes) != list(names):
            self._offer(names)
        for name, box in self.boxes.items():
            box.blockSignals(True)
            box.setCurrentIndex(max(0, box.findData(meanings.get(name, ""))))
            box.blockSignals(False)

    def _offer(self, names: Sequence[str]) -> None:
        while (item := self._grid.takeAt(0)) is not None:
            if (old := item.widget()) is not None:
                old.hide()
                old.deleteLater()
        self.boxes = {}
        for place, name in enumerate(names):
            box = ChoiceBox()
            box.setAccessibleName(f"Meaning of {name}")
            box.setMinimumContentsLength(18)
            box.addItem(AS_NAMED, "")
            for wanted, words in COLUMN_WORDS.items():
                box.addItem(words, wanted)
            box.currentIndexChanged.connect(lambda index: self.chosen.emit(self.entries()))
            self.boxes[name] = box
            self._grid.addWidget(ElidedLabel(name), place, 0)
            self._grid.addWidget(box, place, 1)

    def entries(self) -> list[str]:
        """Return the mapping, one entry for each column with a meaning."""
        mapped = [
            f"{box.currentData()}={name}" for name, box in self.boxes.items() if box.currentData()
        ]
        return [*mapped, *self._others]
