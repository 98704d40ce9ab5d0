"""Inputs that ignore the mouse wheel, which scrolls the page below the pointer instead.

Qt gives combo boxes, number boxes and text boxes the focus when the wheel turns over them. A user
who scrolls a form and then types would change the box under the pointer. These boxes take the
focus by click and Tab only; choices and numbers leave the wheel to the page.
"""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QComboBox, QDoubleSpinBox, QPlainTextEdit, QSpinBox

from app.gui.kit.primitives import set_tooltip

TEXT_PX = 8
"""Space before the number in its box, in pixels, which style sheets cannot set."""


class ChoiceBox(QComboBox):
    """A combo box."""

    def __init__(self) -> None:
        super().__init__()
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        # The box may elide its text; the tooltip has all of it.
        self.currentTextChanged.connect(lambda text: set_tooltip(self, text))

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()


class NumberBox(QSpinBox):
    """A box for a whole number."""

    def __init__(self, **properties: Any) -> None:
        super().__init__(**properties)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.lineEdit().setTextMargins(TEXT_PX, 0, 0, 0)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()


class DecimalBox(QDoubleSpinBox):
    """A box for a number with decimals."""

    def __init__(self, **properties: Any) -> None:
        super().__init__(**properties)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.lineEdit().setTextMargins(TEXT_PX, 0, 0, 0)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()


class TextBox(QPlainTextEdit):
    """A box for several lines; the wheel scrolls it, without giving it the focus."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
