"""One question of a form: label, input, explanation, and any problem with the answer."""

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

from agents.contract.key import RunKey
from agents.contract.spec import list_named, split_place
from app.events import NodeSnapshot
from app.flows.new_run import Finding
from app.flows.new_run_answers import ALL_NODES, NO, YES, split_names
from app.gui.forms.gpu_chips import GpuChips
from app.gui.forms.source_list import SourceList
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, ElidedLabel, make_label, set_style_property, set_tooltip
from app.gui.kit.theme import Theme
from app.gui.tables.node_columns import describe_hardware

TICK_INDENT_PX = 27
"""Indent that puts the explanation of a check box below its label, in pixels."""


class AnswerField(QWidget):
    """The widget of one key; `answer` returns its text as typed."""

    edited = Signal()

    def __init__(self, theme: Theme, key: RunKey, nodes: Sequence[NodeSnapshot] = ()) -> None:
        super().__init__()
        self.key = key
        self._is_tick, self._is_nodes = key.kind == "tick", key.about.names == "node"
        self.is_wide = key.about.is_wide or self._is_tick or bool(key.about.names)
        """True if it takes a whole line of the form."""
        self.was_touched = False
        self._theme = theme
        self._boxes: dict[str, QCheckBox] = {}
        self._known: set[str] = set()
        # Nodes online or not contacted yet; the others cannot take part.
        self._usable: set[str] = set()
        self._rows: dict[str, QWidget] = {}
        self._chips: dict[str, GpuChips] = {}
        # Hardware in words, for PCs without chips.
        self._labels: dict[str, ElidedLabel] = {}
        # What the form was last filled with; ticks follow it until the user changes one.
        self._wanted = ALL_NODES
        self.input = self._make_input()
        self.input.setAccessibleName(key.about.label)
        self.input.setAccessibleDescription(key.about.help)
        self._finding = make_label(role="problem", wraps=True)
        self._finding.hide()
        indent = TICK_INDENT_PX if self._is_tick else 0
        self._finding.setContentsMargins(indent, 0, 0, 0)
        explanation = make_label(key.about.help, "caption", wraps=True)
        explanation.setContentsMargins(indent, 0, 0, 0)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        if not self._is_tick:
            column.addWidget(make_label(key.about.label, "subheading"))
        self._row = self._make_row()
        column.addLayout(self._row)
        column.addWidget(self._finding)
        column.addWidget(explanation)
        column.addStretch(1)
        if self._is_nodes:
            self.show_nodes(nodes, are_known=bool(nodes))

    def answer(self) -> str:
        if self._is_nodes:
            ticked = [name for name, box in self._boxes.items() if box.isChecked()]
            chosen = [entry for name in ticked for entry in self._chips[name].list_entries()]
            # A start among all nodes does without those that are offline.
            is_all = set(chosen) == self._known or (
                bool(chosen) and not self.was_touched and set(chosen) == self._usable
            )
            return ALL_NODES if is_all else ", ".join(chosen)
        if isinstance(self.input, SourceList):
            return self.input.answer()
        if isinstance(self.input, QComboBox):
            return str(self.input.currentData())
        if isinstance(self.input, QCheckBox):
            return YES if self.input.isChecked() else NO
        assert isinstance(self.input, QLineEdit)
        return self.input.text()

    def set_answer(self, text: str) -> None:
        if self._is_nodes:
            self._set_nodes(text)
        elif isinstance(self.input, SourceList):
            self.input.set_answer(text)
        elif isinstance(self.input, QComboBox):
            if self.input.findData(text) < 0:  # run files allow values that the form does not offer
                self.input.addItem(text, text)
            self.input.setCurrentIndex(self.input.findData(text))
        elif isinstance(self.input, QCheckBox):
            self.input.setChecked(text == YES)
        elif isinstance(self.input, QLineEdit):
            self.input.setText(text)

    def fill_in(self, text: str) -> None:
        """Set the answer for the user, such as one chosen in a dialog."""
        self.set_answer(text)
        # `set_answer` emits no textEdited.
        self._touch()

    def add_button(self, button: Button) -> None:
        """Add a button after the input."""
        self._row.addWidget(button)

    def show_nodes(self, nodes: Sequence[NodeSnapshot], *, are_known: bool) -> None:
        """Offer these nodes; ticks that the user has set stay, others follow the nodes' states."""
        self._known = {node.name for node in nodes}
        self._usable = {node.name for node in nodes if node.state in ("online", "connecting")}
        chosen = list_named(split_names(self._wanted)) if self._wanted != ALL_NODES else ()
        for name in [name for name in self._rows if name not in (*self._known, *chosen)]:
            self._boxes.pop(name)
            self._chips.pop(name)
            row = self._rows.pop(name)
            row.hide()
            row.deleteLater()
        for node in nodes:
            words = node.name if node.state == "online" else f"{node.name} ({node.state})"
            self._offer(node.name, words, describe_hardware(node))
            gpus = node.facts.gpus if node.facts is not None else ()
            self._chips[node.name].show_gpus([gpu.name for gpu in gpus])
            self._labels[node.name].setVisible(not self._chips[node.name].is_used)
        # While they are not known, the finding below says so.
        self._no_nodes.setVisible(are_known and not nodes)
        if not self.was_touched:
            self._set_nodes(self._wanted)

    def _offer(self, name: str, words: str, hardware: str) -> None:
        box = self._boxes.get(name) or self._add_box(name, words, hardware)
        box.setText(words)
        set_tooltip(box, words)
        box.setAccessibleDescription(hardware)

    def _set_nodes(self, text: str) -> None:
        self._wanted = text
        entries = [split_place(entry) for entry in split_names(text)]
        names = [name for name, _ in entries]
        for name in names if text != ALL_NODES else ():
            if name not in self._boxes:  # from another PC: shown, to be unticked
                self._add_box(name, f"{name} (not among your nodes)")
        for name, box in self._boxes.items():
            # No edit by the user: the form fills them in.
            box.blockSignals(True)
            # An offline node cannot take part, so `all` ticks the others.
            box.setChecked(name in self._usable if text == ALL_NODES else name in names)
            box.blockSignals(False)
            pinned = [int(d.removeprefix("cuda:")) for n, d in entries if n == name and d]
            self._chips[name].choose(pinned or None)

    def show_finding(self, finding: Finding | None) -> None:
        """Show an error or advice below the input; None to clear it."""
        self._finding.setText(finding.text if finding else "")
        self._finding.setVisible(finding is not None)
        is_bad = finding is not None and finding.severity == "error"
        is_waiting = finding is not None and finding.severity == "waiting"
        name = "problem" if is_bad else "caption" if is_waiting else "advice"
        # The style sheet selects by name; Qt applies a new name only when the label is polished.
        if self._finding.objectName() != name:
            self._finding.setObjectName(name)
            self._finding.style().polish(self._finding)
        set_style_property(self.input, "bad", is_bad)

    def _make_row(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.input, 1)
        if self.key.about.unit:
            row.addWidget(make_label(self.key.about.unit, "muted"))
        if self.key.about.names in ("file", "folder"):
            row.addWidget(Button(self._theme, "Choose\u2026", self._choose, icon="folder"))
        return row

    def _make_input(self) -> QWidget:
        if self.key.kind == "choice":
            combo = ChoiceBox()
            for value, words in self.key.about.choices:
                combo.addItem(words, value)
            combo.currentIndexChanged.connect(lambda index: self._touch())
            return combo
        if self._is_nodes:
            return self._make_node_boxes()
        if self.key.kind == "sources":
            sources = SourceList(self._theme)
            sources.edited.connect(self._touch)
            return sources
        if self._is_tick:
            check = QCheckBox(self.key.about.label)
            check.setObjectName("tick")
            check.toggled.connect(lambda checked: self._touch())
            return check
        line = QLineEdit()
        line.setPlaceholderText(self.key.about.placeholder)
        # Not textChanged, which also fires for answers that the form fills in.
        line.textEdited.connect(lambda text: self._touch())
        return line

    def _make_node_boxes(self) -> QWidget:
        box = QWidget()
        self._node_column = QVBoxLayout(box)
        self._node_column.setContentsMargins(0, 0, 0, 0)
        self._node_column.setSpacing(2)
        self._no_nodes = make_label("No nodes yet.", "muted")
        self._node_column.addWidget(self._no_nodes)
        return box

    def _add_box(self, name: str, words: str, hardware: str = "") -> QCheckBox:
        check = QCheckBox(words)
        check.setAccessibleDescription(hardware)
        set_tooltip(check, words)
        check.setMinimumWidth(1)  # so that a long name does not widen the form
        check.toggled.connect(lambda checked: self._touch())
        line = QWidget()
        row = QHBoxLayout(line)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(check)
        label, chips = ElidedLabel(hardware, "muted"), GpuChips(name)
        chips.edited.connect(self._touch)
        row.addWidget(label, 1)
        row.addWidget(chips, 1)
        self._node_column.addWidget(line)
        self._boxes[name], self._rows[name] = check, line
        self._chips[name], self._labels[name] = chips, label
        return check

    def _touch(self) -> None:
        self.was_touched = True
        self.edited.emit()

    def _choose(self) -> None:
        if self.key.about.names == "folder":
            chosen = QFileDialog.getExistingDirectory(self, f"{self.key.about.label} folder")
        else:
            chosen, _ = QFileDialog.getOpenFileName(self, self.key.about.label)
        if chosen:
            self.fill_in(chosen)
