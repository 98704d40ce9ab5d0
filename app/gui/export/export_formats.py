"""Formats and types of an export, each with its estimated size, time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QFrame,
    QGridLayout,
    QLabel,
    QRadioButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from agents.contract.formats import ENGINES, EXPORTS, Engine
from app.flows.export import MAKERS, offer_targets
from app.gui.forms.answer_field import TICK_INDENT_PX
from app.gui.kit.primitives import make_label


class MakerChoice(QWidget):
    edited = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.buttons: dict[str, QRadioButton] = {}
        column = QVBoxLayout(self)
        column.setContentsMargins(TICK_INDENT_PX, 4, 0, 0)
        column.setSpacing(2)
        for one in MAKERS:
            button = QRadioButton(f"With {one.label}")
            button.setAccessibleDescription(one.help)
            # Two buttons toggle at each change; report the one that became checked.
            button.toggled.connect(lambda checked: self.edited.emit() if checked else None)
            words = make_label(one.help, "caption", wraps=True)
            words.setContentsMargins(TICK_INDENT_PX, 0, 0, 4)
            column.addWidget(button)
            column.addWidget(words)
            self.buttons[one.key] = button
        self.choose(ENGINES[0])

    def engine(self) -> Engine:
        found = next(key for key, button in self.buttons.items() if button.isChecked())
        return cast(Engine, found)

    def choose(self, engine: str) -> None:
        """Restore an earlier answer."""
        self.buttons[engine].setChecked(True)


class FormatsPage(QWidget):
    """One check box per target; several can be chosen."""

    edited = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, QCheckBox] = {}
        self._notes: dict[str, QLabel] = {}
        self.maker = MakerChoice()
        self.maker.edited.connect(self.edited)
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 8, 0)
        column.setSpacing(4)
        for one in EXPORTS.values():
            column.addWidget(make_label(one.label, "subheading"))
            column.addWidget(make_label(one.summary, "caption", wraps=True))
            column.addLayout(self._make_grid(one.name))
            if len(one.engines) > 1:
                column.addWidget(self.maker)
                # Only AWQ has a choice of engines.
                self.maker.hide()
                self.boxes[one.name].toggled.connect(self.maker.setVisible)
            column.addSpacing(12)
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidget(body)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(scroll)

    def targets(self) -> tuple[str, ...]:
        return tuple(target for target, box in self.boxes.items() if box.isChecked())

    def engine(self) -> Engine:
        """Return the engine that makes AWQ."""
        return self.maker.engine()

    def choose(self, targets: tuple[str, ...], engine: Engine) -> None:
        self.maker.choose(engine)
        for target, box in self.boxes.items():
            box.setChecked(target in targets)

    def show_notes(self, notes: Mapping[str, str]) -> None:
        """Show the estimate of each target."""
        for target, text in notes.items():
            self._notes[target].setText(text)
            # The estimate is a label of its own, which a screen reader would not read with the
            # box.
            self.boxes[target].setAccessibleDescription(text)

    def _make_grid(self, to: str) -> QGridLayout:
        grid = QGridLayout()
        grid.setHorizontalSpacing(16)
        grid.setVerticalSpacing(2)
        grid.setColumnStretch(1, 1)
        for place, (target, words) in enumerate(offer_targets(to)):
            # A format without types has one box, whose text would repeat the heading above it.
            box = QCheckBox(words if ":" in target else "Export")
            box.setAccessibleName(words)
            box.toggled.connect(lambda checked: self.edited.emit())
            note = make_label(role="caption")
            note.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            grid.addWidget(box, place, 0)
            grid.addWidget(note, place, 1)
            self.boxes[target], self._notes[target] = box, note
        return grid
