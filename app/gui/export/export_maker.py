"""Choice of the engine for AWQ, visible only while AWQ is chosen."""

from __future__ import annotations

from typing import cast

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QRadioButton, QVBoxLayout, QWidget

from agents.contract.formats import ENGINES, Engine
from app.flows.export import MAKERS
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
