"""Export: in which format, of which types, into which folder."""

from __future__ import annotations

from PySide6.QtCore import QDir
from PySide6.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QDialog,
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)

from app.events import RunSnapshot
from app.flows.export import FORMATS, Answers, review, suggest_folder
from app.gui.theme import Theme
from app.gui.widgets.answer_field import TICK_INDENT_PX
from app.gui.widgets.parts import Button, make_label


class ExportDialog(QDialog):
    """Asks; what the answers mean is in `app.flows.export`."""

    def __init__(self, theme: Theme, parent: QWidget, run: RunSnapshot) -> None:
        super().__init__(parent)
        self._run, self._home = run, QDir.homePath()
        self._was_named = False
        self.setWindowTitle(f"Export {run.name}")
        self.resize(620, 640)
        self._group = QButtonGroup(self)
        self.formats = {one.key: QRadioButton(one.label) for one in FORMATS}
        self.boxes: dict[str, QCheckBox] = {}
        self._types_box = QWidget()
        self._types = QGridLayout()
        self.folder = QLineEdit()
        self.folder.setAccessibleName("Folder for the result")
        self._problem = make_label(role="problem", wraps=True)
        self.start = Button(theme, "Export", self.accept, icon="export", role="primary")
        self._lay_out(theme)
        self.formats["merged"].setChecked(True)
        for button in self.formats.values():
            button.toggled.connect(lambda checked: self._choose_format() if checked else None)
        self.folder.textEdited.connect(self._name_folder)
        self._choose_format()

    def answers(self) -> Answers:
        """Return what was chosen."""
        return Answers(
            to=next(key for key, button in self.formats.items() if button.isChecked()),
            types=tuple(kind for kind, box in self.boxes.items() if box.isChecked()),
            folder=self.folder.text().strip(),
        )

    def _lay_out(self, theme: Theme) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(8)
        column.addWidget(make_label("What is it for", "heading"))
        for one in FORMATS:
            button = self.formats[one.key]
            button.setAccessibleDescription(one.help)
            self._group.addButton(button)
            words = make_label(one.help, "caption", wraps=True)
            words.setContentsMargins(TICK_INDENT_PX, 0, 0, 0)
            pair = QVBoxLayout()
            pair.setSpacing(1)
            pair.addWidget(button)
            pair.addWidget(words)
            column.addLayout(pair)
        below = QVBoxLayout(self._types_box)
        below.setContentsMargins(0, 8, 0, 0)
        below.setSpacing(8)
        below.addWidget(make_label("Of which type", "heading"))
        below.addLayout(self._types)
        self._types.setHorizontalSpacing(24)
        self._types.setVerticalSpacing(6)
        column.addWidget(self._types_box)
        column.addSpacing(8)
        column.addWidget(make_label("Where to", "heading"))
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.folder, 1)
        row.addWidget(Button(theme, "Choose\u2026", self._browse, icon="folder"))
        column.addLayout(row)
        column.addWidget(
            make_label(
                "It is made on a node that has the newest checkpoint, measured against the "
                "original there, and brought to this PC with a card that says what was measured.",
                "muted",
                wraps=True,
            )
        )
        column.addWidget(self._problem)
        column.addStretch(1)
        buttons = QHBoxLayout()
        buttons.setSpacing(8)
        buttons.addStretch(1)
        buttons.addWidget(Button(theme, "Cancel", self.reject))
        buttons.addWidget(self.start)
        column.addLayout(buttons)

    def _choose_format(self) -> None:
        """Offer the types of the format, and a folder named after it."""
        chosen = review(Answers(to=self.answers().to))
        for box in self.boxes.values():
            self._types.removeWidget(box)
            box.deleteLater()
        self.boxes = {}
        for place, (kind, words) in enumerate(chosen.types):
            box = QCheckBox(words)
            box.setChecked(kind in chosen.usual)
            box.toggled.connect(lambda checked, kind=kind: self._choose_type(kind, checked))
            self._types.addWidget(box, place // 2, place % 2)
            self.boxes[kind] = box
        self._types_box.setVisible(bool(chosen.types))
        if not self._was_named:
            self.folder.setText(suggest_folder(self._home, self._run.name, self.answers().to))
        self._review()

    def _choose_type(self, kind: str, checked: bool) -> None:
        if checked and review(self.answers()).takes_one:
            for other, box in self.boxes.items():
                if other != kind:
                    box.setChecked(False)
        self._review()

    def _name_folder(self) -> None:
        self._was_named = True
        self._review()

    def _browse(self) -> None:
        chosen, _ = QFileDialog.getSaveFileName(self, "Folder for the result", self.folder.text())
        if chosen:
            self.folder.setText(chosen)
            self._name_folder()

    def _review(self) -> None:
        found = review(self.answers())
        self._problem.setText(" ".join(found.problems.values()))
        self._problem.setVisible(bool(found.problems))
        self.start.setEnabled(found.is_ready)
