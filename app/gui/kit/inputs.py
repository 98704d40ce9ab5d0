"""Inputs that only a person's own hand changes: the wheel scrolls the page below the pointer.

Qt gives combo boxes, number boxes and text boxes the focus when the wheel turns over them. So
somebody who scrolls a form and then types would change whatever lay under the pointer. These take
the focus by click and Tab alone; choices and numbers leave the wheel to the page.
"""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QComboBox, QDoubleSpinBox, QPlainTextEdit, QSpinBox

from app.gui.kit.primitives import make_tooltip

TEXT_PX = 8
"""Space before the number in its box, in pixels, which style sheets cannot set."""


class ChoiceBox(QComboBox):
    """A combo box."""

    def __init__(self) -> None:
        super().__init__()
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        # The text may be elided.
        self.currentTextChanged.connect(lambda text: self.setToolTip(make_tooltip(text)))

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
