"""Copy an artifact to a node or to a folder on this PC."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtWidgets import (
    QDialog,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)

from app.artifact import ArtifactSnapshot
from app.flows.export import place_folder
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, make_dialog_buttons, make_label
from app.gui.kit.theme import Theme
from app.text import show_bytes

WIDTH_PX = 540


class CopyArtifactDialog(QDialog):
    """Asks for the destination of a copy."""

    def __init__(
        self, theme: Theme, parent: QWidget, artifact: ArtifactSnapshot, nodes: Sequence[str]
    ) -> None:
        super().__init__(parent)
        self.setWindowTitle(f"Copy {artifact.label}")
        # Height 0: the layout enforces the height that it needs.
        self.resize(WIDTH_PX, 0)
        self.to_node = QRadioButton("To a node")
        self.node = ChoiceBox()
        self.node.addItems(list(nodes))
        self.node.setAccessibleName("Node")
        self.to_folder = QRadioButton("To a folder on this PC")
        self.folder = QLineEdit()
        self.folder.setAccessibleName("Folder for the copy")
        self.folder.setPlaceholderText("New folder")
        self.start = Button(theme, "Copy", self.accept, icon="copy", role="primary")
        self._browse = Button(theme, "Choose\u2026", self._choose, icon="folder")
        self._lay_out(theme, artifact)
        # Without nodes only a folder makes sense.
        (self.to_node if nodes else self.to_folder).setChecked(True)
        self.to_node.setEnabled(bool(nodes))
        self.to_node.toggled.connect(self._review)
        self.folder.textChanged.connect(self._review)
        self._review()

    def place(self) -> str:
        """Return the destination: a node's name, or a folder on this PC."""
        if self.to_node.isChecked():
            return self.node.currentText()
        return place_folder(self.folder.text())

    def _lay_out(self, theme: Theme, artifact: ArtifactSnapshot) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(8)
        column.addWidget(make_label("Copy to", "heading"))
        words = (
            f"{show_bytes(artifact.size_bytes)}. Every file is verified as it is copied. An "
            "interrupted copy continues where it stopped."
        )
        label = make_label(words, "muted", wraps=True)
        column.addWidget(label)
        column.addSpacing(8)
        for button, parts in (
            (self.to_node, (self.node,)),
            (self.to_folder, (self.folder, self._browse)),
        ):
            column.addWidget(button)
            row = QHBoxLayout()
            row.setContentsMargins(28, 0, 0, 8)
            row.setSpacing(8)
            row.addWidget(parts[0], 1)
            for part in parts[1:]:
                row.addWidget(part)
            column.addLayout(row)
        column.addSpacing(4)
        column.addLayout(make_dialog_buttons(theme, self, self.start))

    def _choose(self) -> None:
        # A save dialog, since the folder must not exist yet: Qt's folder dialog offers existing
        # ones.
        chosen, _ = QFileDialog.getSaveFileName(self, "Folder for the copy", self.folder.text())
        if chosen:
            self.folder.setText(chosen)

    def _review(self) -> None:
        is_node = self.to_node.isChecked()
        self.node.setEnabled(is_node)
        self.folder.setEnabled(not is_node)
        self._browse.setEnabled(not is_node)
        self.start.setEnabled(bool(self.place()))
