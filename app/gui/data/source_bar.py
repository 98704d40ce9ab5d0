"""Line of the Data page that names data and model: typed, or chosen in a dialog."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QLineEdit, QWidget

from app.gui.kit.primitives import Button, set_tooltip
from app.gui.kit.theme import Theme


class SourceBar(QWidget):
    wanted = Signal(str, str)
    """Names of data and model to open; the latter may be empty."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.data = _make_line("Data", "File, folder, or data set of the hub in the cache")
        self.model = _make_line("Model", "Folder of a model, whose tokenizer counts (optional)")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self.data, 3)
        for words, choose, tip in (
            ("File\u2026", self.choose_file, "Choose a data file"),
            ("Folder\u2026", self.choose_folder, "Choose a data folder"),
        ):
            row.addWidget(Button(theme, words, choose, tip=tip))
        row.addWidget(self.model, 2)
        tip = "Choose a model folder"
        row.addWidget(Button(theme, "Model\u2026", self._choose_model, tip=tip))
        tip = "Read the data, once more if it is open already"
        row.addWidget(Button(theme, "Open", self._open, icon="search", tip=tip))
        self.data.returnPressed.connect(self._open)
        self.model.returnPressed.connect(self._open)

    def show_names(self, data: str, model: str) -> None:
        """Show the names of what is open."""
        self.data.setText(data)
        self.model.setText(model)

    def choose_file(self) -> None:
        """Ask for a file with data, and open it."""
        chosen, _ = QFileDialog.getOpenFileName(self, "Data file")
        self._take_chosen(self.data, chosen)

    def choose_folder(self) -> None:
        """Ask for a folder with data, and open it."""
        self._take_chosen(self.data, QFileDialog.getExistingDirectory(self, "Data folder"))

    def _choose_model(self) -> None:
        self._take_chosen(self.model, QFileDialog.getExistingDirectory(self, "Model folder"))

    def _take_chosen(self, line: QLineEdit, chosen: str) -> None:
        if chosen:
            line.setText(chosen)
            if self.data.text():
                self._open()

    def _open(self) -> None:
        self.wanted.emit(self.data.text().strip(), self.model.text().strip())


def _make_line(name: str, hint: str) -> QLineEdit:
    line = QLineEdit()
    line.setPlaceholderText(hint)
    line.setAccessibleName(name)
    set_tooltip(line, hint)
    return line
