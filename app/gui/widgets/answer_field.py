"""One question of a form: label, input, what it means, what is wrong with the answer."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QVBoxLayout,
    QWidget,
)

from app.events import NodeSnapshot
from app.flows.new_run import ALL_NODES, Finding, split_names
from app.flows.new_run_fields import Field
from app.gui.tables.node_columns import describe_hardware
from app.gui.theme import Theme
from app.gui.widgets.parts import Button, make_label, set_role


class AnswerField(QWidget):
    """Asks one Field; `answer` is the text as typed."""

    edited = Signal()

    def __init__(self, theme: Theme, field: Field, nodes: Sequence[NodeSnapshot]) -> None:
        super().__init__()
        self.field = field
        self.was_touched = False
        self._theme = theme
        self._boxes: dict[str, QCheckBox] = {}
        self._online = {node.name for node in nodes if node.state == "online"}
        self.input = self._make_input(nodes)
        self.input.setAccessibleName(field.label)
        self.input.setAccessibleDescription(field.help)
        self._finding = make_label(role="problem", wraps=True)
        self._finding.hide()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        column.addWidget(make_label(field.label, "subheading"))
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.input, 1)
        if field.unit:
            row.addWidget(make_label(field.unit, "muted"))
        if field.kind == "path":
            row.addWidget(Button(theme, "Choose\u2026", self._choose, icon="folder"))
        column.addLayout(row)
        column.addWidget(self._finding)
        column.addWidget(make_label(field.help, "caption", wraps=True))
        column.addStretch(1)

    def answer(self) -> str:
        if self.field.kind == "nodes":
            chosen = [name for name, box in self._boxes.items() if box.isChecked()]
            return ALL_NODES if len(chosen) == len(self._boxes) else ", ".join(chosen)
        if isinstance(self.input, QComboBox):
            return str(self.input.currentData())
        assert isinstance(self.input, QLineEdit)
        return self.input.text()

    def set_answer(self, text: str) -> None:
        if self.field.kind == "nodes":
            for name, box in self._boxes.items():
                is_meant = name in self._online if text == ALL_NODES else name in split_names(text)
                box.setChecked(is_meant)
        elif isinstance(self.input, QComboBox):
            self.input.setCurrentIndex(max(self.input.findData(text), 0))
        elif isinstance(self.input, QLineEdit):
            self.input.setText(text)

    def show_finding(self, finding: Finding | None) -> None:
        """Show what is wrong; None: nothing."""
        self._finding.setText(finding.text if finding else "")
        self._finding.setVisible(finding is not None)
        is_bad = finding is not None and finding.severity == "error"
        name = "problem" if is_bad else "advice"
        if self._finding.objectName() != name:
            self._finding.setObjectName(name)
            self._finding.style().polish(self._finding)
        set_role(self.input, "bad", is_bad)

    def _make_input(self, nodes: Sequence[NodeSnapshot]) -> QWidget:
        if self.field.kind == "choice":
            combo = QComboBox()
            for value, words in self.field.choices:
                combo.addItem(words, value)
            combo.currentIndexChanged.connect(lambda index: self._touch())
            return combo
        if self.field.kind == "nodes":
            return self._make_node_boxes(nodes)
        line = QLineEdit()
        line.setPlaceholderText(self.field.placeholder)
        line.textEdited.connect(lambda text: self._touch())
        return line

    def _make_node_boxes(self, nodes: Sequence[NodeSnapshot]) -> QWidget:
        box = QWidget()
        column = QVBoxLayout(box)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        for node in nodes:
            state = "" if node.state == "online" else f" ({node.state})"
            check = QCheckBox(f"{node.name}{state} \u00b7 {describe_hardware(node)}")
            check.setChecked(node.state == "online")
            check.toggled.connect(lambda checked: self._touch())
            column.addWidget(check)
            self._boxes[node.name] = check
        if not nodes:
            column.addWidget(make_label("No node was added yet.", "muted"))
        return box

    def _touch(self) -> None:
        self.was_touched = True
        self.edited.emit()

    def _choose(self) -> None:
        if self.field.key == "model":
            chosen = QFileDialog.getExistingDirectory(self, "Folder of the model")
        else:
            chosen, _ = QFileDialog.getOpenFileName(self, self.field.label)
        if chosen:
            self.set_answer(chosen)
            self._touch()
