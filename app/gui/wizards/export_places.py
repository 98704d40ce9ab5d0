"""Where an export is made, why not elsewhere, and the folder that it comes to."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QButtonGroup,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)

from app.flows.export import PlaceRow
from app.gui.theme import Theme
from app.gui.widgets.answer_field import TICK_INDENT_PX
from app.gui.widgets.parts import Button, make_label, make_scroll


class PlacesPage(QWidget):
    edited = Signal()

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._group = QButtonGroup(self)
        self.nodes: dict[str, QRadioButton] = {}
        self._wanted = ""
        self.folder = QLineEdit()
        self.folder.setAccessibleName("Folder for the result")
        self.folder.textEdited.connect(lambda text: self.edited.emit())
        self._rows = QVBoxLayout()
        self._rows.setSpacing(2)
        self._note = make_label("Looking at the nodes\u2026", "muted", wraps=True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addWidget(make_label("On which node", "subheading"))
        column.addWidget(self._note)
        body = QWidget()
        body.setObjectName("content")
        rows = QVBoxLayout(body)
        rows.setContentsMargins(0, 0, 8, 0)
        rows.addLayout(self._rows)
        rows.addStretch(1)
        column.addWidget(make_scroll(body), 1)
        column.addWidget(make_label("Into which folder of this PC", "subheading"))
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.folder, 1)
        row.addWidget(Button(theme, "Choose\u2026", self._browse, icon="folder"))
        column.addLayout(row)
        column.addWidget(
            make_label(
                "The folder appears when it is whole, with a card that says what was measured. "
                "Several formats get a folder each in it.",
                "caption",
                wraps=True,
            )
        )

    def node(self) -> str:
        return next((name for name, one in self.nodes.items() if one.isChecked()), "")

    def choose(self, node: str, folder: str) -> None:
        self._wanted = node
        self.folder.setText(folder)

    def show_places(self, rows: Sequence[PlaceRow]) -> None:
        """Show the nodes, those that can first."""
        wanted = self.node() or self._wanted
        while (item := self._rows.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        self.nodes = {}
        able = [row for row in rows if not row.problem]
        self._note.setText(
            "The files are where the checkpoint lies; the quickest node stands first."
            if able
            else "No node can make this now."
        )
        self._add("", "The quickest that can", "", is_able=bool(able))
        for row in rows:
            self._add(row.node, row.node, row.problem or row.words, is_able=not row.problem)
        chosen = self.nodes.get(wanted)
        (chosen if chosen is not None and chosen.isEnabled() else self.nodes[""]).setChecked(True)

    def _add(self, node: str, title: str, words: str, *, is_able: bool) -> None:
        button = QRadioButton(title)
        button.setEnabled(is_able)
        button.setAccessibleDescription(words)
        button.toggled.connect(lambda checked: self.edited.emit() if checked else None)
        self._group.addButton(button)
        self._rows.addWidget(button)
        if words:
            label = make_label(words, "caption", wraps=True)
            label.setContentsMargins(TICK_INDENT_PX, 0, 0, 4)
            self._rows.addWidget(label)
        self.nodes[node] = button

    def _browse(self) -> None:
        chosen, _ = QFileDialog.getSaveFileName(self, "Folder for the result", self.folder.text())
        if chosen:
            self.folder.setText(chosen)
            self.edited.emit()
